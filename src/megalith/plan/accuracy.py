"""What real updates of a recipe take on this machine's CPU, to hold a prediction against.

Two truths: the events of torch's own CPU allocator, which are exact, and the process's resident
set, which code pages and thread pools are part of as well.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from megalith import step as steps
from megalith.core import devices, imports
from megalith.layout import mesh as meshes
from megalith.plan.trace import Job
from megalith.recipe import parse
from megalith.step import Step
from megalith.tasks import Batch

_MARK = 1_234_567  # bytes that nothing else asks for
_CPU = torch.device("cpu")


def allocated(job: Job) -> int:
    """Most bytes in tensors during the second update, by the CPU allocator's own events.

    Counted from before the model is built. For layouts, called on every rank of theirs.

    The profiler sees the frees of this thread and not those of gloo's. A collective's tensors are
    therefore held here until gloo's thread has let go of them, which it does by itself right after
    the collective, or a little later if other threads have the processor.
    """
    ranks = job.recipe.layout.ranks
    with (
        _gloo_first() if ranks > 1 else nullcontext(),
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler,
    ):
        updates = _updates(job)
        next(updates)
        torch.empty(_MARK, dtype=torch.uint8)
        next(updates)
        updates.close()
    now = peak = 0
    marked = False
    for size in sizes(profiler):
        now += size
        marked = marked or size == _MARK
        if marked and size != _MARK:
            peak = max(peak, now)
    return peak


def resident(job: Job) -> int:
    """How far the resident set rises from the start of a fresh process over two updates, bytes.

    For layouts, called on every rank of theirs.

    The process's environment decides how closely it follows: with ``MALLOC_ARENA_MAX=1`` and
    ``MALLOC_MMAP_THRESHOLD_=65536`` freed tensors go back to the system at once.
    """
    _warm(job)
    before = devices.peak_memory(_CPU)
    if devices.reset_peak_memory(_CPU):
        before = devices.peak_memory(_CPU)
    updates = _updates(job)
    next(updates)
    next(updates)
    return devices.peak_memory(_CPU) - before


def sizes(profiler: profile) -> Iterator[int]:
    """Sizes of allocations, and of frees as negative numbers, in their order."""
    found = profiler.profiler
    assert found is not None
    assert found.kineto_results is not None
    events: list[Any] = [e for e in found.kineto_results.events() if e.name() == "[memory]"]
    return (e.nbytes() for e in sorted(events, key=lambda e: e.start_ns()))


@contextmanager
def _gloo_first() -> Iterator[None]:
    """Inside, waiting for a collective is waiting for gloo's thread to be done with it, too."""
    wait = dist.Work.wait

    def wait_for_both(work: dist.Work, *args: Any, **options: Any) -> bool:
        result = wait(work, *args, **options)
        while not _gloo_rests():
            time.sleep(1e-4)
        return result

    dist.Work.wait = wait_for_both  # pyright: ignore
    try:
        with _InPython():
            yield
    finally:
        dist.Work.wait = wait


def _gloo_rests() -> bool:
    """Whether none of gloo's threads runs, or wants to (Linux; elsewhere it is not known)."""
    tasks = Path("/proc/self/task")
    for task in tasks.iterdir() if tasks.exists() else ():
        name, _, state = (task / "stat").read_text().partition("(")[2].rpartition(")")
        if name == "pt_gloo_runloop" and state.split()[0] != "S":
            return False
    return True


class _InPython(TorchDispatchMode):
    """Runs functional collectives by their equals whose work Python holds, and not C++."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if any(kind is DTensor for kind in types):
            return NotImplemented
        name = function.name()
        if name == "_c10d_functional::all_reduce":
            result = args[0].clone()
            dist.all_reduce(result, _reduction(args[1]), _group(args[2]))
        elif name == "_c10d_functional::all_gather_into_tensor":
            result = args[0].new_empty((args[0].shape[0] * args[1], *args[0].shape[1:]))
            dist.all_gather_single(result, args[0], _group(args[2]))
        elif name == "_c10d_functional::reduce_scatter_tensor":
            result = args[0].new_empty((args[0].shape[0] // args[2], *args[0].shape[1:]))
            dist.reduce_scatter_single(result, args[0], _reduction(args[1]), _group(args[3]))
        else:
            result = function(*args, **(kwargs or {}))
        return result


def _reduction(name: str) -> Any:
    return getattr(dist.ReduceOp, name.upper())


def _group(given: Any) -> dist.ProcessGroup:
    name = given if isinstance(given, str) else dist.ProcessGroup.unbox(given).group_name
    return dist.distributed_c10d._resolve_process_group(name)  # pyright: ignore


def _updates(job: Job) -> Generator[Step]:
    """The recipe's real step, after each update."""
    mesh = meshes.build(job.recipe.layout, _CPU)
    built = steps.build(job.recipe, job.facts, _CPU, mesh)
    train = job.recipe.train
    micros = train.global_batch // (train.micro_batch * mesh.data_ranks)
    batches = [_batch(job) for _ in range(micros)]
    while True:
        built.update(built.backward(batches))
        yield built


def _batch(job: Job) -> Batch:
    """Random numbers that are valid tokens, classes and pixels."""
    return {
        name: _random((job.recipe.train.micro_batch, *shape), dtype, min(job.facts.values()))
        for name, (shape, dtype) in job.sample.items()
    }


def _random(shape: tuple[int, ...], dtype: str, below: int) -> Tensor:
    if dtype.startswith("int"):
        return torch.randint(below, shape, dtype=getattr(torch, dtype))
    return torch.randn(shape, dtype=getattr(torch, dtype))


def _warm(job: Job) -> None:
    """Load the code that every update runs, by one of a tiny model: no memory of the real one's.

    MKL keeps some megabytes for all products to come from its first large one on; they are the
    process's as its code is, and stay in no tensor.
    """
    torch.mm(torch.ones(1024, 256), torch.ones(256, 8192))
    reference = getattr(job.recipe.model, "factory", None)
    if reference is not None:
        imports.resolve(reference, "model.factory")
    precision = job.recipe.train.precision
    train = {"precision": precision, "global_batch": 4, "micro_batch": 1}
    layout = job.recipe.layout.model_dump(exclude_defaults=True)
    if job.recipe.model.family == "resnet":
        model = {"family": "resnet", "blocks": [1, 1], "width": 8}
        sections = {"model": model, "data": {"source": "digits"}, "task": {"name": "classify"}}
        sample = {"image": ((3, 32, 32), "float32"), "target": ((), "int64")}
    else:
        sections = {"model": {"layers": 2, "width": 64, "heads": 2}, "data": {"sequence": 32}}
        sample = {"tokens": ((32,), "int64"), "targets": ((32,), "int64")}
    tiny = parse({**sections, "train": train, "layout": layout})
    next(_updates(Job(tiny, {"vocab": 256, "classes": 10, "channels": 3}, sample)))
