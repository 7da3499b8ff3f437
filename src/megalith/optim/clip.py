"""The global gradient norm, and clipping by it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def total_norm(parameters: Iterable[Tensor]) -> Tensor:
    """Euclidean norm over all gradients, before any clipping; a scalar."""
    grads = [p.grad for p in parameters if p.grad is not None]
    return torch.nn.utils.get_total_norm(grads)


def clip_(parameters: Iterable[Tensor], norm: Tensor, limit: float) -> None:
    """Scale gradients in place by ``min(1, limit / norm)`` (Pascanu et al. 2013, algorithm 1)."""
    torch.nn.utils.clip_grads_with_norm_(parameters, limit, norm)


def nonfinite(named: Iterable[tuple[str, Tensor]]) -> list[str]:
    """Names of the parameters whose gradient holds an infinity or a NaN."""
    return [name for name, p in named if p.grad is not None and not p.grad.isfinite().all()]
