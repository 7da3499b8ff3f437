"""Exact evaluation: sums over all batches, divided once."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass

import torch

from megalith.core.errors import RecipeError
from megalith.step import Step
from megalith.tasks import Batch, Task
from megalith.tasks.base import IGNORE


def evaluate(step: Step, batches: Iterable[Batch]) -> dict[str, float]:
    """The task's metrics over ``batches``, which may be ragged; with the averaged weights if any.

    On many ranks each gives its own share, equally many batches, and all get the same metrics.
    Sums are taken in Python floats (float64) over the batches' own sums, so the result does not
    depend on how the samples are split.
    """
    totals: dict[str, float] = {}
    with step.ema.applied() if step.ema is not None else nullcontext():
        for batch in batches:
            for name, value in step.evaluate(batch).items():
                totals[name] = totals.get(name, 0.0) + float(value)
    return step.task.summary(totals)


def without_targets(batch: Batch, task: Task) -> Batch:
    """``batch``, but nothing in it counts: what a rank evaluates when no sample is left for it.

    It must take part in the forward pass, in which ranks wait for each other.

    Raises:
        RecipeError: the task calls its targets by a name that is not known here.
    """
    blank = {"target": IGNORE, "targets": IGNORE, "bytes": 0}
    empty = {
        name: torch.full_like(tensor, blank[name]) if name in blank else tensor
        for name, tensor in batch.items()
    }
    if int(task.count(empty)):
        raise RecipeError(
            "evaluate.samples: the validation batches do not share out evenly over the ranks, and "
            "a batch of this task has neither 'target' nor 'targets' to leave out; choose a "
            "multiple of the ranks that have samples of their own"
        )
    return empty


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
