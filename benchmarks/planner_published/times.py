"""Throughput of published rows: by the catalogue's constants, and by constants fitted to half."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from planner_published.rows import Row, machine

from megalith.plan.extrapolate import Part
from megalith.plan.machine import Machine
from megalith.plan.time import step_time
from megalith.plan.worker import Seen
from megalith.recipe.schema import LayoutSection

Parts = list[tuple[Part, Seen]]
_CONSTANTS = ("matmul", "attention", "memory", "links")
_ROUNDS, _STEPS = 4, (0.5, 0.7, 0.85, 0.93, 0.97, 1.03, 1.07, 1.18, 1.4, 2.0)


@dataclass(frozen=True)
class Timed:
    """A row whose ranks' work is known."""

    row: Row
    parts: Parts
    layout: LayoutSection
    micros: int

    @property
    def device(self) -> str:
        """Rows with the same share constants."""
        for name in ("A100", "H200", "H100-80GB"):
            if self.row.gpu.upper().replace("_", "-").startswith(name):
                return name
        return "H100 of 94 to 96 GB"

    @property
    def fitted(self) -> bool:
        """Whether the row is of the half that constants are fitted to, chosen by a hash."""
        return hashlib.sha256(f"published row {self.row.number}".encode()).digest()[0] % 2 == 0

    def tokens(self, constants: dict[str, float] | None = None) -> float:
        """Tokens per second and GPU."""
        on = machine(self.row)
        if constants is not None:
            on = _with(on, constants)
        took = step_time(self.parts, self.layout, self.micros, on)
        return self.row.whole * self.row.sequence / took.seconds / self.row.gpus


def fit(rows: Sequence[Timed]) -> dict[str, dict[str, float]]:
    """Constants of each device that make the mean absolute error of its rows least.

    Coordinate by coordinate, from the catalogue's; shares stay between 5 and 100 %.
    """
    found = {}
    for name in dict.fromkeys(row.device for row in rows):
        mine = [row for row in rows if row.device == name]
        found[name] = _descended(mine, _start(machine(mine[0].row)))
    return found


def error(predicted: float, published: float) -> float:
    """Relative, positive where the prediction is too high."""
    return predicted / published - 1


def _descended(rows: Sequence[Timed], start: dict[str, float]) -> dict[str, float]:
    def loss(constants: dict[str, float]) -> float:
        logs = [abs(math.log(r.tokens(constants) / r.row.tokens)) for r in rows]
        return sum(logs) / len(logs)

    best, least = start, loss(start)
    for _ in range(_ROUNDS):
        before = least
        for name in _CONSTANTS:
            best, least = _line(best, least, name, loss)
        if before - least < 1e-4:
            break
    return best


def _line(
    best: dict[str, float],
    least: float,
    name: str,
    loss: Callable[[dict[str, float]], float],
) -> tuple[dict[str, float], float]:
    for step in _STEPS:
        tried = {**best, name: min(1.0, max(0.05, best[name] * step))}
        if tried != best and (value := loss(tried)) < least:
            best, least = tried, value
    return best, least


def _start(on: Machine) -> dict[str, float]:
    return {**on.device.share, "links": on.device.link_share}


def _with(on: Machine, constants: dict[str, float]) -> Machine:
    share = {name: constants[name] for name in ("matmul", "attention", "memory")}
    device = replace(on.device, share=share, link_share=constants["links"])
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
