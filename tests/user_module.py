"""A small language model of a user's own that layouts can divide, cut and share out."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from megalith.data import Splits

TOKENS = 31


class Mixer(nn.Module):
    """Looks back by a running mean, then two matrices."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(1, x.shape[1] + 1, device=x.device)[:, None]
        seen = self.norm(x).cumsum(1) / places
        return x + self.down(F.gelu(self.up(seen)))


class Tiny(nn.Module):
    """Embedding, blocks, norm and head, called one after the other: a pipeline can cut it."""

    def __init__(self, width: int = 16, layers: int = 3, unused: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, width)
        self.blocks = nn.ModuleList(Mixer(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, TOKENS)
        self.idle = nn.Parameter(torch.ones(width)) if unused else None

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Counting(Dataset[dict[str, Tensor]]):
    """The next token is three more; only the first ones of a sample are to be guessed."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = (torch.arange(13) * 3 + index) % TOKENS
        targets = tokens[1:].clone()
        targets[index * 5 % 12 + 1 :] = -100
        return {"tokens": tokens[:-1].contiguous(), "targets": targets}


def counting() -> Splits:
    """The data's factory."""
    return Splits(train=Counting(), validation=Counting())
