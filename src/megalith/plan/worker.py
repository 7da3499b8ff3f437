"""Traces in processes of their own: an abort in C++ ends one of them, and is one line of error.

What a trace found comes back as numbers (:class:`Seen`), and is kept on disk under a hash of all
that decides it: the recipe's parts, the rank, the device, torch and this package's own source.
"""

from __future__ import annotations

import functools
import hashlib
import json
import multiprocessing
import os
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from types import ModuleType
from typing import Any

from megalith.core.errors import MegalithError, PlanError
from megalith.core.runs import write_whole
from megalith.recipe import Recipe

CACHE = Path(".cache/megalith/plan")
_FORMAT = 6
_ROOMS = ("plan", "layout", "models", "tasks", "optim", "recipe", "step.py", "core/devices.py")
# What a step's memory and time do not depend on.
_APART = {"run", "evaluate", "checkpoint"}


@dataclass(frozen=True)
class Asked:
    """One trace: a recipe with its layout, as one rank; see ``megalith.plan.trace.Job``.

    Attributes:
        target: capability, attention kernels and memory of the GPU; ``None``: the CPU.
    """

    recipe: Recipe
    facts: dict[str, int]
    sample: dict[str, tuple[tuple[int, ...], str]]
    rank: int = 0
    target: tuple[tuple[int, int], tuple[str, ...], int] | None = None


@dataclass(frozen=True)
class Seen:
    """What a trace found, in bytes, operations and counts of one update of one rank.

    Attributes:
        memory: ``allocated`` (peak), ``reserved`` and ``reserved_expandable``.
        kinds: what the allocated peak is made of.
        most: the most that each kind takes at any time.
        moment: phase, module and operator of the peak.
        largest: tensors alive at the peak: bytes, kind, shape, dtype, module.
        computed: by ``kind/phase/dtype``: operators, operations, bytes read and written.
        sent: by ``name/phase/axes``: collectives, and the bytes of their whole tensors.
        parameters: on this rank.
        operators: that ran.
        curve: bytes of each kind over the update, at equally many events.
        candidates: the kinds at moments that may be the peak, by phase, module, operator and shape.
    """

    memory: dict[str, float]
    kinds: dict[str, float]
    most: dict[str, float]
    moment: dict[str, str]
    largest: list[dict[str, Any]]
    computed: dict[str, list[float]]
    sent: dict[str, list[float]]
    parameters: float = 0
    operators: float = 0
    curve: dict[str, list[float]] = field(default_factory=dict)
    candidates: dict[str, dict[str, float]] = field(default_factory=dict)


class Pool:
    """Runs traces, one more at once than there are processors (they end together); remembers them.

    Args:
        cache: folder; ``None``: nothing is kept.
        processes: at most.
    """

    def __init__(self, cache: Path | None = CACHE, processes: int | None = None) -> None:
        self._cache = cache
        self._context = _context()
        self._threads = ThreadPoolExecutor(processes or _processors() + 1)
        self._known: dict[str, Seen] = {}
        self.traced = 0

    def see(self, asked: Iterable[Asked]) -> list[Seen | PlanError]:
        """The traces that were asked for, in their order; a failure is returned, not raised."""
        # The last are the largest, as a rule: begun first, they do not end alone.
        futures = [self._threads.submit(self._see, one) for one in reversed(list(asked))]
        return [future.result() for future in reversed(futures)]

    def one(self, asked: Asked) -> Seen:
        """One trace.

        Raises:
            PlanError: it could not be traced.
        """
        (found,) = self.see([asked])
        if isinstance(found, PlanError):
            raise found
        return found

    def _see(self, asked: Asked) -> Seen | PlanError:
        name = key(asked)
        found = self._known.get(name) or self._recall(name)
        if found is not None:
            return found
        found = self._trace(asked)
        if isinstance(found, Seen):
            self._known[name] = found
            if self._cache is not None:
                self._cache.mkdir(parents=True, exist_ok=True)
                write_whole(self._cache / f"{name}.json", json.dumps(asdict(found)))
        return found

    def _recall(self, name: str) -> Seen | None:
        path = self._cache / f"{name}.json" if self._cache is not None else None
        if path is None or not path.exists():
            return None
        try:
            return Seen(**json.loads(path.read_text("utf-8")))
        except (OSError, ValueError, TypeError):
            path.unlink(missing_ok=True)  # damaged: it is traced again
            return None

    def _trace(self, asked: Asked) -> Seen | PlanError:
        self.traced += 1
        return _in_a_process(self._context, asked)


def key(asked: Asked) -> str:
    """The hash of everything that decides a trace."""
    recipe = asked.recipe.model_dump(mode="json", exclude=_APART)
    recipe["train"] |= {"steps": 0, "seed": 0}
    for name in ("lr", "warmup", "final", "decay", "schedule"):
        recipe["optim"].pop(name, None)
    for name in ("backend", "timeout", "restarts"):
        recipe["layout"].pop(name, None)
    if asked.recipe.model.family != "factory":
        recipe.pop("data")  # the sample's shapes say it all
    parts = [recipe, asked.facts, asked.sample, asked.rank, asked.target, _versions()]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


@functools.cache
def _versions() -> list[Any]:
    """Torch's version, and a hash of the source that a trace runs through."""
    import importlib.metadata

    root = Path(__file__).parents[1]
    files = [
        file
        for room in _ROOMS
        for file in ([root / room] if room.endswith(".py") else sorted((root / room).rglob("*")))
        if file.suffix in (".py", ".toml") and file.name != "devices.toml"
    ]
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
    return [_FORMAT, importlib.metadata.version("torch"), digest]


def start() -> None:
    """Begin to import torch in the process that traces are forked from; returns at once."""
    from multiprocessing import forkserver

    _context()
    forkserver.ensure_running()


@functools.cache
def _context() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["megalith.plan.preload"])
    return context


def _processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _in_a_process(context: ForkServerContext, asked: Asked) -> Seen | PlanError:
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(theirs, asked), daemon=True)
    with _without_main():
        process.start()
    theirs.close()
    try:
        kind, value = ours.recv()
    except EOFError:
        process.join()
        code = process.exitcode or 0
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        return PlanError(f"layout: the trace of rank {asked.rank} ended with {how} in torch itself")
    finally:
        ours.close()
    process.join()
    return Seen(**value) if kind == "seen" else PlanError(value)


_STARTING = threading.Lock()


@contextmanager
def _without_main() -> Iterator[None]:
    """Keep a worker from importing the program's main module again: it needs nothing of it.

    A script without ``if __name__ == "__main__"`` would start over. One thread at a time.
    """
    with _STARTING:
        main = sys.modules["__main__"]
        sys.modules["__main__"] = ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = main


def _work(connection: Connection, asked: Asked) -> None:
    """The process of one trace."""
    import warnings

    import torch

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)  # more would fight for the processors that other traces run on
    try:
        from megalith.plan.summary import summary

        answer: tuple[str, Any] = ("seen", asdict(summary(asked)))
    except MegalithError as error:
        answer = ("failed", str(error))
    except Exception as error:  # any code of the user's may run here; it becomes one line
        said = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        answer = ("failed", f"layout: the step could not be traced ({said})")
    connection.send(answer)
    connection.close()
    sys.stdout.flush()
    os._exit(0)  # torch's end takes a tenth of a second, and there is nothing to save


def refused(found: Sequence[Seen | PlanError]) -> list[Seen]:
    """The traces, if all succeeded.

    Raises:
        PlanError: the first failure.
    """
    for one in found:
        if isinstance(one, PlanError):
            raise one
    return [one for one in found if isinstance(one, Seen)]
