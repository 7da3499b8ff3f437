"""Every line is whole JSON, and a resumed run's file reads as if nothing had happened."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from megalith.core.runs import RunFolder
from megalith.train.metrics import MetricsWriter, read_metrics


def lines(folder: RunFolder) -> list[dict[str, Any]]:
    """The file by a parser that refuses NaN and Infinity, as JSON does."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    text = folder.metrics.read_text()
    assert text == "" or text.endswith("\n")
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path / "run")


def test_a_line_holds_kind_step_time_and_values(folder: RunFolder) -> None:
    with MetricsWriter(folder) as metrics:
        metrics.write("train", 10, loss=2.5, note="ü\u2028", samples=[1, 2])
    (line,) = lines(folder)
    assert line.pop("time") == pytest.approx(time.time(), abs=60)
    expected = {"kind": "train", "step": 10, "loss": 2.5, "note": "ü\u2028", "samples": [1, 2]}
    assert line == expected
    assert read_metrics(folder)[0]["note"] == "ü\u2028"


def test_a_line_is_readable_before_the_file_is_closed(folder: RunFolder) -> None:
    with MetricsWriter(folder) as metrics:
        metrics.write("train", 1, loss=2.0)
        assert [e["loss"] for e in read_metrics(folder)] == [2.0]


def test_what_is_not_finite_becomes_null_and_is_named(folder: RunFolder) -> None:
    with MetricsWriter(folder) as metrics:
        metrics.write(
            "train",
            1,
            loss=math.nan,
            grad_norm=torch.tensor(math.inf),
            lr=torch.tensor(0.5),
            by={"a": -math.inf, "b": [1.0, math.nan]},
        )
    (line,) = lines(folder)
    assert line["loss"] is None
    assert line["grad_norm"] is None
    assert line["lr"] == 0.5
    assert line["by"] == {"a": None, "b": [1.0, None]}
    assert line["nonfinite"] == ["loss", "grad_norm", "by.a", "by.b.1"]


def test_resuming_drops_what_comes_after_the_checkpoint(folder: RunFolder) -> None:
    def write(metrics: MetricsWriter, steps: range) -> None:
        for step in steps:
            metrics.write("train", step, loss=math.nan if step == 3 else 1 / step)
            if step % 4 == 0:
                metrics.write("validation", step, loss=2 / step)

    with MetricsWriter(folder) as metrics:
        write(metrics, range(1, 16))
    undisturbed = [{**line, "time": 0} for line in lines(folder)]
    with MetricsWriter(folder, resume_from=10) as metrics:
        assert max(line["step"] for line in lines(folder)) == 10
        write(metrics, range(11, 16))
    assert [{**line, "time": 0} for line in lines(folder)] == undisturbed


def test_a_new_run_starts_a_new_file(folder: RunFolder) -> None:
    for _ in range(2):
        with MetricsWriter(folder) as metrics:
            metrics.write("train", 1, loss=1.0)
    assert len(lines(folder)) == 1


def test_resuming_without_a_file_starts_one(folder: RunFolder) -> None:
    with MetricsWriter(folder, resume_from=5) as metrics:
        metrics.write("train", 6, loss=1.0)
    assert [line["step"] for line in lines(folder)] == [6]


@pytest.mark.parametrize("torn", ['{"kind": "train", "st', '{"kind": "train", "step": 3}', "\xff"])
def test_a_torn_last_line_costs_only_itself(folder: RunFolder, torn: str) -> None:
    with MetricsWriter(folder) as metrics:
        metrics.write("train", 1, loss=1.0)
        metrics.write("train", 2, loss=0.5)
    with folder.metrics.open("ab") as file:
        file.write(torn.encode("latin-1"))
    assert [e["step"] for e in read_metrics(folder)][:2] == [1, 2]
    with MetricsWriter(folder, resume_from=2) as metrics:
        metrics.write("train", 3, loss=0.25)
    assert [(e["step"], e["loss"]) for e in lines(folder)] == [(1, 1.0), (2, 0.5), (3, 0.25)]


def test_lines_that_are_no_metrics_are_left_out(folder: RunFolder) -> None:
    folder.path.mkdir()
    folder.metrics.write_text('[1]\n{"step": 1}\n{"kind": "train", "step": null}\n\n7\n')
    assert read_metrics(folder.path) == []
    assert read_metrics(folder.path / "nowhere") == []


def test_a_killed_writer_loses_no_line_that_it_wrote(folder: RunFolder) -> None:
    code = (
        "import sys; from pathlib import Path; from megalith.core.runs import RunFolder\n"
        "from megalith.train.metrics import MetricsWriter\n"
        "metrics = MetricsWriter(RunFolder(Path(sys.argv[1])))\n"
        "for step in range(10**9):\n"
        "    metrics.write('train', step, loss=1.0)\n"
        "    print(step, flush=True)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(folder.path)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        for _ in range(50):
            process.stdout.readline()
        os.kill(process.pid, signal.SIGKILL)
        said = [line for line in process.stdout.read().splitlines() if line]
    last = int(said[-1]) if said else 49
    steps = [e["step"] for e in read_metrics(folder)]
    assert steps == list(range(len(steps)))
    assert len(steps) > last


def test_tensorboard_gets_the_numbers(folder: RunFolder) -> None:
    pytest.importorskip("tensorboard", reason="needs megalith[tensorboard]")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with MetricsWriter(folder, tensorboard=True) as metrics:
        metrics.write("train", 1, loss=2.0, note="text")
        metrics.write("validation", 1, loss=3.0)
        metrics.write("train", 2, loss=7.0)
        metrics.write("event", 1, event="done")
    with MetricsWriter(folder, resume_from=1, tensorboard=True) as metrics:
        metrics.write("train", 2, loss=1.0)
    events = EventAccumulator(str(folder.path / "tensorboard"))
    events.Reload()
    assert set(events.Tags()["scalars"]) == {"train/loss", "validation/loss"}
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(1, 2.0), (2, 1.0)]
