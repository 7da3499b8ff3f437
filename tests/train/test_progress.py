"""Plain lines in a pipe, a live line on a terminal, and a whole terminal after Ctrl-C."""

from __future__ import annotations

import contextlib
import io
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megalith.train.progress import Progress

VALUES = {
    "loss": 3.2,
    "lr": 6e-4,
    "tokens_per_s": 1234.0,
    "mfu": 0.462,
    "peak_memory": int(3.4 * 2**30),
    "skipped": 0,
}


def test_a_pipe_gets_one_plain_line_for_each_call() -> None:
    stream = io.StringIO()
    with Progress(400, stream=stream) as progress:
        progress.update(10, VALUES)
        progress.update(20, {"validation_loss": 3.0, "bits_per_byte": 1.25})
        progress.note("checkpoint [20] saved")
        progress.update(400, {"loss": 2.0, "skipped": 3, "samples": [1]})
    first, second, note, last = stream.getvalue().splitlines()
    assert first.startswith(
        "step  10/400  loss 3.200  1.23k tokens/s  MFU 46.2 %  lr 6.00e-4  3.4 GiB  ETA "
    )
    assert second.startswith("step  20/400  val 3.000  bits/byte 1.25  ETA ")
    assert note == "checkpoint [20] saved"
    assert last == "step 400/400  loss 2.000  skipped 3"
    assert "\x1b" not in stream.getvalue()


def test_what_is_not_finite_is_shown_as_such() -> None:
    stream = io.StringIO()
    Progress(10, stream=stream).update(10, {"loss": float("nan"), "grad_norm": float("inf")})
    assert stream.getvalue() == "step 10/10  loss nan  norm inf\n"


def test_rates_of_any_item_are_shown() -> None:
    stream = io.StringIO()
    Progress(10, stream=stream).update(10, {"images_per_s": 512.0, "loss": 1.0})
    assert stream.getvalue() == "step 10/10  loss 1.000  512 images/s\n"


def test_time_left_counts_from_the_step_of_the_resume(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 10.0])
    monkeypatch.setattr("megalith.train.progress.time.monotonic", lambda: next(clock))
    stream = io.StringIO()
    Progress(300, start=100, stream=stream).update(200, {})
    assert stream.getvalue() == "step 200/300  ETA 10 s\n"


CODE = """
import time
from megalith.train.progress import Progress
def work(progress):
    for step in range(10, 1000, 10):
        progress.update(step, {"loss": 1.5, "tokens_per_s": 1234.0})
        if step == 50:
            progress.note("a note")
            print("ready", flush=True)
        time.sleep(0.02)
"""
CLOSED = "with Progress(1000) as progress:\n    work(progress)"
LEFT = "work(Progress(1000))"


def on_a_terminal(code: str, interrupt: bool = False, **environment: str) -> str:
    """What a program writes to a terminal of its own."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=theirs,
        stdout=theirs,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "100", **environment},
        cwd=Path.cwd(),
    )
    os.close(theirs)
    written = b""
    with contextlib.suppress(OSError):  # how Linux says that the other end is closed
        while chunk := os.read(ours, 4096):
            written += chunk
            if interrupt and b"ready" in written:
                process.send_signal(signal.SIGINT)
                interrupt = False
    process.wait()
    os.close(ours)
    return written.decode()


@pytest.mark.parametrize("end", [CLOSED, LEFT])
def test_ctrl_c_leaves_the_terminal_whole(end: str) -> None:
    text = on_a_terminal(f"{CODE}\n{end}", interrupt=True)
    assert "loss 1.500  1.23k tokens/s" in text
    assert "a note" in text
    hidden, shown = text.rfind("\x1b[?25l"), text.rfind("\x1b[?25h")
    assert 0 <= hidden < shown  # the cursor was hidden and is back


@pytest.mark.parametrize("environment", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_a_terminal_that_asks_for_it_gets_plain_lines(environment: dict[str, str]) -> None:
    text = on_a_terminal(f"{CODE}\n{CLOSED}", **environment)
    assert "\x1b" not in text
    assert text.count("step ") == 99
