"""What the planner had said of a run, beside what happened (contract 10).

Nothing is traced here: the recipe must have been planned before, in the same place.
"""

from __future__ import annotations

import torch

from megalith.core import devices, units
from megalith.core.errors import MegalithError, PlanError
from megalith.plan.estimate import plan
from megalith.plan.worker import CACHE, Asked, Pool, Seen
from megalith.recipe import Recipe
from megalith.step import Step


class Remembered(Pool):
    """Traces that were made before, and no others."""

    def _trace(self, asked: Asked) -> Seen | PlanError:
        return PlanError("plan: this recipe was not planned here")


class Beside:
    """Measures one process's own memory on the CPU, and sets it beside the plan.

    The process's memory before training, and all that is not the step's, does not count: it is
    read when this is made, just before the first update.
    """

    def __init__(self, recipe: Recipe, step: Step, device: torch.device) -> None:
        self._recipe, self._device = recipe, device
        self._asked = step.mesh.size == 1 and not devices.is_accelerator(device) and CACHE.exists()
        if not self._asked:
            return
        state = sum(
            piece.tensor.untyped_storage().nbytes()
            for part in step.pieces().values()
            for piece in part.values()
        )
        self._before = devices.peak_memory(device) - state

    def line(self, updates: int, seconds: float) -> str | None:
        """Predicted and measured memory and time, or ``None`` if the recipe was never planned.

        Args:
            updates: how many were made.
            seconds: that they took, without data, evaluation and saving.
        """
        if not self._asked or not updates:
            return None
        try:
            found = plan(self._recipe, advise=False, pool=Remembered(CACHE))
        except MegalithError:
            return None  # it was not planned, or cannot be
        peak, took = devices.peak_memory(self._device) - self._before, seconds / updates
        memory, time = found.ranks[0].allocated, found.time.seconds
        return (
            f"memory: predicted {units.size(memory)}, measured {units.size(peak)} resident "
            f"({memory / peak - 1:+.1%}); an update: predicted {units.duration(time)}, "
            f"measured {units.duration(took)} ({time / took - 1:+.1%})"
        )
