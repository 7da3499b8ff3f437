"""What has ended the ranks: one sentence, from what each of them said or did not say."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import psutil

from megalith.core import rank, stacks
from megalith.core.errors import TrainingError
from megalith.core.rank import Failure, Value
from megalith.core.stacks import Stack

_WATCHDOG = "watchdog caught collective operation timeout"  # NCCL ends the process itself


class RankFailed(Exception):
    """Something unexpected on a rank; its traceback is the cause of this exception."""


class RankTraceback(Exception):
    """A traceback of another process, as text."""

    def __str__(self) -> str:
        return f"\n\n{self.args[0]}"


@dataclass(frozen=True)
class Trouble:
    """Why an attempt ended, and whether another one could end better."""

    error: BaseException
    again: bool


@dataclass
class Watched:
    """A rank as its parent sees it.

    Attributes:
        log_start: length of its log when it started, in bytes.
        report: what it said at its end.
        died: exit code of a process that ended without a report.
    """

    number: int
    process: BaseProcess
    pipe: Connection
    log: Path
    log_start: int
    report: Value | Failure | None = None
    died: int | None = None

    @property
    def settled(self) -> bool:
        """Whether nothing more is to be expected of it."""
        return self.report is not None or self.died is not None

    @property
    def failed(self) -> bool:
        """Whether it ended without doing its work."""
        return self.died is not None or isinstance(self.report, Failure)

    @property
    def stopped(self) -> bool:
        """Whether its process is held by SIGSTOP, so that it hears nothing but SIGKILL."""
        try:
            return psutil.Process(self.process.pid).status() == psutil.STATUS_STOPPED
        except psutil.NoSuchProcess:
            return False


def patience(ranks: Sequence[Watched]) -> float | None:
    """How long to wait for the ranks that have not reported, in seconds.

    ``None``: for ever, as nothing is wrong. After a death nothing better is to come; an error may
    be raised by all ranks alike; a connection that was closed is explained by whoever closed it.
    """
    failed = [one for one in ranks if one.failed]
    if not failed:
        return None
    if any(one.died is not None and not _by_watchdog(one) for one in failed):
        return 0.0
    reports = [one.report for one in failed if isinstance(one.report, Failure)]
    if any(not report.late and not report.consequence for report in reports):
        return 0.3
    return 1.0 if any(report.late for report in reports) else 4.0


def trouble(
    ranks: Sequence[Watched], timeout: float, stopped: signal.Signals | None = None
) -> Trouble:
    """The first cause of what happened to ``ranks``, some of which may still run.

    Args:
        stopped: the signal that was passed on to the ranks before.
    """
    dead = [one for one in ranks if one.died is not None and not _by_watchdog(one)]
    if dead:
        return _death(dead[0], stopped)
    failures = [(one, one.report) for one in ranks if isinstance(one.report, Failure)]
    raised = [pair for pair in failures if not pair[1].late and not pair[1].consequence]
    if raised:
        alike = len({report.text for _, report in raised}) == 1 and len(raised) == len(ranks)
        return _error(*raised[0], alone=not alike, stopped=stopped)
    if any(report.late for _, report in failures) or any(_by_watchdog(one) for one in ranks):
        return Trouble(_hang(ranks, timeout), again=True)
    return _error(*failures[0], alone=True, stopped=stopped)


def _death(one: Watched, stopped: signal.Signals | None) -> Trouble:
    code = one.died or 0
    if code < 0:
        name = signal.Signals(-code).name
        if stopped is not None and -code == stopped:
            error = KeyboardInterrupt() if stopped == signal.SIGINT else SystemExit(128 - code)
            return Trouble(error, again=False)
        how = f"was killed by {name}"
        if -code == signal.SIGKILL:
            how += " (by hand, or by the system for want of memory)"
    else:
        how = f"ended with exit code {code} before its work was done"
    return Trouble(TrainingError(f"ranks: rank {one.number} {how}{_kept(one)}"), again=True)


def _error(
    one: Watched, report: Failure, *, alone: bool, stopped: signal.Signals | None
) -> Trouble:
    cause = RankTraceback(report.trace)
    if stopped == signal.SIGINT and report.text.startswith("KeyboardInterrupt"):
        return Trouble(KeyboardInterrupt(), again=False)
    if report.kind is not None:
        error = report.kind(f"{report.text} (rank {one.number})" if alone else report.text)
    else:
        error = RankFailed(f"rank {one.number}: {report.text}")
    error.__cause__ = cause
    return Trouble(error, again=report.kind is None)


def _hang(ranks: Sequence[Watched], timeout: float) -> TrainingError:
    """Who did not come, where it is instead, and where the others wait."""
    here = _stacks(ranks)
    waiting: dict[int, Stack] = {}
    missing: dict[int, str] = {}
    for one in ranks:
        stack = here.get(one.number)
        if isinstance(one.report, Failure):
            waiting[one.number] = one.report.stack
        elif isinstance(one.report, Value):
            missing[one.number] = "has ended its work"
        elif stack is None:
            missing[one.number] = _silence(one)
        elif stack.waits:
            waiting[one.number] = stack
        else:
            missing[one.number] = f"is at {stack.describe()}"
    what = " and ".join(sorted({stack.collective or "a collective" for stack in waiting.values()}))
    if missing:
        parts = [f"ranks: {_names(missing)} did not come to {what} within {timeout:g} s"]
        alone = len(missing) == 1
        parts += [f"{'it' if alone else f'rank {n}'} {text}" for n, text in missing.items()]
    else:
        parts = [f"ranks: they waited for each other in {what} for {timeout:g} s"]
    places: dict[str, list[int]] = {}
    for number, stack in waiting.items():
        places.setdefault(stack.describe(), []).append(number)
    parts += [f"{_names(numbers)} waited in {place}" for place, numbers in places.items()]
    return TrainingError("; ".join(parts) + _kept(ranks[0]))


def _names(numbers: Iterable[int]) -> str:
    listed = sorted(numbers)
    return f"rank{'s' if len(listed) > 1 else ''} {', '.join(map(str, listed))}"


def _stacks(ranks: Sequence[Watched], patience: float = 2.0) -> dict[int, Stack]:
    """The present stacks of the ranks that have not reported and can answer."""
    asked = [one for one in ranks if not one.settled and not one.stopped]
    found: dict[int, Stack] = {}
    before = {one.number: one.log.stat().st_size for one in asked}
    for one in asked:
        psutil.Process(one.process.pid).send_signal(signal.SIGUSR1)
    end = time.monotonic() + patience
    while time.monotonic() < end and len(found) < len(asked):
        time.sleep(0.1)
        for one in asked:
            stack = stacks.newest(_log(one, before[one.number]), rank.TALK)
            if stack is not None:
                found[one.number] = stack
    for one in ranks:  # a rank that NCCL's watchdog ended has left its stack in its log
        stack = stacks.newest(_log(one, one.log_start), rank.TALK) if one.died else None
        if stack is not None:
            found[one.number] = stack
    return found


def _silence(one: Watched) -> str:
    if one.died is not None:
        return "was ended by the backend's watchdog"
    if one.stopped:
        return "is stopped (SIGSTOP)"
    return "does not answer: it runs no Python"


def _by_watchdog(one: Watched) -> bool:
    return one.died == -signal.SIGABRT and _WATCHDOG in _log(one, one.log_start).lower()


def _log(one: Watched, start: int) -> str:
    with one.log.open("rb") as file:
        file.seek(start)
        return file.read().decode(errors="replace")


def _kept(one: Watched) -> str:
    """Where more is to be read, unless it goes with the attempt's folder."""
    return f"; see {one.log.parent}" if not one.log.parent.name.startswith("megalith-") else ""
