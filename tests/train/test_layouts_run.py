"""A run on many ranks is the run of one process: samples, metrics, weights, ends and restarts."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from megalith import checkpoint
from megalith.core.errors import RecipeError, TrainingError
from megalith.data.loader import Batch
from megalith.recipe import Recipe, load
from megalith.recipe.dump import dump
from megalith.tasks.language import Language
from megalith.train.evaluate import without_targets
from megalith.train.loop import train
from megalith.train.ranks import fitted
from sample_log import read_log

UPDATES = 12


def recipe(folder: Path, *overrides: str) -> Recipe:
    """A decoder with dropout, accumulation, an average and a ragged validation split."""
    corpus = folder.parent / "corpus"
    corpus.mkdir(exist_ok=True)
    for index in range(40):
        words = random.Random(index).choices(["to", "be", "or", "not", "that", "is"], k=60)
        (corpus / f"{index}.txt").write_text(" ".join(words))
    return load(
        None,
        *("model.layers=2", "model.width=32", "model.heads=2", "model.dropout=0.1"),
        *(f'data.files=["{corpus}"]', "data.sequence=32", "data.validation=0.2"),
        f"data.cache={folder.parent / 'cache'}",
        *(f"train.steps={UPDATES}", "train.global_batch=8", "train.micro_batch=2"),
        *("train.ema=0.9", "optim.lr=0.01", "optim.warmup=5"),
        *("checkpoint.every=3", "checkpoint.keep=9", "evaluate.every=6"),
        *(f"run.dir={folder}", "run.log_every=1", "layout.timeout=60"),
        *("evaluate.prompt=to be", "evaluate.sample_tokens=5", "task.factory=sample_log:Logged"),
        *overrides,
    )


def weights(folder: Path, step: int = UPDATES) -> dict[str, torch.Tensor]:
    entry = checkpoint.newest_whole(folder / "checkpoints")
    assert entry is not None
    assert entry.step == step
    return {
        f"{part}/{name}": tensor
        for part in ("model", "ema", "optimizer")
        for name, tensor in checkpoint.load(entry.path, part).items()
    }


def assert_same(first: Path, second: Path) -> None:
    wanted, found = weights(first), weights(second)
    assert wanted.keys() == found.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=2e-3, atol=2e-4, msg=name)


def lines(folder: Path, kind: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in found if line["kind"] == kind]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of one process."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    train(recipe(folder))
    return folder


LAYOUTS = {
    "replicate": ("layout.replicate=2",),
    "shard": ("layout.shard=2",),
    "both": ("layout.replicate=2", "layout.shard=2"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_run_of_many_ranks_is_that_of_one(alone: Path, tmp_path: Path, layout: str) -> None:
    folder = tmp_path / "run"
    run = train(recipe(folder, *LAYOUTS[layout]))
    assert (run.status, run.step, run.model) == ("done", UPDATES, None)
    assert run.tokenizer is not None
    assert run.report.exists()
    assert_same(alone, folder)
    for kind, names in {
        "train": ("loss", "lr", "grad_norm"),
        "validation": ("loss", "perplexity", "bits_per_byte"),
    }.items():
        wanted, found = lines(alone, kind), lines(folder, kind)
        assert [line["step"] for line in wanted] == [line["step"] for line in found]
        for name in names:
            assert [line[name] for line in found] == pytest.approx(
                [line[name] for line in wanted], rel=1e-4
            )
    texts = [(p / "samples.jsonl").read_text().count("\n") for p in (alone, folder)]
    assert texts == [2, 2]
    assert json.loads((folder / "environment.json").read_text())["ranks"] > 1
    described = [
        json.loads((p / "environment.json").read_text())["parameters"] for p in (alone, folder)
    ]
    assert described[0] == described[1]


@pytest.mark.slow
def test_ranks_see_the_samples_of_one_process_each_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logs = {}
    for ranks in (1, 2):
        monkeypatch.setenv("SAMPLE_LOG", str(tmp_path / f"log-{ranks}"))
        # A server that was started before has the old environment: the run has its own process.
        finished(spawned(recipe(tmp_path / f"run-{ranks}", f"layout.replicate={ranks}")))
        logs[ranks] = read_log(tmp_path / f"log-{ranks}")
    for update in range(UPDATES):
        part = slice(4 * update, 4 * update + 4)
        assert sorted(logs[1][part]) == sorted(logs[2][part])


def spawned(recipe: Recipe, *options: str, launcher: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    """``megalith train`` in a process of its own."""
    file = Path(recipe.run.dir).with_suffix(".toml")
    file.write_text(dump(recipe))
    megalith = str(Path(sys.executable).parent / "megalith")
    # One thread each, so that bits can be compared.
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *sys.path]),
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.Popen(
        [*launcher, megalith, "train", str(file), *options],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finished(process: subprocess.Popen[str], code: int = 0) -> str:
    said, _ = process.communicate(timeout=200)
    assert process.returncode == code, said
    return said


def ranks_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """The processes that stand for ranks, in the order of their start."""
    below = psutil.Process(process.pid).children(recursive=True)
    return sorted((one for one in below if os.getpgid(one.pid) == one.pid), key=lambda one: one.pid)


def when_at(folder: Path, step: int) -> None:
    """Wait until the run has written the line of an update."""
    end = time.monotonic() + 120
    while time.monotonic() < end:
        if (folder / "metrics.jsonl").exists() and any(
            line["step"] >= step for line in whole_lines(folder)
        ):
            return
        time.sleep(0.01)
    raise AssertionError("the run does not get on")


def whole_lines(folder: Path) -> list[dict[str, Any]]:
    text = (folder / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def slow(*overrides: str) -> tuple[str, ...]:
    """Long enough to be disturbed."""
    return ("train.steps=80", "checkpoint.every=10", "evaluate.every=0", *overrides)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A long run on two ranks that nothing happens to."""
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    finished(spawned(recipe(folder, *slow("layout.replicate=2"))))
    return folder


@pytest.mark.slow
def test_a_rank_that_is_killed_is_started_again_and_the_run_ends_as_if_not(
    undisturbed: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    process = spawned(recipe(folder, *slow("layout.replicate=2", "layout.restarts=1")))
    when_at(folder, 25)
    ranks_of(process)[1].send_signal(signal.SIGKILL)
    said = finished(process)
    assert "rank 1 was killed by SIGKILL" in said
    assert "starting all ranks again (1 of 1)" in said
    resumed = [line for line in lines(folder, "event") if line["event"] == "resume"]
    assert any("resumed from" in line["message"] for line in resumed)
    wanted, found = weights(undisturbed, 80), weights(folder, 80)
    for name, tensor in wanted.items():
        assert torch.equal(tensor, found[name]), name


@pytest.mark.slow
def test_a_signal_to_the_parent_saves_once_and_the_run_goes_on_later(
    undisturbed: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    process = spawned(recipe(folder, *slow("layout.replicate=2")))
    when_at(folder, 25)
    process.send_signal(signal.SIGTERM)
    said = finished(process, 128 + signal.SIGTERM)
    assert said.count("SIGTERM") == 1
    assert "interrupted at update" in said
    finished(spawned(recipe(folder, *slow("layout.replicate=2")), "--resume"))
    wanted, found = weights(undisturbed, 80), weights(folder, 80)
    assert all(torch.equal(tensor, found[name]) for name, tensor in wanted.items())


def test_a_signal_to_one_rank_stops_all_of_them_after_the_same_update(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = spawned(recipe(folder, *slow("layout.replicate=2")))
    when_at(folder, 5)
    ranks_of(process)[1].send_signal(signal.SIGTERM)
    assert "interrupted at update" in finished(process, 128 + signal.SIGTERM)


def test_a_run_is_resumed_under_other_layouts(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    changing = ("layout.shard=2 layout.tensor=2", 4), ("layout.pipeline=2", 8), ("", UPDATES)
    fixed = ("model.dropout=0", "optim.schedule=constant", "optim.warmup=2")
    for layout, until in changing:
        train(recipe(folder, *fixed, *layout.split(), f"train.steps={until}"), resume=True)
    whole = tmp_path / "whole"
    train(recipe(whole, *fixed))
    assert_same(whole, folder)


def test_two_processes_in_one_run_folder_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = spawned(recipe(folder, *slow("layout.replicate=2")))
    when_at(folder, 1)
    with pytest.raises(TrainingError, match=r"run\.dir: another process trains in"):
        train(recipe(folder, "layout.replicate=2"), resume=True)
    process.send_signal(signal.SIGINT)
    finished(process, 128 + signal.SIGINT)


@pytest.mark.parametrize(
    ("layout", "ranks", "changed"),
    [
        ("layout.replicate=4", 2, "layout.replicate 4 -> 2"),
        ("layout.replicate=4", 1, "layout.replicate 4 -> 1"),
        ("layout.replicate=2 layout.shard=2", 2, "layout.replicate 2 -> 1"),
        ("layout.shard=4", 2, "layout.shard 4 -> 2"),
        ("layout.replicate=2 layout.tensor=2", 2, "layout.replicate 2 -> 1"),
    ],
)
def test_a_layout_becomes_smaller_when_ranks_are_lost(
    tmp_path: Path, layout: str, ranks: int, changed: str
) -> None:
    made, note = fitted(recipe(tmp_path / "run", *layout.split()), ranks)
    assert made.layout.ranks == ranks
    assert note is not None
    assert changed in note


@pytest.mark.parametrize(
    ("layout", "ranks", "nearest"),
    [
        ("layout.replicate=4", 3, "; 2 would work"),
        ("layout.replicate=2 layout.tensor=2", 3, "; 2 would work"),
        ("layout.tensor=2", 1, ""),
        ("layout.replicate=2", 4, "; 2 would work"),
    ],
)
def test_ranks_that_do_not_fit_are_refused_in_one_line(
    tmp_path: Path, layout: str, ranks: int, nearest: str
) -> None:
    with pytest.raises(RecipeError) as caught:
        fitted(recipe(tmp_path / "run", *layout.split()), ranks)
    assert f"and {ranks} are here{nearest}; change the layout" in str(caught.value)


def test_a_batch_without_targets_counts_nothing() -> None:
    batch: Batch = {
        "tokens": torch.ones(2, 4, dtype=torch.int64),
        "targets": torch.ones(2, 4, dtype=torch.int64),
        "bytes": torch.tensor([4, 4]),
    }
    empty = without_targets(batch, Language())
    assert int(Language().count(empty)) == 0
    assert int(empty["bytes"].sum()) == 0
    assert torch.equal(empty["tokens"], batch["tokens"])


def test_a_task_with_other_names_is_told_what_to_do() -> None:
    class Other(Language):
        def count(self, batch: Batch) -> torch.Tensor:
            return torch.tensor(len(batch["answer"]))

    with pytest.raises(RecipeError, match=r"^evaluate\.samples: "):
        without_targets({"answer": torch.ones(2)}, Other())


@pytest.mark.slow
def test_ranks_of_torchrun_are_joined_and_one_of_them_prints(alone: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--no-python")
    launcher = (*torchrun, "--nproc-per-node", "2")
    said = finished(spawned(recipe(folder, "layout.shard=2"), "--resume", launcher=launcher))
    assert said.count("report:") == 1
    assert said.count(f"{UPDATES}/{UPDATES}") == 2  # a line of training, one of validation
    assert_same(alone, folder)


@pytest.mark.slow
def test_two_agents_of_torchrun_train_together_and_survive_the_loss_of_one(
    undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    folder = tmp_path / "run"
    made = recipe(folder, *slow("layout.replicate=2", "layout.timeout=20"))
    agents = []
    for node in range(2):
        launcher = (
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:2"),
            *("--nproc-per-node", "1", "--max-restarts", "3", "--rdzv-id", "test"),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port(tmp_path)}"),
            *("--rdzv-conf", "join_timeout=60,last_call_timeout=5", "--local-addr", "127.0.0.1"),
            "--no-python",
        )
        agents.append(spawned(made, "--resume", launcher=launcher))
        time.sleep(0.5 * (1 - node))
    said: list[str] = []
    reader = threading.Thread(target=lambda: said.append(agents[0].communicate(timeout=200)[0]))
    reader.start()
    when_at(folder, 25)
    for one in [*psutil.Process(agents[1].pid).children(recursive=True)]:
        one.kill()
    agents[1].kill()
    agents[1].communicate()
    reader.join()
    assert agents[0].returncode == 0, said
    events = [line["message"] for line in lines(folder, "event")]
    assert any("1 ranks are here, and not 2: layout.replicate 2 -> 1" in text for text in events)
    wanted, found = weights(undisturbed, 80), weights(folder, 80)
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=5e-2, atol=5e-3, msg=name)


def port(folder: Path) -> int:
    """A free port of this machine, the same for all callers of one folder."""
    import socket

    kept = folder / "port"
    if not kept.exists():
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            kept.write_text(str(found.getsockname()[1]))
    return int(kept.read_text())
