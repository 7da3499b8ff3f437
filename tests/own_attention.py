"""Attention cores of a user's own, named by tests as ``own_attention:Class``."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Scaled(nn.Module):
    """Attention with a learned factor per query head on its output."""

    def __init__(self, config: Any, layer: int) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.empty(config.heads, 1, 1))

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Any, causal: bool, dropout: float
    ) -> Tensor:
        mixed = F.scaled_dot_product_attention(
            query, key, value, mask, dropout, causal, enable_gqa=True
        )
        return mixed * self.factor

    def init_weight(self, name: str, tensor: Tensor, generator: torch.Generator) -> None:
        assert name == "factor"
        tensor.fill_(2.0)


class Recording(nn.Module):
    """Notes what it was called with."""

    calls: ClassVar[list[dict[str, Any]]] = []

    def __init__(self, config: Any, layer: int) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, query: Tensor, key: Tensor, value: Tensor, **rest: Any) -> Tensor:
        self.calls.append({"layer": self.layer, "keys": key.shape[2], "dtype": key.dtype, **rest})
        return query


def not_a_module(config: Any, layer: int) -> str:
    return "attention"


class TooFewArguments(nn.Module):
    def __init__(self) -> None:
        super().__init__()
