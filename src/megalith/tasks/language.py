"""Language modelling: predict each next token."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping

from torch import Tensor, nn

from megalith.models.decoder.model import Decoder
from megalith.tasks.base import IGNORE, Batch, Loss
from megalith.tasks.cross_entropy import cross_entropy, linear_cross_entropy

UserLoss = Callable[[Tensor, Tensor], Tensor]


class Language:
    """Next-token cross-entropy, summed over tokens.

    Batches hold ``tokens`` and ``targets`` (int64 ``[batch, seq]``, ``-100`` does not count),
    ``bytes`` (int64 ``[batch]``, the UTF-8 bytes that the targets stand for) and, where documents
    must not see each other, ``documents`` and ``positions`` (int64 ``[batch, seq]``).

    Args:
        label_smoothing: share of the target spread over the vocabulary.
        z_loss: weight of the squared log-normaliser.
        loss: replaces cross-entropy: ``f(logits, targets)`` is the sum over valid targets.

    Attributes:
        head_loss: cross-entropy of hidden states and the head's weight; a layout that divides the
            vocabulary puts its own here.
    """

    item = "tokens"
    sums = ("balance", "bytes")
    sequences = ("tokens", "targets", "documents", "positions")

    def __init__(
        self, *, label_smoothing: float = 0.0, z_loss: float = 0.0, loss: UserLoss | None = None
    ) -> None:
        self.label_smoothing = label_smoothing
        self.z_loss = z_loss
        self.user_loss = loss
        self.head_loss = linear_cross_entropy

    def inputs(self, batch: Batch) -> tuple[tuple[Tensor], dict[str, Tensor]]:
        """What the model is called with."""
        return (batch["tokens"],), {k: batch[k] for k in ("documents", "positions") if k in batch}

    def count(self, batch: Batch) -> Tensor:
        """Valid targets of the batch."""
        return (batch["targets"] != IGNORE).sum()

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        """The summed loss; logits are not materialised where the model takes a ``head``.

        In training a mixture of experts adds its balance loss, which is also among the sums.
        """
        args, inputs = self.inputs(batch)
        targets = batch["targets"]
        if self.user_loss is None and _takes_head(model):

            def head(hidden: Tensor, weight: Tensor) -> Tensor:
                return self.head_loss(
                    hidden,
                    weight,
                    targets,
                    label_smoothing=self.label_smoothing,
                    z_loss=self.z_loss,
                )

            total = model(*args, head=head, **inputs)
        else:
            output = model(*args, **inputs)
            logits = getattr(output, "logits", output)
            total = self._from_logits(logits, targets)
        sums = {"bytes": batch["bytes"].sum()} if "bytes" in batch else {}
        if isinstance(model, Decoder) and model.balance is not None:
            # Taken from the model, which could not be copied with a graph in it.
            balance, model.balance = model.balance, None
            total = total + balance
            sums["balance"] = balance.detach()
        return Loss(total, sums)

    def summary(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Mean loss in nats per token, perplexity, and bits per byte of the text."""
        loss = sums["loss"] / max(sums["count"], 1)
        report = {"loss": loss, "perplexity": math.exp(min(loss, 700.0))}
        if sums.get("bytes"):
            report["bits_per_byte"] = sums["loss"] / math.log(2) / sums["bytes"]
        return report

    def _from_logits(self, logits: Tensor, targets: Tensor) -> Tensor:
        if self.user_loss is not None:
            return self.user_loss(logits, targets)
        return cross_entropy(
            logits, targets, label_smoothing=self.label_smoothing, z_loss=self.z_loss
        )


def _takes_head(model: nn.Module) -> bool:
    model = getattr(model, "module", model)  # inside DistributedDataParallel
    return "head" in inspect.signature(model.forward).parameters
