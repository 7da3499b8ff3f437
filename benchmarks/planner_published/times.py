"""Throughput of published rows: by the catalogue's constants, and by constants fitted to half."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from planner_published.rows import Row, machine

from megalith.plan.extrapolate import Part
from megalith.plan.machine import Machine
from megalith.plan.time import fused, step_time
from megalith.plan.worker import Seen
from megalith.recipe.schema import LayoutSection

Parts = list[tuple[Part, Seen]]
Constants = dict[str, float]

_GUESSED_SHARED = {"links": 0.75, "shown": 0.2, "waited": 1.0, "fused": 0.5}
GUESSED = {
    name: {**dict(zip(("matmul", "attention", "memory"), share, strict=True)), **_GUESSED_SHARED}
    for name, share in {
        "A100": (0.75, 0.50, 0.80),
        "H100-SXM": (0.65, 0.35, 0.80),
        "H100-96GB": (0.65, 0.35, 0.80),
        "H200": (0.68, 0.37, 0.80),
    }.items()
}
"""Constants by device as they were guessed before any of the rows was looked at."""

SHARED = ("shown", "waited", "fused")
"""Constants of all devices: see ``Device``, and for ``fused`` :func:`megalith.plan.time.fused`."""

_OWN = ("matmul", "attention", "memory", "links")
_LOOSE = {"matmul": 0.1, "attention": 0.2, "memory": 0.1, "links": 0.2}
"""How far a constant may lie from the guess without being thought odd, in natural logarithms; 0.4
for those that are not named."""

_NOISE = 0.04
"""How far a row may lie from its prediction without being thought odd."""

_ROUNDS, _STEPS = 12, (0.1, 0.03, 0.01)


@dataclass(frozen=True)
class Timed:
    """A row whose ranks' work is known."""

    row: Row
    parts: Parts
    layout: LayoutSection
    micros: int

    @cached_property
    def machine(self) -> Machine:
        """What the row ran on."""
        return machine(self.row)

    @cached_property
    def device(self) -> str:
        """Rows with the same share constants."""
        return self.machine.device.key.removesuffix("-40GB").removesuffix("-80GB")

    @property
    def fitted(self) -> bool:
        """Whether the row is of the half that constants are fitted to, chosen by a hash."""
        return hashlib.sha256(f"published row {self.row.number}".encode()).digest()[0] % 2 == 0

    def tokens(self, constants: Constants) -> float:
        """Tokens per second and GPU."""
        on, parts = _with(self.machine, constants), self.parts
        if self.row.compiled:
            parts = [(part, fused(seen, constants["fused"])) for part, seen in parts]
        took = step_time(parts, self.layout, self.micros, on)
        return self.row.whole * self.row.sequence / took.seconds / self.row.gpus


def fit(rows: Sequence[Timed]) -> dict[str, Constants]:
    """Constants by device that explain its rows with the least change of what was guessed.

    The likeliest ones, if logarithms of errors and of changes are spread as :data:`_NOISE` and
    :data:`_LOOSE` say, the errors with a wide tail, so that an odd row moves nothing. Coordinate by
    coordinate.
    """
    groups = {name: [r for r in rows if r.device == name] for name in (r.device for r in rows)}
    best = {name: dict(GUESSED[name]) for name in groups}
    costs = {name: _cost(groups[name], best[name]) for name in groups}
    for _ in range(_ROUNDS):
        moved = False
        for name in groups:
            for constant in _OWN:
                moved |= _moved([name], constant, groups, best, costs)
        for constant in SHARED:
            moved |= _moved(list(groups), constant, groups, best, costs)
        if not moved:
            break
    return best


def error(predicted: float, published: float) -> float:
    """Relative, positive where the prediction is too high."""
    return predicted / published - 1


def _moved(
    names: Sequence[str],
    constant: str,
    groups: dict[str, list[Timed]],
    best: dict[str, Constants],
    costs: dict[str, float],
) -> bool:
    """Whether a constant of the devices ``names`` has found a better place, where it now is."""

    def change(value: float) -> float:
        return (math.log(value / GUESSED[names[0]][constant]) / _LOOSE.get(constant, 0.4)) ** 2

    moved = False
    for step in _STEPS:
        for sign in (1, -1):
            now = best[names[0]][constant]
            value = now * math.exp(sign * step)
            if constant != "waited" and value > 1:
                continue
            tried = {name: {**best[name], constant: value} for name in names}
            found = {name: _cost(groups[name], tried[name]) for name in names}
            before = sum(costs[name] for name in names) + change(now)
            if sum(found.values()) + change(value) < before - 1e-6:
                best |= tried
                costs |= found
                moved = True
    return moved


def _cost(rows: Sequence[Timed], constants: Constants) -> float:
    logs = (math.log(r.tokens(constants) / r.row.tokens) / _NOISE for r in rows)
    return sum(2 * math.log1p(off * off / 2) for off in logs)


def _with(on: Machine, constants: Constants) -> Machine:
    share = {name: constants[name] for name in ("matmul", "attention", "memory")}
    device = replace(
        on.device,
        share=share,
        link_share=constants["links"],
        shown=constants["shown"],
        waited=constants["waited"],
    )
    return replace(on, device=device)


@dataclass(frozen=True)
class Pair:
    """Two rows of one model on the same GPUs under different layouts: which one is faster."""

    one: int
    other: int
    published: float
    predicted: float

    @property
    def right(self) -> bool:
        """Whether prediction and publication agree on it."""
        return (self.published > 1) == (self.predicted > 1)


def pairs(rows: Iterable[tuple[Row, float]], apart: float = 0.03) -> list[Pair]:
    """All pairs whose published throughputs are at least ``apart`` from each other.

    Args:
        rows: with the throughput that is predicted.
    """
    found: list[Pair] = []
    rows = list(rows)
    for n, (one, first) in enumerate(rows):
        for other, second in rows[n + 1 :]:
            differs = (one.layout, one.recompute) != (other.layout, other.recompute)
            ratio = one.tokens / other.tokens
            if _alike(one) == _alike(other) and differs and abs(math.log(ratio)) > apart:
                found.append(Pair(one.number, other.number, ratio, first / second))
    return found


def _alike(row: Row) -> tuple[object, ...]:
    return row.source, row.model, row.gpus, row.gpu, row.sequence, row.dtype
