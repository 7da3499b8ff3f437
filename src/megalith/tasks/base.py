"""What a task is: the loss contract.

A task returns the *sum* of its loss and says, from the batch alone, the *count* that it is a sum
over (tokens, samples, pixels). The step divides once, by the count of the whole global batch, so
accumulation, ragged batches and every layout give the gradient of one big batch (contract 1).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor, nn

Batch = dict[str, Tensor]
"""Named tensors whose first dimension is the sample; ``"sample"`` holds the sample ids, int64."""

IGNORE = -100
"""The target that does not count."""


@dataclass
class Loss:
    """One micro-batch's loss.

    Attributes:
        total: float32 scalar with a gradient, the sum over what :meth:`Task.count` counts.
        sums: further scalars without gradient that add up over micro-batches and ranks.
    """

    total: Tensor
    sums: dict[str, Tensor] = field(default_factory=dict)


class Task(Protocol):
    """What a model is asked to do.

    A pipeline needs two attributes more: ``sums``, the names that :attr:`Loss.sums` may have, and
    ``inputs(batch) -> (args, kwargs)``, what :meth:`loss` calls the model with. Context parallelism
    needs ``sequences``, the names of the batch's tensors ``[batch, sequence]``.

    Attributes:
        item: what :meth:`count` counts, in the plural, such as ``"tokens"``; for messages.
    """

    item: str

    def count(self, batch: Batch) -> Tensor:
        """Scalar int64: how many terms :meth:`loss` sums for ``batch``."""
        ...

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        """Run ``model`` on ``batch`` and sum its loss."""
        ...

    def summary(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Metrics from sums over any set of batches: ``loss`` and ``count`` are among them."""
        ...
