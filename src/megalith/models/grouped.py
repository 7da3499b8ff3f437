"""Products of groups of rows with a matrix each: what a mixture of experts computes.

They are operators of their own because torch 2.13 has a grouped product in float32 but refuses it
when it is traced (by torch.compile, or on fake tensors), and has none in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def grouped(rows: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """Each group of rows by its own matrix: ``[n, in]``, ``[groups, out, in]`` to ``[n, out]``.

    One kernel where torch has one; in float64, or where a row is no multiple of 16 bytes, a loop
    over the groups. It has a first derivative only.

    Args:
        counts: int64 ``[groups]``, rows of each, in order. Rows behind the last group come out
            undefined, as do their gradients; matrices get none from them.
    """
    device = rows.device.type
    if torch.is_autocast_enabled(device):  # which does not know the operator
        dtype = torch.get_autocast_dtype(device)
        rows, weights = rows.to(dtype), weights.to(dtype)
    return _grouped(rows, weights, counts)


def grouped_after(
    act: Callable[..., Tensor], inner: tuple[Tensor, ...], weights: Tensor, counts: Tensor
) -> Tensor:
    """``grouped(act(*inner), weights, counts)``, where backward computes ``act`` again.

    Checkpointing would run the product again as well: an operator saves its inputs after it ran.
    A compiler makes the choice by itself.
    """
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return grouped(act(*inner), weights, counts)
    return _After.apply(act, counts, weights, *inner)  # pyright: ignore


class _After(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        act: Callable[..., Tensor],
        counts: Tensor,
        weights: Tensor,
        *inner: Tensor,
    ) -> Tensor:
        rows = act(*inner)
        ctx.act = act
        ctx.save_for_backward(counts, weights, *inner)
        return grouped(rows, weights, counts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        counts, weights, *inner = ctx.saved_tensors
        inner = [part.detach().requires_grad_() for part in inner]
        with torch.enable_grad():
            rows = ctx.act(*inner)
        matrices = weights.to(grad.dtype)  # the product's, under autocast
        for_rows = _grouped(grad, matrices.transpose(1, 2), counts).to(rows.dtype)
        for_weights = None
        if ctx.needs_input_grad[2]:
            left, right = grad, rows.detach().to(grad.dtype)
            for_weights = _outer(left, right, counts).to(weights.dtype)
        return None, None, for_weights, *torch.autograd.grad(rows, inner, for_rows)


@torch.library.custom_op("megalith::grouped", mutates_args=())
def _grouped(rows: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    if _fits(rows, *weights.shape[1:]):
        ends = counts.cumsum(0).to(torch.int32)
        return F.grouped_mm(rows.contiguous(), weights.transpose(1, 2), offs=ends)
    out = rows.new_empty(len(rows), weights.shape[1])
    for part, target, weight in zip(
        _parts(rows, counts), _parts(out, counts), weights, strict=True
    ):
        torch.mm(part, weight.t(), out=target)
    return out


@_grouped.register_fake
def _(rows: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], weights.shape[1])


@torch.library.custom_op("megalith::grouped_outer", mutates_args=())
def _outer(left: Tensor, right: Tensor, counts: Tensor) -> Tensor:
    """``left.T @ right`` of each group: ``[n, out]``, ``[n, in]`` to ``[groups, out, in]``."""
    if _fits(left, left.shape[1], right.shape[1]):
        ends = counts.cumsum(0).to(torch.int32)
        return F.grouped_mm(left.contiguous().t(), right.contiguous(), offs=ends)
    out = left.new_empty(len(counts), left.shape[1], right.shape[1])
    for a, b, target in zip(_parts(left, counts), _parts(right, counts), out, strict=True):
        torch.mm(a.t(), b, out=target)
    return out


@_outer.register_fake
def _(left: Tensor, right: Tensor, counts: Tensor) -> Tensor:
    return left.new_empty(counts.shape[0], left.shape[1], right.shape[1])


def _setup(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    rows, weights, counts = ctx.saved_tensors
    for_rows = for_weights = None
    if ctx.needs_input_grad[0]:
        for_rows = _grouped(grad, weights.transpose(1, 2), counts)
    if ctx.needs_input_grad[1]:
        for_weights = _outer(grad, rows, counts)
    return for_rows, for_weights, None


_grouped.register_autograd(_backward, setup_context=_setup)


def _fits(rows: Tensor, *sizes: int) -> bool:
    known = rows.dtype in (torch.float32, torch.bfloat16, torch.float16)
    return known and all(size * rows.element_size() % 16 == 0 for size in sizes)


def _parts(rows: Tensor, counts: Tensor) -> tuple[Tensor, ...]:
    sizes: list[int] = counts.tolist()
    return rows[: sum(sizes)].split(sizes)


PRODUCT = torch.ops.megalith.grouped.default
OUTER = torch.ops.megalith.grouped_outer.default
"""The operators themselves, for those who choose what backward keeps or count operations."""
