"""Sixty-four ragged samples of a toy language that can be learnt, as data of the user's own."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from megalith.data import Splits
from megalith.tasks import Batch, Loss
from megalith.tasks.language import Language
from toys import VOCAB


class Ragged(Dataset[dict[str, Tensor]]):
    """Counting sequences: the next token is the token plus three; lengths differ."""

    def __init__(self, size: int, offset: int) -> None:
        self.size, self.offset = size, offset

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = (torch.arange(13) * 3 + index + self.offset) % VOCAB
        targets = tokens[1:].clone()
        targets[(index * 5) % 12 + 1 :] = -100
        return {"tokens": tokens[:-1].contiguous(), "targets": targets}


def ragged() -> Splits:
    """The data's factory."""
    return Splits(train=Ragged(64, 0), validation=Ragged(21, 7), fingerprint="ragged")


class Poisoned(Language):
    """Language modelling where one training sample makes the loss infinite."""

    def __init__(self, sample: int) -> None:
        super().__init__()
        self.sample = sample

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        """As usual, or infinite."""
        found = super().loss(model, batch)
        bad = model.training & (batch["sample"] == self.sample).any()
        return Loss(found.total * torch.where(bad, float("inf"), 1.0), found.sums)
