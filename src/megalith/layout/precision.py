"""Mixed precision: which dtype matmuls run in, and how float16 gradients keep their small values.

Weights, optimizer state and the loss stay in float32. Autocast runs matmuls in the chosen dtype.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Precision:
    """The dtype of matmuls on a device."""

    name: str
    device: torch.device

    @property
    def dtype(self) -> torch.dtype:
        """What matmuls run in."""
        return DTYPES[self.name]

    def forward(self) -> AbstractContextManager[object]:
        """Around every forward pass."""
        if self.name == "fp32":
            return nullcontext()
        return torch.autocast(self.device.type, self.dtype)

    @contextmanager
    def update(self) -> Iterator[None]:
        """Around all micro-batches of an update: each weight is cast once, not once per forward.

        Autocast drops its cast weights when its outermost context ends. Holding the nesting count
        keeps them over the micro-batches, while backward still runs outside of autocast.
        """
        if self.name == "fp32":
            yield
            return
        torch.autocast_increment_nesting()
        try:
            yield
        finally:
            if torch.autocast_decrement_nesting() == 0:
                torch.clear_autocast_cache()


@dataclass
class LossScale:
    """Dynamic loss scaling for float16 (Micikevicius et al. 2018, section 3.2).

    The loss is multiplied by ``scale`` before backward and the gradients divided by it before
    clipping. A non-finite gradient halves the scale and skips the update; ``growth_interval``
    good updates in a row double it.
    """

    scale: float = 65536.0
    good: int = 0
    growth_interval: int = 2000

    def after(self, finite: bool) -> None:
        """Adapt to an update whose gradients were finite or not."""
        if not finite:
            self.scale, self.good = max(self.scale / 2, 1.0), 0
            return
        self.good += 1
        if self.good == self.growth_interval:
            self.scale, self.good = min(self.scale * 2, 2.0**24), 0
