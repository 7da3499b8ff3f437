"""Classification: predict the class of each image."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megalith.core.errors import RecipeError
from megalith.tasks.base import IGNORE, Batch, Loss

UserLoss = Callable[[Tensor, Tensor], Tensor]

_TOP5_FROM = 10
"""With fewer classes, being among the best five says little."""


class Classify:
    """Cross-entropy summed over images.

    Batches hold ``image`` (float ``[batch, channels, height, width]``) and ``target`` (int64
    ``[batch]``, ``-100`` does not count). The model takes the image and returns logits
    ``[batch, classes]``, or an object whose ``logits`` they are. One target per pixel works too:
    logits ``[batch, classes, height, width]``, targets ``[batch, height, width]``.

    Args:
        label_smoothing: share of the target spread over all classes (Szegedy et al. 2016,
            "Rethinking the Inception Architecture", section 7).
        loss: replaces cross-entropy: ``f(logits, targets)`` is the sum over valid targets.
    """

    item = "images"
    sums = ("correct", "correct5")

    def __init__(self, label_smoothing: float = 0.0, loss: UserLoss | None = None) -> None:
        self.label_smoothing = label_smoothing
        self.user_loss = loss

    def inputs(self, batch: Batch) -> tuple[tuple[Tensor], dict[str, Tensor]]:
        """What the model is called with."""
        return (batch["image"],), {}

    def count(self, batch: Batch) -> Tensor:
        """Valid targets of the batch."""
        return (batch["target"] != IGNORE).sum()

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        """The summed loss, and how many targets are the best, or among the best five, classes.

        The sums are int64: they add up exactly, whatever the batches.

        Raises:
            RecipeError: the user's loss returned something other than a scalar.
        """
        args, _ = self.inputs(batch)
        outputs = model(*args)
        logits = getattr(outputs, "logits", outputs)
        if logits.dtype in (torch.bfloat16, torch.float16):
            logits = logits.float()
        targets = batch["target"]
        if self.user_loss is None:
            total = F.cross_entropy(
                logits,
                targets,
                ignore_index=IGNORE,
                reduction="sum",
                label_smoothing=self.label_smoothing,
            )
        else:
            total = self.user_loss(logits, targets)
            if total.dim():
                raise RecipeError(
                    f"task.loss: must return a scalar, the sum over the valid targets, "
                    f"not shape {list(total.shape)}"
                )
        return Loss(total, _correct(logits.detach(), targets))

    def summary(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Mean loss, accuracy, and top-5 accuracy from ten classes on; accuracies from 0 to 1."""
        count = max(sums["count"], 1)
        names = {"correct": "accuracy", "correct5": "accuracy_top5"}
        report = {"loss": sums["loss"] / count}
        return report | {name: sums[key] / count for key, name in names.items() if key in sums}


def _correct(logits: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """Hits among the best class and the best five; a target that does not count is never one."""
    if logits.dim() != targets.dim() + 1:
        return {}  # a user's loss may take outputs that are no logits of classes
    sums = {"correct": (logits.argmax(1) == targets).sum()}
    if logits.shape[1] >= _TOP5_FROM:
        best = logits.topk(5, dim=1).indices
        sums["correct5"] = (best == targets.unsqueeze(1)).sum()
    return sums
