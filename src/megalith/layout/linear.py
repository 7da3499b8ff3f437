"""Linear layers split over the ranks of a group, for models that are written by hand.

A column-parallel layer holds a part of the outputs: its pieces are *gathered*. A row-parallel layer
holds a part of the inputs: its pieces are *summed*. One after the other they need one sum in
forward and one in backward (Shoeybi et al. 2019, Megatron-LM, section 3)::

    up = ColumnParallelLinear(width, hidden, group=group)      # [..., hidden / ranks] on each rank
    down = RowParallelLinear(hidden, width, group=group)       # takes just that
    y = down(gelu(up(x)))                                      # the same on every rank

Each rank draws the whole matrix and keeps its part, so the layers start as ``nn.Linear`` does under
the same seed, whatever the number of ranks.
"""

from __future__ import annotations

from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives as collectives

from megalith.core.errors import MegalithError


class ColumnParallelLinear(nn.Module):
    """``x @ weight.T + bias`` with the outputs split over the group.

    Args:
        in_features: of the whole layer; every rank gets the whole input.
        out_features: of the whole layer; must divide evenly over the group.
        gather_output: return all outputs on every rank, ``[..., out_features]``, instead of this
            rank's ``[..., out_features / ranks]``.
        group: left out: all ranks.

    Raises:
        MegalithError: the outputs do not divide over the ranks.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        gather_output: bool = False,
        group: dist.ProcessGroup | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.gather_output = gather_output
        self._keep(nn.Linear(in_features, out_features, bias, dtype=dtype), group)

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        *,
        gather_output: bool = False,
        group: dist.ProcessGroup | None = None,
    ) -> Self:
        """This rank's part of a layer that every rank holds whole."""
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer.gather_output = gather_output
        layer._keep(linear, group)
        return layer

    def forward(self, x: Tensor) -> Tensor:
        """``[..., in_features]``, the same on every rank, to the outputs."""
        part = nn.functional.linear(_Copy.apply(x, self.group), self.weight, self.bias)  # pyright: ignore[reportArgumentType]
        return _Gather.apply(part, self.group) if self.gather_output else part  # pyright: ignore[reportReturnType]

    def _keep(self, whole: nn.Linear, group: dist.ProcessGroup | None) -> None:
        self.group = _group(group)
        rows = _part(whole.out_features, self.group, "ColumnParallelLinear", "outputs")
        self.weight = nn.Parameter(whole.weight.detach()[rows].clone())
        self.bias = None
        if whole.bias is not None:
            self.bias = nn.Parameter(whole.bias.detach()[rows].clone())


class RowParallelLinear(nn.Module):
    """``x @ weight.T + bias`` with the inputs split over the group.

    The bias is whole on every rank and added once, after the sum.

    Args:
        in_features: of the whole layer; must divide evenly over the group.
        out_features: of the whole layer; every rank returns all of them.
        input_is_parallel: the input is this rank's ``[..., in_features / ranks]``, as a
            column-parallel layer leaves it; false: it is whole, and each rank takes its part.
        group: left out: all ranks.

    Raises:
        MegalithError: the inputs do not divide over the ranks.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        input_is_parallel: bool = True,
        group: dist.ProcessGroup | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.input_is_parallel = input_is_parallel
        self._keep(nn.Linear(in_features, out_features, bias, dtype=dtype), group)

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        *,
        input_is_parallel: bool = True,
        group: dist.ProcessGroup | None = None,
    ) -> Self:
        """This rank's part of a layer that every rank holds whole."""
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer.input_is_parallel = input_is_parallel
        layer._keep(linear, group)
        return layer

    def forward(self, x: Tensor) -> Tensor:
        """The input, split or whole, to ``[..., out_features]``, the same on every rank."""
        part = x if self.input_is_parallel else _Split.apply(x, self.group)
        total: Tensor = _Sum.apply(nn.functional.linear(part, self.weight), self.group)  # pyright: ignore
        return total if self.bias is None else total + self.bias

    def _keep(self, whole: nn.Linear, group: dist.ProcessGroup | None) -> None:
        self.group = _group(group)
        columns = _part(whole.in_features, self.group, "RowParallelLinear", "inputs")
        self.weight = nn.Parameter(whole.weight.detach()[:, columns].clone())
        self.bias = None if whole.bias is None else nn.Parameter(whole.bias.detach().clone())


def _group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    found = group if group is not None else dist.group.WORLD
    if found is None:
        raise MegalithError("no ranks to split over: call torch.distributed.init_process_group")
    return found


def _part(size: int, group: dist.ProcessGroup, layer: str, what: str) -> slice:
    """Which of ``size`` features this rank holds."""
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    if size % ranks:
        raise MegalithError(f"{layer}: {size} {what} do not divide over {ranks} ranks")
    return slice(rank * size // ranks, (rank + 1) * size // ranks)


def _sum(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return collectives.wait_tensor(collectives.all_reduce(x.contiguous(), "sum", group))


def _gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    # Gathered along the first dimension, which is whole in memory, and moved to the last.
    pieces = collectives.all_gather_single(x.movedim(-1, 0).contiguous(), 0, group)
    return collectives.wait_tensor(pieces).movedim(0, -1).contiguous()


def _split(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    part = _part(x.shape[-1], group, "RowParallelLinear", "inputs")
    return x[..., part].contiguous()


class _Copy(torch.autograd.Function):
    """The same input on every rank; each rank has a part of its gradient, so they are summed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore
        return _sum(grad, ctx.group), None


class _Sum(torch.autograd.Function):
    """The sum over ranks; the gradient of a sum is the same for every term."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return _sum(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore
        return grad, None


class _Gather(torch.autograd.Function):
    """All pieces of the last dimension; each rank's piece gets its own part of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _gather(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore
        return _split(grad, ctx.group), None


class _Split(torch.autograd.Function):
    """This rank's piece of the last dimension; the whole gradient is gathered from all."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _split(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore
        return _gather(grad, ctx.group), None
