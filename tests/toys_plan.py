"""Models that try a trace: one ends its process, as a fault in C++ does; one reads its weights."""

from __future__ import annotations

import os

from torch import Tensor, nn


class Aborts(nn.Linear):
    """Built like any other; dies when it runs."""

    def forward(self, input: Tensor) -> Tensor:
        os.abort()


def aborts() -> nn.Module:
    return Aborts(4, 2)


def truncated() -> nn.Module:
    """Its weights are drawn until all lie within bounds, which is read on the host."""
    model = nn.Sequential(nn.Embedding(32, 8), nn.Linear(8, 32))
    nn.init.trunc_normal_(model[1].weight, a=1.5, b=2.0)  # pyright: ignore
    return model
