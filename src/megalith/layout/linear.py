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

from typing import Any, ClassVar, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from megalith.core.errors import MegalithError
from megalith.layout import collectives


class _ParallelLinear(nn.Module):
    """One rank's part of a linear layer; ``dim`` is the weight's dimension that is divided."""

    dim: ClassVar[int]
    divided: ClassVar[str]

    def __init__(self, whole: nn.Linear, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        found = group if group is not None else dist.group.WORLD
        if found is None:
            raise MegalithError("no ranks to split over: call torch.distributed.init_process_group")
        self.group = found
        ranks, rank = dist.get_world_size(found), dist.get_rank(found)
        size = whole.weight.shape[self.dim]
        if size % ranks:
            raise MegalithError(
                f"{type(self).__name__}: {size} {self.divided} do not divide over {ranks} ranks"
            )
        self._first, self._size = rank * size // ranks, size // ranks
        self.weight = nn.Parameter(self._part(whole.weight, self.dim))
        self.bias = None
        if whole.bias is not None:
            self.bias = nn.Parameter(self._own_bias(whole.bias.detach()))

    def _part(self, tensor: Tensor, dim: int) -> Tensor:
        return tensor.detach().narrow(dim, self._first, self._size).clone()

    def _own_bias(self, bias: Tensor) -> Tensor:
        return self._part(bias, 0)


class ColumnParallelLinear(_ParallelLinear):
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

    dim, divided = 0, "outputs"

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
        super().__init__(nn.Linear(in_features, out_features, bias, dtype=dtype), group)
        self.gather_output = gather_output

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        *,
        gather_output: bool = False,
        group: dist.ProcessGroup | None = None,
    ) -> Self:
        """This rank's part of a layer that every rank holds whole."""
        return _from_linear(cls, linear, group, gather_output=gather_output)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., in_features]``, the same on every rank, to the outputs."""
        part = F.linear(collectives.copy(x, self.group), self.weight, self.bias)
        return collectives.gather(part, part.ndim - 1, self.group) if self.gather_output else part


class RowParallelLinear(_ParallelLinear):
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

    dim, divided = 1, "inputs"

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
        super().__init__(nn.Linear(in_features, out_features, bias, dtype=dtype), group)
        self.input_is_parallel = input_is_parallel

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        *,
        input_is_parallel: bool = True,
        group: dist.ProcessGroup | None = None,
    ) -> Self:
        """This rank's part of a layer that every rank holds whole."""
        return _from_linear(cls, linear, group, input_is_parallel=input_is_parallel)

    def forward(self, x: Tensor) -> Tensor:
        """The input, split or whole, to ``[..., out_features]``, the same on every rank."""
        part = x if self.input_is_parallel else collectives.split(x, x.ndim - 1, self.group)
        total = collectives.total(F.linear(part, self.weight), self.group)
        return total if self.bias is None else total + self.bias

    def _own_bias(self, bias: Tensor) -> Tensor:
        return bias.clone()


def _from_linear(kind: type[Any], linear: nn.Linear, group: Any, **options: Any) -> Any:
    layer: Any = kind.__new__(kind)  # pyright: ignore
    _ParallelLinear.__init__(layer, linear, group)
    for name, value in options.items():
        setattr(layer, name, value)
    return layer
