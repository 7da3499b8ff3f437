"""A model whose step ends its process, as a fault in C++ does."""

from __future__ import annotations

import os

from torch import Tensor, nn


class Aborts(nn.Linear):
    """Built like any other; dies when it runs."""

    def forward(self, input: Tensor) -> Tensor:
        os.abort()


def aborts() -> nn.Module:
    return Aborts(4, 2)
