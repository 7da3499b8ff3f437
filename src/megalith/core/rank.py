"""One rank that :mod:`megalith.core.launch` has started: what runs in its process."""

from __future__ import annotations

import faulthandler
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import threading
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from megalith.core import stacks
from megalith.core.environment import usable_cores
from megalith.core.errors import MegalithError
from megalith.core.wire import pack, unpack
from megalith.core.world import MEETING, World, join, leave

# What gloo, NCCL and the stores say when a rank has waited for too long ...
_LATE = ("timed out", "timeout")
# ... and when the rank at the other end is gone, which another failure explains.
_LEFT = ("closed by peer", "reset by peer", "broken pipe", "connection refused", "remote process")

TALK = "run"
"""Name of the function here that every stack of a rank's main thread goes through."""


@dataclass(frozen=True)
class Settings:
    """What a rank needs to know; plain values only.

    Attributes:
        work: the function and its arguments, packed; or the pair itself in a forked process.
        device: type of the device of the collectives.
        log: file of what the rank prints, and of its stack when it is asked for.
    """

    world: World
    work: Any
    device: str
    backend: str | None
    timeout: float
    log: Path


@dataclass(frozen=True)
class Failure:
    """What went wrong on a rank, as its parent hears of it.

    Attributes:
        kind: class of a :class:`MegalithError`; ``None``: another exception.
        late: another rank did not come to a collective in time.
        consequence: another rank has gone away.
    """

    text: str
    trace: str
    stack: stacks.Stack
    kind: type[MegalithError] | None = None
    late: bool = False
    consequence: bool = False


@dataclass(frozen=True)
class Value:
    """What the work returned: only rank 0's is sent."""

    packed: bytes | None


def run(settings: Settings, pipe: Connection, outputs: tuple[Connection, Connection]) -> None:
    """The whole life of a rank; ends when the parent has answered its report.

    Args:
        pipe: to the parent.
        outputs: the parent's standard output and error, which rank 0 writes to.
    """
    world = settings.world
    os.setpgid(0, 0)  # Ctrl-C reaches the parent alone, which passes it on once
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    log = settings.log.open("a", encoding="utf-8")
    _redirect(world.rank, log.fileno(), outputs)
    faulthandler.enable(log)
    faulthandler.register(signal.SIGUSR1, log, all_threads=True)
    _follow_parent()
    _environment(settings)
    try:
        work, args = _work(settings.work)
        join(world, torch.device(settings.device), settings.backend, settings.timeout)
        value = work(*args)
        report: Value | Failure = Value(pack(value) if world.rank == 0 else None)
    except BaseException as error:
        report = _failure(error)
        log.write(report.trace)
        log.flush()
    pipe.send_bytes(pack(report))
    # Till all have reported the connections stay open: a rank that waits for this one then says
    # that it waited, and not that a connection was closed.
    answered = pipe.poll(None)
    assert answered
    if isinstance(report, Value):
        leave()
    sys.stdout.flush()


def _work(given: Any) -> Any:
    return unpack(given) if isinstance(given, bytes) else given


def _redirect(rank: int, log: int, outputs: tuple[Connection, Connection]) -> None:
    """Rank 0 prints where the parent does, the others into their logs."""
    sys.stdout.flush()
    sys.stderr.flush()
    for number, output in enumerate(outputs, start=1):
        os.dup2(output.fileno() if rank == 0 else log, number)
        output.close()
    # A forked process may have inherited streams that lead elsewhere, such as a test's.
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)


def _environment(settings: Settings) -> None:
    world = settings.world
    os.environ.update(
        {
            "RANK": str(world.rank),
            "WORLD_SIZE": str(world.size),
            "LOCAL_RANK": str(world.local_rank),
            "LOCAL_WORLD_SIZE": str(world.local_size),
            "TORCHELASTIC_RESTART_COUNT": str(world.restart),
            MEETING: world.meeting,
        }
    )
    if not isinstance(settings.work, bytes):
        torch.set_num_threads(1)  # a forked process has lost the threads of its parent's pool
    elif "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, usable_cores() // world.local_size))


def _follow_parent() -> None:
    """Ask for the end, as a scheduler would, when the parent has died."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


def _failure(error: BaseException) -> Failure:
    trace = traceback.format_exc()
    said = " ".join(str(error).split())
    lower = said.lower()
    known = isinstance(error, MegalithError)
    return Failure(
        text=said if known else f"{type(error).__name__}: {said}",
        trace=trace,
        stack=stacks.of_error(error),
        kind=type(error) if known else None,
        late=isinstance(error, RuntimeError) and any(word in lower for word in _LATE),
        consequence=any(word in lower for word in _LEFT),
    )
