"""Two outcomes side by side: what differs, by how much, and by which factor."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from megalith.layout.mesh import AXES
from megalith.recipe.schema import LayoutSection
from megalith.verify.trial import Outcome

_FLOOR = {"gradient": 1e-4}
_AMPLIFIED = 1e-2
"""A tensor much smaller than the largest of its kind is measured against this share of that one:
gradients that are zero in exact arithmetic (those of a key's bias) are rounding errors, on one
process too, and Adam makes updates of them."""

_ROUNDING = 1e-6
"""Of a sum of a few float32 numbers; 6e-8 was measured, and mistakes come to 1e-2."""


@dataclass(frozen=True)
class Difference:
    """One thing that is not the same.

    Attributes:
        kind: ``number``, ``gradient``, ``parameter``, ``state`` or ``average``.
        error: largest difference over largest value; infinite if one of the two is not there.
        factor: what one has to multiply the right one with, where that explains it.
        rounding: what a narrower dtype than the rest's explains: a loss that the user's own task
            sums in float32.
    """

    kind: str
    name: str
    error: float
    factor: float | None = None
    rounding: float = 0.0

    def within(self, tolerance: float) -> bool:
        """Whether this is right."""
        return self.error <= max(tolerance, self.rounding)

    def line(self, layout: LayoutSection, micros: int, axes: Sequence[str] = ()) -> str:
        """In words, for a layout whose ranks have ``micros`` micro-batches each.

        Args:
            axes: that brought it in; a factor is looked for among them first.
        """
        what = self.name if self.kind == "number" else f"{self.kind} of '{self.name}'"
        if math.isinf(self.error):
            return f"{what} is missing, or on one side only"
        if self.factor is None:
            return f"{what} is off by {self.error:.1e} of its size"
        meaning = _meaning(self.factor, layout, micros, axes)
        return f"{what} is {self.factor:.6g} times what it should be{meaning}"


def compare(right: Outcome, other: Outcome, tolerance: float) -> list[Difference]:
    """What differs by more than ``tolerance``, the worst of each kind first."""
    return [d for d in errors(right, other) if not d.within(tolerance)]


def errors(right: Outcome, other: Outcome) -> list[Difference]:
    """Every number and tensor with its error, the worst of each kind first."""
    found = list(_numbers(right, other))
    for kind in {**right.tensors, **other.tensors}:
        pair = right.tensors.get(kind, {}), other.tensors.get(kind, {})
        found += sorted(_tensors(kind, *pair), key=_badness)
    return found


def worst(found: list[Difference]) -> float:
    """The largest error."""
    return max((d.error for d in found), default=0.0)


def _badness(difference: Difference) -> float:
    return -difference.error if difference.error == difference.error else -math.inf


def _numbers(right: Outcome, other: Outcome) -> Iterator[Difference]:
    for name in {**right.numbers, **other.numbers}:
        if name not in right.numbers or name not in other.numbers:
            yield Difference("number", name, math.inf)
            continue
        a, b = right.numbers[name], other.numbers[name]
        error = abs(a - b) / max(abs(a), 1e-12)
        error = error if error == error else math.inf
        factor = b / a if a and error > 1e-6 else None
        rounding = _ROUNDING if name in right.narrow else 0.0
        yield Difference("number", name, error, factor, rounding)


def _tensors(
    kind: str, right: Mapping[str, Tensor], other: Mapping[str, Tensor]
) -> Iterator[Difference]:
    largest = max((_size(t) for t in right.values()), default=0.0)
    for name in {**right, **other}:
        a, b = right.get(name), other.get(name)
        if a is None or b is None or a.shape != b.shape:
            yield Difference(kind, name, math.inf)
            continue
        scale = max(_size(a), _FLOOR.get(kind, _AMPLIFIED) * largest, 1e-300)
        error = float((a - b).abs().max()) / scale if a.numel() else 0.0
        if error != error:
            error = math.inf
        yield Difference(kind, name, error, _factor(a, b) if 1e-6 < error < math.inf else None)


def _size(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def _factor(right: Tensor, other: Tensor) -> float | None:
    """The number that makes ``right`` into ``other``, if there is one."""
    right, other = right.double().flatten(), other.double().flatten()
    square = float(right @ right)
    if not square:
        return None
    factor = float(right @ other) / square
    rest = float((other - factor * right).norm()) / math.sqrt(square)
    return factor if rest < 1e-6 else None


def _meaning(factor: float, layout: LayoutSection, micros: int, axes: Sequence[str]) -> str:
    """What of the layout has that size: ``" (x layout.tensor)"``; all that have it if unknown."""
    counts = {
        "the micro-batches of a rank": micros,
        "the ranks with samples of their own": layout.data_ranks,
        "all micro-batches": micros * layout.data_ranks,
        "all ranks": layout.ranks,
    }
    for power, sign in ((1, "x "), (-1, "/ "), (0.5, "x root of "), (-0.5, "/ root of ")):
        for candidates in (axes, AXES):
            sizes = {f"layout.{axis}": getattr(layout, axis) for axis in candidates}
            sizes |= {"the micro-batches of a rank": micros} if sizes else {}
            if fitting := _fitting(factor, power, sizes):
                return f" ({sign}{' or '.join(fitting)})"
        if fitting := _fitting(factor, power, counts):
            return f" ({sign}{fitting[0]})"
    return ""


def _fitting(factor: float, power: float, sizes: Mapping[str, int]) -> list[str]:
    return [n for n, size in sizes.items() if size > 1 and abs(factor / size**power - 1) < 1e-6]
