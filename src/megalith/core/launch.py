"""This machine's ranks: started, watched, ended; what fails on one of them is said once.

```
start(4, work, (recipe,))    # work(recipe) on four ranks that have joined; rank 0's value
```

A rank is forked from a server that has imported torch, so that it starts in a tenth of a second,
not in four. Every attempt meets in a new file, so ranks that start again never find the addresses
of those before them.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkContext, ForkServerContext
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from megalith.core import diagnose, rank
from megalith.core.diagnose import Trouble, Watched
from megalith.core.wire import pack, unpack
from megalith.core.world import World

_ENDING = 3.0  # seconds from SIGTERM to SIGKILL


def start(
    count: int,
    work: Callable[..., Any],
    args: Sequence[Any] = (),
    *,
    device: str = "cpu",
    backend: str | None = None,
    timeout: float = 600,
    restarts: int = 0,
    logs: Path | None = None,
    fork: bool = False,
    preload: Sequence[str] = (),
) -> Any:
    """Run ``work(*args)`` on ``count`` ranks of this machine, and return rank 0's value.

    Ctrl-C and SIGTERM are passed on to every rank, once; the ranks are then waited for. A second
    Ctrl-C ends them. A rank that dies, hangs or raises ends all of them.

    Args:
        work: a function of a module's top level, called when the ranks have joined.
        device: type of the collectives' device; each rank of an accelerator gets its own.
        backend: of ``torch.distributed``; left out: the device's.
        timeout: seconds that a collective may take.
        restarts: how often all ranks are started again after one has died, hung or raised
            something unexpected; ``work`` is to go on from what it has saved.
        logs: folder of a file per rank; left out: they go when the ranks have ended.
        fork: fork this very process, which saves the server's start. Only for the CPU, and where
            no thread holds a lock; ``work`` may then be any function.
        preload: further modules that the server imports once for all ranks.

    Raises:
        MegalithError: one that ``work`` raised, with the rank.
        TrainingError: a rank died, or did not come to a collective in time.
        RankFailed: ``work`` raised something else; the rank's traceback is its cause.
    """
    packed = (work, tuple(args)) if fork else pack((work, tuple(args)))
    context = _context(work, fork, preload)
    for restart in range(restarts + 1):
        with tempfile.TemporaryDirectory(prefix="megalith-") as meeting:
            folder = Path(meeting) if logs is None else logs
            folder.mkdir(parents=True, exist_ok=True)
            attempt = _Attempt(timeout)
            with _passed_on(attempt):
                try:
                    for number in range(count):
                        settings = rank.Settings(
                            world=World(
                                number, count, number, count, restart, f"file://{meeting}/meet"
                            ),
                            work=packed,
                            device=device,
                            backend=backend,
                            timeout=timeout,
                            log=folder / f"rank-{number:05d}.log",
                        )
                        attempt.ranks.append(_begin(context, settings))
                    attempt.watch()
                finally:
                    attempt.end()
            trouble = attempt.trouble
        if trouble is None:
            return unpack(attempt.value())
        if restart == restarts or not trouble.again or attempt.stopped:
            raise trouble.error
        print(
            f"{trouble.error}; starting all ranks again ({restart + 1} of {restarts})",
            file=sys.stderr,
            flush=True,
        )
    raise AssertionError


@dataclass
class _Attempt:
    """All ranks from their start to their end.

    Attributes:
        stopped: the signal that was passed on to them.
        trouble: what ended them, if it was not the end of the work.
    """

    timeout: float
    ranks: list[Watched] = field(default_factory=list)
    stopped: signal.Signals | None = None
    trouble: Trouble | None = None

    def watch(self) -> None:
        """Wait until all ranks have reported, or what has failed is explained."""
        first = None
        while not all(one.settled for one in self.ranks):
            patience = diagnose.patience(self.ranks)
            if patience is not None:
                first = first or time.monotonic()
                patience -= time.monotonic() - first
                if patience <= 0:
                    break
            self._hear(patience)
        if any(one.failed for one in self.ranks):
            self.trouble = diagnose.trouble(self.ranks, self.timeout, self.stopped)

    def _hear(self, patience: float | None) -> None:
        waited = [one for one in self.ranks if not one.settled]
        wait([end for one in waited for end in (one.pipe, one.process.sentinel)], patience)
        for one in waited:
            if one.pipe.poll():
                try:
                    one.report = unpack(one.pipe.recv_bytes())
                except EOFError:  # it died and closed its end
                    one.process.join()
            if one.report is None and not one.process.is_alive():
                one.died = one.process.exitcode

    def end(self) -> None:
        """End every rank that still runs; if all have done their work they leave by themselves."""
        done = all(isinstance(one.report, rank.Value) for one in self.ranks)
        for one in self.ranks:
            if done:
                one.pipe.send_bytes(b"")
            else:
                _signal(one, signal.SIGKILL if one.stopped else signal.SIGTERM)
        until = time.monotonic() + (self.timeout if done else _ENDING)
        for one in self.ranks:
            one.process.join(max(0.0, until - time.monotonic()))
            _signal(one, signal.SIGKILL)
            one.process.join()
            one.pipe.close()

    def value(self) -> bytes:
        """What rank 0 returned."""
        report = self.ranks[0].report
        assert isinstance(report, rank.Value)
        assert report.packed is not None
        return report.packed


def _signal(one: Watched, number: signal.Signals) -> None:
    """Send a signal to a rank that still runs; SIGKILL to its loader's workers as well."""
    pid = one.process.pid
    if pid is None or not one.process.is_alive():
        return
    try:
        os.kill(pid, number)
        if number == signal.SIGKILL:
            os.killpg(pid, number)
    except ProcessLookupError:
        return  # it has ended just now


def _begin(context: ForkContext | ForkServerContext, settings: rank.Settings) -> Watched:
    here, there = context.Pipe()
    with ExitStack() as stack:
        outputs = tuple(Connection(os.dup(number), readable=False) for number in (1, 2))
        for end in (there, *outputs):
            stack.enter_context(end)
        process = context.Process(target=rank.run, args=(settings, there, outputs))
        sys.stdout.flush()
        sys.stderr.flush()
        start_at = settings.log.stat().st_size if settings.log.exists() else 0
        with _without_main(settings.work):
            process.start()
    return Watched(settings.world.rank, process, here, settings.log, start_at)


def _context(
    work: Callable[..., Any], fork: bool, preload: Sequence[str]
) -> ForkContext | ForkServerContext:
    if fork:
        return multiprocessing.get_context("fork")
    context = multiprocessing.get_context("forkserver")
    own = [work.__module__] if work.__module__.startswith("megalith.") else []
    # Only what is asked for before the server's start counts.
    context.set_forkserver_preload(
        ["torch", "torch.distributed", "megalith.core.rank", *own, *preload]
    )
    return context


@contextmanager
def _without_main(work: Any) -> Iterator[None]:
    """Keep a rank from importing the program's main module again, if nothing in it is needed.

    It takes time, and a script without ``if __name__ == "__main__"`` would start over.
    """
    if not isinstance(work, bytes) or b"__main__" in work:
        yield
        return
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


@contextmanager
def _passed_on(attempt: _Attempt) -> Iterator[None]:
    """Inside, the first SIGINT or SIGTERM goes to every rank; a second SIGINT interrupts here."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may install handlers
        return

    def note(number: int, frame: FrameType | None) -> None:
        if attempt.stopped is not None:
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            return
        attempt.stopped = signal.Signals(number)
        for one in attempt.ranks:
            _signal(one, attempt.stopped)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
