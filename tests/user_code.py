"""Code of a user's own: a ViT with a loss, and a BERT with data and a task.

The guide docs/any-module.md shows this code, and the tests run it.
"""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset
from transformers import BertConfig, BertForMaskedLM, ViTConfig, ViTForImageClassification

from megalith.data import Splits
from megalith.tasks import IGNORE, Batch, Loss


def vit(layers: int = 2) -> nn.Module:
    config = ViTConfig(
        image_size=8,
        patch_size=2,
        num_channels=1,
        id2label=dict(enumerate("0123456789")),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        initializer_range=0.1,
    )
    return ViTForImageClassification(config)


def focal(logits: Tensor, targets: Tensor) -> Tensor:
    """Focal loss (Lin et al. 2017, equation 4, gamma = 2), summed over the valid targets."""
    nats = F.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="none")
    return ((1 - torch.exp(-nats)) ** 2 * nats).sum()


MASK = 256  # the token after the 256 bytes


class Pieces(Dataset[dict[str, Tensor]]):
    """Pieces of 64 bytes, a sixth of them hidden: the same ones at each look."""

    def __init__(self, text: bytes) -> None:
        tokens = torch.tensor(list(text))
        self.pieces = tokens[: len(tokens) // 64 * 64].view(-1, 64)

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return hide(self.pieces[index], torch.Generator().manual_seed(index))


class HiddenAnew(Pieces):
    """The same pieces; in training, other bytes are hidden at each look."""

    def augment(self, sample: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
        shown = sample["targets"] == IGNORE
        return hide(torch.where(shown, sample["tokens"], sample["targets"]), generator)


def hide(piece: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    hidden = torch.rand(piece.shape, generator=generator) < 1 / 6
    return {
        "tokens": piece.masked_fill(hidden, MASK),
        "targets": piece.masked_fill(~hidden, IGNORE),
    }


def source_text() -> Splits:
    text = inspect.getsource(argparse).encode()
    return Splits(train=HiddenAnew(text[:80_000]), validation=Pieces(text[80_000:]))


def bert(layers: int = 2) -> nn.Module:
    config = BertConfig(
        vocab_size=257,
        max_position_embeddings=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
    )
    return BertForMaskedLM(config)


class FillIn:
    """Guess the hidden bytes: cross-entropy summed over them, and how many were right."""

    item = "bytes"

    def count(self, batch: Batch) -> Tensor:
        return (batch["targets"] != IGNORE).sum()

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        logits, targets = model(batch["tokens"]).logits.float(), batch["targets"]
        total = F.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="sum"
        )
        return Loss(total, {"right": (logits.argmax(-1) == targets).sum()})

    def summary(self, sums: Mapping[str, float]) -> dict[str, float]:
        count = max(sums["count"], 1)
        return {"loss": sums["loss"] / count, "accuracy": sums["right"] / count}
