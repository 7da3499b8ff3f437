"""The launcher: one value from many ranks, one sentence from what goes wrong on any of them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from megalith.core.diagnose import RankFailed
from megalith.core.errors import RecipeError, TrainingError
from megalith.core.launch import start

ROOT = str(Path(__file__).parents[2])
both = pytest.mark.parametrize("fork", [True, False], ids=["fork", "server"])


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks import this module by the name that pytest gave it."""
    monkeypatch.syspath_prepend(ROOT)


def add(value: torch.Tensor) -> dict[str, Any]:
    total = value * (dist.get_rank() + 1)
    dist.all_reduce(total)
    return {
        "total": total,
        "half": total.to(torch.bfloat16),
        "empty": torch.empty(0, 3),
        "one": torch.tensor(7),
        "world": [os.environ[n] for n in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")],
    }


def say(what: str) -> None:
    print(f"{what} of {dist.get_rank()}")
    print(f"error of {dist.get_rank()}", file=sys.stderr)


def meet() -> None:
    dist.all_reduce(torch.ones(1))


def refuse(who: list[int]) -> None:
    if dist.get_rank() in who:
        raise RecipeError("layout.tensor: 3 does not divide 4 heads")
    meet()


def break_down() -> None:
    if dist.get_rank() == 2:
        raise ValueError("a plain mistake")
    meet()


def die() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    meet()


def die_once(marks: Path) -> int:
    rank, attempt = dist.get_rank(), len(list(marks.iterdir()))
    dist.barrier()
    if rank == 1 and attempt < 2:
        (marks / f"died-{attempt}").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    meet()
    return int(os.environ["TORCHELASTIC_RESTART_COUNT"])


def sleep_before() -> None:
    if dist.get_rank() == 1:
        time.sleep(60)
    meet()


def stop_before() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    meet()


def leave_early() -> None:
    if dist.get_rank() != 1:
        meet()


def save_when_told(folder: Path) -> str:
    told: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: told.append(number))
    (folder / f"ready-{dist.get_rank()}").touch()
    while not told:
        time.sleep(0.05)
    time.sleep(0.5)  # a second signal would be noticed
    (folder / f"saved-{dist.get_rank()}").write_text(",".join(map(str, told)))
    return "saved"


@both
def test_the_value_of_rank_0_comes_back_with_its_tensors(fork: bool) -> None:
    value = start(3, add, (torch.tensor([1.0, 2.0]),), fork=fork, timeout=30)
    assert torch.equal(value["total"], torch.tensor([6.0, 12.0]))
    assert torch.equal(value["half"], torch.tensor([6.0, 12.0], dtype=torch.bfloat16))
    assert value["empty"].shape == (0, 3)
    assert value["one"] == 7
    assert value["world"] == ["0", "3", "0", "3"]


def test_a_forked_rank_runs_any_function() -> None:
    factor = 5
    assert start(2, lambda: dist.get_world_size() * factor, fork=True, timeout=30) == 10


@both
def test_only_rank_0_prints_and_the_others_keep_a_log(
    fork: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    start(2, say, ("a word",), logs=tmp_path, fork=fork, timeout=30)
    shown = capfd.readouterr()
    assert shown.out == "a word of 0\n"
    assert "error of 0" in shown.err
    assert "of 1" not in shown.out + shown.err
    kept = (tmp_path / "rank-00001.log").read_text()
    assert "a word of 1" in kept
    assert "error of 1" in kept


def test_what_all_ranks_refuse_alike_is_said_once() -> None:
    with pytest.raises(RecipeError) as caught:
        start(2, refuse, ([0, 1],), fork=True, timeout=30)
    assert str(caught.value) == "layout.tensor: 3 does not divide 4 heads"


def test_what_one_rank_refuses_is_said_with_its_number() -> None:
    with pytest.raises(RecipeError) as caught:
        start(3, refuse, ([1],), fork=True, timeout=30)
    assert str(caught.value) == "layout.tensor: 3 does not divide 4 heads (rank 1)"


@both
def test_the_first_cause_is_raised_and_not_what_follows_from_it(fork: bool, tmp_path: Path) -> None:
    begin = time.monotonic()
    with pytest.raises(RankFailed, match=r"^rank 2: ValueError: a plain mistake$") as caught:
        start(4, break_down, logs=tmp_path, fork=fork, timeout=30)
    assert time.monotonic() - begin < 20
    assert "in break_down" in str(caught.value.__cause__)
    assert "a plain mistake" in (tmp_path / "rank-00002.log").read_text()


@both
def test_a_rank_that_is_killed_is_named_and_ends_the_others(fork: bool, tmp_path: Path) -> None:
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    begin = time.monotonic()
    with pytest.raises(TrainingError) as caught:
        start(4, die, logs=tmp_path, fork=fork, timeout=30)
    assert time.monotonic() - begin < 20
    assert str(caught.value).startswith("ranks: rank 1 was killed by SIGKILL")
    assert "\n" not in str(caught.value)
    left = [one for one in psutil.Process().children(recursive=True) if one.pid not in before]
    assert not [one for one in left if "multiprocessing" not in " ".join(one.cmdline())]


def test_ranks_start_again_as_often_as_allowed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert start(2, die_once, (tmp_path,), restarts=2, fork=True, timeout=30) == 2
    said = capfd.readouterr().err
    assert said.count("rank 1 was killed by SIGKILL") == 2
    assert "starting all ranks again (2 of 2)" in said


def test_no_restart_is_left_at_the_end(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="rank 1 was killed"):
        start(2, die_once, (tmp_path,), restarts=1, fork=True, timeout=30)
    assert len(list(tmp_path.iterdir())) == 2


def test_what_is_refused_is_not_tried_again(tmp_path: Path) -> None:
    with pytest.raises(RecipeError):
        start(2, refuse, ([0, 1],), restarts=5, logs=tmp_path, fork=True, timeout=30)
    assert (tmp_path / "rank-00001.log").read_text().count("Traceback") == 1


@both
def test_a_hang_names_the_rank_the_collective_and_the_lines(fork: bool, tmp_path: Path) -> None:
    with pytest.raises(TrainingError) as caught:
        start(3, sleep_before, logs=tmp_path, fork=fork, timeout=5)
    said = str(caught.value)
    source = Path(__file__).read_text().splitlines()
    sleeps = source.index("        time.sleep(60)") + 1
    waits = source.index("    dist.all_reduce(torch.ones(1))") + 1
    assert "rank 1 did not come to all_reduce within 5 s" in said
    assert re.search(rf"it is at \S+test_launch\.py:{sleeps} \(time\.sleep\(60\)\)", said)
    assert re.search(rf"ranks 0, 2 waited in all_reduce at \S+test_launch\.py:{waits} ", said)


def test_a_stopped_rank_is_found_and_ended() -> None:
    begin = time.monotonic()
    with pytest.raises(TrainingError, match=r"rank 1 did not come to all_reduce .* is stopped"):
        start(2, stop_before, fork=True, timeout=5)
    assert time.monotonic() - begin < 25
    assert not [one for one in psutil.Process().children() if one.status() == psutil.STATUS_STOPPED]


def test_a_rank_that_has_ended_its_work_is_missed_too() -> None:
    with pytest.raises(TrainingError, match=r"rank 1 did not come .*; it has ended its work; "):
        start(3, leave_early, fork=True, timeout=4)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_passed_on_once_and_the_ranks_are_waited_for(
    number: signal.Signals, tmp_path: Path
) -> None:
    def send_when_ready() -> None:
        while len(list(tmp_path.glob("ready-*"))) < 2:
            time.sleep(0.05)
        os.kill(os.getpid(), number)

    threading.Thread(target=send_when_ready, daemon=True).start()
    assert start(2, save_when_told, (tmp_path,), fork=True, timeout=30) == "saved"
    for rank in (0, 1):
        assert (tmp_path / f"saved-{rank}").read_text() == str(int(number))


def test_a_script_without_a_main_guard_starts_its_ranks_once(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            """
            import torch.distributed as dist
            from megalith.core.launch import start

            print("begin", start(2, dist.get_world_size, timeout=30), flush=True)
            """
        )
    )
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout == "begin 2\n", done.stderr
