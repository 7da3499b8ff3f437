"""An exponential moving average of the weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class Ema:
    """``average = decay * average + (1 - decay) * weight`` after every update.

    The first updates use ``min(decay, (1 + n) / (10 + n))`` so that the start is soon forgotten.

    Args:
        named: the model's parameters; the trainable ones are averaged.
        decay: between 0 and 1.
    """

    def __init__(self, named: Iterable[tuple[str, Tensor]], decay: float) -> None:
        self.decay = decay
        self._weights = {n: p for n, p in named if p.requires_grad}
        self.average = {n: p.detach().clone() for n, p in self._weights.items()}

    @torch.no_grad()
    def update(self, updates: int) -> None:
        """Move the average towards the weights, after ``updates`` updates in all."""
        decay = min(self.decay, (1 + updates) / (10 + updates))
        for name, weight in self._weights.items():
            self.average[name].lerp_(weight, 1 - decay)

    @torch.no_grad()
    def load(self, average: dict[str, Tensor]) -> None:
        """Put back a saved average."""
        for name, value in average.items():
            self.average[name].copy_(value)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Inside, the model computes with the average; the weights return afterwards."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        # By copying: a sharded parameter's memory is known to what gathers it.
        for name, weight in self._weights.items():
            held = weight.detach().clone()
            weight.copy_(self.average[name])
            self.average[name].copy_(held)
