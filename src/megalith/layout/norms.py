"""Batch norms whose statistics are those of all ranks' samples.

Without this each rank normalises with its own micro-batch, as each micro-batch of one process does:
a layout then computes another function than one process with larger micro-batches. With it, the
ranks' micro-batches count as one (Peng et al. 2018, MegDet, section 3.2).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megalith.layout import collectives


def synchronise(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Let every batch norm of ``model`` use the statistics of all samples of ``group``."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.forward = _forward(module, group)  # pyright: ignore


def _forward(norm: Any, group: dist.ProcessGroup) -> Callable[[Tensor], Tensor]:
    inner = norm.forward

    def forward(x: Tensor) -> Tensor:
        if not (norm.training or norm.running_mean is None):
            return inner(x)
        dims = [dim for dim in range(x.ndim) if dim != 1]
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        count = collectives.sum_now(wide.new_full((1,), x.numel() // x.shape[1]), group)
        mean = _over_ranks(wide.sum(dims) / count, group)
        centred = wide - _shaped(mean, x)
        variance = _over_ranks(centred.square().sum(dims) / count, group)
        _update(norm, mean.detach(), variance.detach(), count)
        scaled = centred * _shaped((variance + norm.eps).rsqrt(), x)
        if norm.affine:
            scaled = scaled * _shaped(norm.weight, x) + _shaped(norm.bias, x)
        return scaled.to(x.dtype)

    return forward


def _over_ranks(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over ranks; each rank uses it for its own samples, so gradients are summed too."""
    return collectives.total(collectives.copy(x, group), group)


def _shaped(values: Tensor, x: Tensor) -> Tensor:
    return values.view(1, -1, *[1] * (x.ndim - 2))


@torch.no_grad()
def _update(norm: Any, mean: Tensor, variance: Tensor, count: Tensor) -> None:
    if norm.running_mean is None:
        return
    norm.num_batches_tracked.add_(1)
    factor = norm.momentum
    if factor is None:
        factor = 1.0 / float(norm.num_batches_tracked)
    unbiased = variance * (count / (count - 1).clamp(min=1))
    norm.running_mean.lerp_(mean.to(norm.running_mean.dtype), factor)
    norm.running_var.lerp_(unbiased.to(norm.running_var.dtype), factor)
