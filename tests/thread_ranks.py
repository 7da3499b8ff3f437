"""Ranks as threads of one process, and random layouts, for tests of what goes to disk."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from megalith.layout.mesh import AXES, Mesh
from megalith.layout.pieces import Piece

Pieces = dict[str, Piece]


class _Meeting:
    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size)
        self.values: list[Tensor] = [torch.zeros(())] * size


class ThreadMesh(Mesh):
    """A mesh whose ranks are threads that meet in memory."""

    def meet_in(self, meeting: _Meeting) -> ThreadMesh:
        self.meeting = meeting
        return self

    def sum_(self, values: Tensor) -> Tensor:
        self.meeting.values[self.rank] = values.clone()
        self.meeting.barrier.wait(30)
        total = torch.stack(self.meeting.values).sum(0)
        self.meeting.barrier.wait(30)
        return values.copy_(total)

    def barrier(self) -> None:
        self.meeting.barrier.wait(30)


def on_threads(size: int, work: Callable[[Mesh], Any]) -> list[Any]:
    """``work(mesh)`` on each rank; its results, an error among them as itself."""
    meeting = _Meeting(size)

    def rank(number: int) -> Any:
        sizes = dict.fromkeys(AXES, 1) | {"replicate": size}
        place = dict.fromkeys(AXES, 0) | {"replicate": number}
        try:
            return work(ThreadMesh(sizes, place).meet_in(meeting))
        except Exception as error:
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(rank, range(size)))


def whole_tensors(seed: int) -> dict[str, Tensor]:
    """Tensors of many shapes and dtypes, the awkward ones among them."""
    generator = torch.Generator().manual_seed(seed)
    shapes: list[tuple[int, ...]] = [(), (1,), (13,), (7, 5), (8, 6), (3, 4, 5), (2, 3, 1, 4)]
    dtypes = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool]
    found = {"empty": torch.zeros(0, 4), "f8": torch.ones(4, 4).to(torch.float8_e4m3fn)}
    for number, shape in enumerate(shapes * 2):
        values = torch.randn(shape, generator=generator) * 50
        dtype = dtypes[(number + seed) % len(dtypes)]
        found[f"layer.{number}"] = (values > 0) if dtype == torch.bool else values.to(dtype)
    return found


def spread(tensors: Mapping[str, Tensor], ranks: int, seed: int, *, fill: bool) -> list[Pieces]:
    """Every tensor cut into random boxes, and each rank's pieces of them.

    Args:
        fill: with the tensors' values; without, zeros.
    """
    draw = random.Random(seed)
    layout: list[Pieces] = [{} for _ in range(ranks)]
    for name, tensor in tensors.items():
        boxes = _cut(draw, tuple(tensor.shape), draw.randint(1, ranks))
        holders = draw.sample(range(ranks), len(boxes))
        for (start, shape), rank in zip(boxes, holders, strict=True):
            layout[rank][name] = _piece(tensor, start, shape, owned=True, fill=fill)
        for rank in set(range(ranks)) - set(holders):
            if draw.random() < 0.5:  # a copy that somebody else answers for
                start, shape = draw.choice(boxes)
                layout[rank][name] = _piece(tensor, start, shape, owned=False, fill=fill)
    return layout


def _piece(tensor: Tensor, start: Any, shape: Any, *, owned: bool, fill: bool) -> Piece:
    box = tuple(slice(a, a + n) for a, n in zip(start, shape, strict=True))
    part = tensor[box]
    part = part.clone() if fill else torch.zeros(part.shape, dtype=torch.float32).to(part.dtype)
    return Piece(part, tuple(tensor.shape), tuple(start), owned)


def _cut(draw: random.Random, shape: tuple[int, ...], count: int) -> list[tuple[Any, Any]]:
    boxes = [((0,) * len(shape), shape)]
    while len(boxes) < count:
        start, size = boxes.pop(draw.randrange(len(boxes)))
        dims = [dim for dim, length in enumerate(size) if length]
        if not dims:
            return [*boxes, (start, size)]
        dim = draw.choice(dims)
        at = draw.randint(0, size[dim])  # also empty parts, as uneven sharding gives
        first = (start, (*size[:dim], at, *size[dim + 1 :]))
        further = (*start[:dim], start[dim] + at, *start[dim + 1 :])
        boxes += [first, (further, (*size[:dim], size[dim] - at, *size[dim + 1 :]))]
    return boxes
