"""What the planner had said of a run, beside what happened (contract 10).

Nothing is traced here: the recipe must have been planned before, in the same place.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch.profiler import ProfilerActivity, profile

from megalith.core import devices, units
from megalith.core.errors import MegalithError, PlanError
from megalith.plan import machine
from megalith.plan.accuracy import sizes
from megalith.plan.estimate import Plan, plan
from megalith.plan.worker import CACHE, Asked, Pool, Seen
from megalith.recipe import Recipe
from megalith.step import Step

_WATCHED = 2
"""The update whose tensors are counted on the CPU: the first one makes the optimizer's state."""


class Remembered(Pool):
    """Traces that were made before, and no others."""

    def _trace(self, asked: Asked) -> Seen | PlanError:
        return PlanError("plan: this recipe was not planned here")


@dataclass(frozen=True)
class Compared:
    """One rank's memory, bytes, and an update's time, seconds.

    Attributes:
        measured_memory: at the most: of tensors, or of what is resident.
        resident: of several ranks on a CPU: what this process held beyond what it did before the
            first update, which code and thread pools are part of.
        kinds: what the predicted memory consists of.
    """

    predicted_memory: int
    measured_memory: int
    predicted_seconds: float
    measured_seconds: float
    resident: bool
    kinds: dict[str, int] = field(default_factory=dict)

    def line(self) -> str:
        """Both, and by how much they are apart."""
        memory = self.predicted_memory / self.measured_memory - 1
        time = self.predicted_seconds / self.measured_seconds - 1
        return (
            f"memory: predicted {units.size(self.predicted_memory)}, measured "
            f"{units.size(self.measured_memory)}{' resident' if self.resident else ''} "
            f"({memory:+.1%}); an update: predicted {units.duration(self.predicted_seconds)}, "
            f"measured {units.duration(self.measured_seconds)} ({time:+.1%})"
        )


class Beside:
    """Sets rank 0's memory and time beside the plan; other ranks need it not.

    Args:
        recipe: compared only if it was planned for this machine, in the same place.
    """

    def __init__(self, recipe: Recipe, step: Step, device: torch.device) -> None:
        self._step, self._device = step, device
        self._plan = _remembered(recipe, device) if step.mesh.main and CACHE.exists() else None
        self._resident = not devices.is_accelerator(device) and step.mesh.size > 1
        self._updates = self._tensors = self._before = 0
        if self._plan is not None and self._resident:
            # What the process holds before its first update, and is not the step's, is no tensor.
            self._before = devices.peak_memory(device) - self._state()

    @contextmanager
    def update(self) -> Iterator[None]:
        """Around every update: the CPU tells the bytes of tensors only of what is profiled."""
        self._updates += 1
        alone = not devices.is_accelerator(self._device) and not self._resident
        if self._plan is None or not alone or self._updates != _WATCHED:
            yield
            return
        before = self._state()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            yield
        self._tensors = max(itertools.accumulate(sizes(profiler), initial=before))

    def compared(self, update_seconds: Sequence[float]) -> Compared | None:
        """Predicted and measured, or ``None`` if there was no plan, or too little to measure.

        Args:
            update_seconds: of updates, without data, evaluation and saving, by line of metrics.
                The median counts, without the first line, which holds warming up.
        """
        if self._plan is None or not update_seconds:
            return None
        memory = self._tensors or devices.peak_memory(self._device) - self._before
        rank = next(rank for rank in self._plan.ranks if rank.stage == 0)
        return Compared(
            predicted_memory=rank.allocated,
            measured_memory=memory,
            predicted_seconds=self._plan.time.seconds,
            measured_seconds=statistics.median(update_seconds[1:] or update_seconds),
            resident=not devices.is_accelerator(self._device) and not self._tensors,
            kinds={name: size for name, size in rank.kinds.items() if size},
        )

    def _state(self) -> int:
        """Bytes of weights, optimizer state and averages on this rank."""
        return sum(
            piece.tensor.untyped_storage().nbytes()
            for part in self._step.pieces().values()
            for piece in part.values()
        )


def _remembered(recipe: Recipe, device: torch.device) -> Plan | None:
    """The plan of a recipe for this machine, if it was made here before."""
    try:
        on = machine.this(str(device), recipe.layout.ranks)
        return plan(recipe, on, advise=False, pool=Remembered(CACHE))
    except MegalithError:
        return None  # it was not planned, cannot be, or the catalogue has no such device
