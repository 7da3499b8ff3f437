"""The global gradient norm, and clipping by it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


def total_norm(grads: Iterable[Tensor]) -> Tensor:
    """Euclidean norm over all gradients, before any clipping; a scalar."""
    return torch.nn.utils.get_total_norm(list(grads))


def clip_(grads: Iterable[Tensor], norm: Tensor, limit: float) -> None:
    """Scale gradients in place by ``min(1, limit / norm)`` (Pascanu et al. 2013, algorithm 1)."""
    grads = list(grads)
    if grads:
        factor = (limit / (norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(grads, factor)  # pyright: ignore[reportPrivateImportUsage]


def nonfinite(named: Iterable[tuple[str, Tensor]]) -> list[str]:
    """Names of the parameters whose gradient holds an infinity or a NaN."""
    return [name for name, p in named if p.grad is not None and not _finite(p.grad)]


def _finite(grad: Tensor) -> bool:
    part: Any = getattr(grad, "to_local", lambda: grad)()  # of a DTensor, this rank's part
    return bool(part.isfinite().all())
