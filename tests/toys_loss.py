"""A loss of a user's own, on whole logits."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from megalith.tasks import IGNORE


def summed(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy summed over the valid targets."""
    flat = logits.flatten(0, -2)
    return F.cross_entropy(flat, targets.flatten(), ignore_index=IGNORE, reduction="sum")
