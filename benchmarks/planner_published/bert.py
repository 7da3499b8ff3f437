"""BERT-large with its masked-language head (Devlin et al. 2018), as a module of the user's own."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megalith.data import Splits

SHAPE = {"width": 1024, "layers": 24, "heads": 16, "vocab": 30522, "context": 512}
_DROPOUT = 0.1


class Block(nn.Module):
    """Self-attention and MLP, each followed by a norm, ``[batch, tokens, width]``."""

    def __init__(self, width: int, heads: int, fused: bool) -> None:
        super().__init__()
        self.heads, self.fused = heads, fused
        self.into = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.drop = nn.Dropout(_DROPOUT)

    def forward(self, x: Tensor) -> Tensor:
        """Same shape as ``x``."""
        query, key, value = (
            part(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.into
        )
        if self.fused:
            seen = F.scaled_dot_product_attention(query, key, value, dropout_p=_DROPOUT)
        else:
            scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])
            seen = self.drop(scores.softmax(-1)) @ value
        x = self.norms[0](x + self.drop(self.out(seen.transpose(1, 2).flatten(2))))
        return self.norms[1](x + self.drop(self.down(F.gelu(self.up(x)))))


class Bert(nn.Module):
    """Tokens ``[batch, tokens]`` to logits ``[batch, tokens, vocab]``."""

    units = ("blocks.*",)

    def __init__(self, fused: bool) -> None:
        super().__init__()
        width, vocab = SHAPE["width"], SHAPE["vocab"]
        self.words, self.places = nn.Embedding(vocab, width), nn.Embedding(SHAPE["context"], width)
        self.norm, self.drop = nn.LayerNorm(width), nn.Dropout(_DROPOUT)
        self.blocks = nn.ModuleList(
            Block(width, SHAPE["heads"], fused) for _ in range(SHAPE["layers"])
        )
        self.last, self.last_norm = nn.Linear(width, width), nn.LayerNorm(width)
        self.bias = nn.Parameter(torch.zeros(vocab))

    def forward(self, tokens: Tensor) -> Tensor:
        """The logits of every token."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.drop(self.norm(self.words(tokens) + self.places(places)))
        for block in self.blocks:
            x = block(x)
        x = self.last_norm(F.gelu(self.last(x)))
        return F.linear(x, self.words.weight, self.bias)


def build(fused: bool = True) -> nn.Module:
    """The module of a recipe's ``model.factory``."""
    return Bert(fused)


def data(**_: Any) -> Splits:
    """Never called: a plan needs shapes only, and they are given."""
    raise RuntimeError("this recipe is only planned")
