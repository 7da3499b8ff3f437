"""Floating-point operations of an update, counted and not guessed."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from megalith import models, tasks
from megalith.models import ModelConfig
from megalith.recipe.schema import TaskSection
from megalith.tasks import Batch


def model_flops(config: ModelConfig, task: TaskSection, batch: Batch) -> int | None:
    """FLOPs of one forward and backward over ``batch``, by running a copy on the meta device.

    Matmuls, convolutions and attention count, two per multiply-add; attention counts in full,
    masked half included, and recomputation does not (Chowdhery et al. 2022, appendix B).

    Args:
        config: resolved.

    Returns:
        The count, or ``None`` for a module of the user's that does not run without data.
    """
    try:
        model = models.build(config, seed=0, device="meta")
        shapes = {name: tensor.to("meta") for name, tensor in batch.items()}
        # torch leaves out the in-place form, by which the head's gradient is summed over chunks.
        in_place = {torch.ops.aten.addmm_: _addmm_flops}
        with FlopCounterMode(display=False, custom_mapping=in_place) as counter:
            tasks.build(task).loss(model, shapes).total.backward()
    except Exception:  # any code of the user's may run here, and a count is only a figure
        return None
    return counter.get_total_flops()


def _addmm_flops(total: list[int], left: list[int], right: list[int], **rest: Any) -> int:
    return 2 * left[0] * left[1] * right[1]
