"""Exact evaluation: sums over all batches, divided once."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass

from megalith.step import Step
from megalith.tasks import Batch


def evaluate(step: Step, batches: Iterable[Batch]) -> dict[str, float]:
    """The task's metrics over ``batches``, which may be ragged; with the averaged weights if any.

    Sums are taken in Python floats (float64) over the batches' own sums, so the result does not
    depend on how the samples are split.
    """
    totals: dict[str, float] = {}
    with step.ema.applied() if step.ema is not None else nullcontext():
        for batch in batches:
            for name, value in step.evaluate(batch).items():
                totals[name] = totals.get(name, 0.0) + float(value)
    return step.task.summary(totals)


@dataclass
class Improvement:
    """The best validation loss so far, and whether it is time to stop.

    Attributes:
        patience: evaluations without improvement after which to stop; ``None`` is never.
        min_delta: smallest fall that counts as an improvement.
    """

    patience: int | None
    min_delta: float
    best: float = float("inf")
    since: int = 0

    def see(self, loss: float) -> bool:
        """Take note of an evaluation; true if it improved on the best."""
        if loss < self.best - self.min_delta:
            self.best, self.since = loss, 0
            return True
        self.since += 1
        return False

    @property
    def exhausted(self) -> bool:
        """Whether patience has run out."""
        return self.patience is not None and self.since >= self.patience
