"""Collectives that gradients flow through, in pairs: what one does forward, its partner does back.

On the ranks of a group a tensor is *whole* (equal on all), *split* (each has a part of one
dimension) or *partial* (the sum over ranks is meant). A gradient is whole where its tensor is
whole and every rank computes the same with it, partial where each rank does its own part of the
work (Shoeybi et al. 2019, Megatron-LM, section 3; Korthikanti et al. 2022, section 4.2).

================  ==================  ==================  =======================
function          forward             backward            used where
================  ==================  ==================  =======================
``copy``          whole               partial -> whole    before a column split
``total``         partial -> whole    whole               after a row split
``gather``        split -> whole      whole -> split      all outputs on all ranks
``split``         whole -> split      split -> whole      a rank's own inputs
``gather_used``   split -> whole      partial -> split    before a column split
``scatter``       partial -> split    split -> whole      after a row split
``swap``          split <-> split     the other way       heads against sequence
================  ==================  ==================  =======================

Every function takes the group last; ``None`` is a group of one.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as functional

Group = dist.ProcessGroup | None


def copy(x: Tensor, group: Group) -> Tensor:
    """The same tensor; gradients are summed."""
    return x if group is None else _Copy.apply(x, group)  # pyright: ignore


def total(x: Tensor, group: Group) -> Tensor:
    """The sum over ranks; gradients pass."""
    return x if group is None else _Total.apply(x, group)  # pyright: ignore


def gather(x: Tensor, dim: int, group: Group) -> Tensor:
    """All ranks' parts one after the other; each part gets its own part of the gradient."""
    return x if group is None else _Gather.apply(x, dim, group, False)  # pyright: ignore


def gather_used(x: Tensor, dim: int, group: Group) -> Tensor:
    """Like :func:`gather`, but each rank uses the whole for its own work: gradients are summed."""
    return x if group is None else _Gather.apply(x, dim, group, True)  # pyright: ignore


def split(x: Tensor, dim: int, group: Group) -> Tensor:
    """This rank's part; gradients are gathered."""
    return x if group is None else _Scatter.apply(x, dim, group, False)  # pyright: ignore


def scatter(x: Tensor, dim: int, group: Group) -> Tensor:
    """This rank's part of the sum over ranks; gradients are gathered."""
    return x if group is None else _Scatter.apply(x, dim, group, True)  # pyright: ignore


def swap(x: Tensor, whole: int, divided: int, group: Group) -> Tensor:
    """Divide dimension ``whole`` over the ranks and make dimension ``divided`` whole."""
    return x if group is None else _Swap.apply(x, whole, divided, group)  # pyright: ignore


def sum_now(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over ranks, without a gradient."""
    return functional.wait_tensor(functional.all_reduce(x.contiguous(), "sum", group))


def max_now(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The largest value over ranks, without a gradient."""
    return functional.wait_tensor(functional.all_reduce(x.contiguous(), "max", group))


def gather_now(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """All ranks' parts of ``dim``, without a gradient."""
    # Gathered along the first dimension, which is whole in memory, and moved to its place.
    pieces = functional.all_gather_single(x.movedim(dim, 0).contiguous(), 0, group)
    return functional.wait_tensor(pieces).movedim(0, dim).contiguous()


def split_now(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """This rank's part of ``dim``, which must divide evenly, without a gradient."""
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    length = x.shape[dim] // ranks
    assert length * ranks == x.shape[dim], f"{x.shape[dim]} does not divide over {ranks} ranks"
    return x.narrow(dim, rank * length, length).contiguous()


def scatter_now(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """This rank's part of the sum over ranks, without a gradient."""
    moved = x.movedim(dim, 0).contiguous()
    part = functional.reduce_scatter_single(moved, "sum", 0, group)
    return functional.wait_tensor(part).movedim(0, dim).contiguous()


def swap_now(x: Tensor, whole: int, divided: int, group: dist.ProcessGroup) -> Tensor:
    """See :func:`swap`, without a gradient."""
    ranks = dist.get_world_size(group)
    pieces = torch.stack(x.chunk(ranks, whole))  # [ranks, ...]: one for each receiver
    got = functional.wait_tensor(functional.all_to_all_single(pieces, None, None, group))
    return torch.cat(list(got), divided)


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore
        return sum_now(grad, ctx.group), None


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return sum_now(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore
        return grad, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: dist.ProcessGroup, used: bool) -> Tensor:
        ctx.dim, ctx.group, ctx.used = dim, group, used
        return gather_now(x, dim, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # pyright: ignore
        back = scatter_now if ctx.used else split_now
        return back(grad, ctx.dim, ctx.group), None, None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: dist.ProcessGroup, summed: bool) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return scatter_now(x, dim, group) if summed else split_now(x, dim, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # pyright: ignore
        return gather_now(grad, ctx.dim, ctx.group), None, None, None


class _Swap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, whole: int, divided: int, group: dist.ProcessGroup) -> Tensor:
        ctx.whole, ctx.divided, ctx.group = whole, divided, group
        return swap_now(x, whole, divided, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # pyright: ignore
        return swap_now(grad, ctx.divided, ctx.whole, ctx.group), None, None, None
