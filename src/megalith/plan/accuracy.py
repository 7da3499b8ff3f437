"""What real updates of a recipe take on this machine's CPU, to hold a prediction against.

Two truths: the events of torch's own CPU allocator, which are exact, and the process's resident
set, which code pages and thread pools are part of as well.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from megalith import step as steps
from megalith.core import devices
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
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        updates = _updates(job)
        next(updates)
        torch.empty(_MARK, dtype=torch.uint8)
        next(updates)
        updates.close()
    now = peak = 0
    marked = False
    for size in _events(profiler):
        now += size
        marked = marked or size == _MARK
        if marked and size != _MARK:
            peak = max(peak, now)
    return peak


def resident(job: Job) -> int:
    """How far the resident set rises from the start of a fresh process over two updates, bytes.

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


def _events(profiler: profile) -> Iterator[int]:
    """Sizes of allocations, and of frees as negative numbers, in their order."""
    found = profiler.profiler
    assert found is not None
    assert found.kineto_results is not None
    events: list[Any] = [e for e in found.kineto_results.events() if e.name() == "[memory]"]
    return (e.nbytes() for e in sorted(events, key=lambda e: e.start_ns()))


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
    """Load the code that every update runs, by one of a tiny model: no memory of the real one's."""
    precision = {"precision": job.recipe.train.precision, "global_batch": 2}
    if job.recipe.model.family == "resnet":
        model = {"family": "resnet", "blocks": [1, 1], "width": 8}
        sections = {"model": model, "data": {"source": "digits"}, "task": {"name": "classify"}}
        sample = {"image": ((3, 32, 32), "float32"), "target": ((), "int64")}
    else:
        sections = {"model": {"layers": 1, "width": 64, "heads": 2}, "data": {"sequence": 32}}
        sample = {"tokens": ((32,), "int64"), "targets": ((32,), "int64")}
    tiny = parse({**sections, "train": precision})
    next(_updates(Job(tiny, {"vocab": 256, "classes": 10, "channels": 3}, sample)))
