"""Column- and row-parallel layers are nn.Linear, in value and in every gradient."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megalith.core.errors import MegalithError
from megalith.layout.linear import ColumnParallelLinear, RowParallelLinear
from ranks import on_ranks

EXACT = {"rtol": 1e-12, "atol": 1e-12}


def problem(inputs: int, outputs: int, bias: bool) -> tuple[nn.Linear, Tensor, Tensor]:
    """A whole layer, an input and the gradient of the output: the same on every rank."""
    torch.manual_seed(0)
    linear = nn.Linear(inputs, outputs, bias, dtype=torch.float64)
    x = torch.randn(2, 3, inputs, dtype=torch.float64, requires_grad=True)
    return linear, x, torch.randn(2, 3, outputs, dtype=torch.float64)


def reference(linear: nn.Linear, x: Tensor, slope: Tensor) -> tuple[Tensor, list[Tensor]]:
    value = linear(x)
    return value.detach(), list(torch.autograd.grad(value, [x, *linear.parameters()], slope))


def part(tensor: Tensor, dim: int) -> Tensor:
    return tensor.chunk(dist.get_world_size(), dim)[dist.get_rank()]


def column(gather: bool, bias: bool) -> None:
    linear, x, slope = problem(6, 8, bias)
    value, (grad_x, *grads) = reference(linear, x, slope)
    layer = ColumnParallelLinear.from_linear(linear, gather_output=gather)
    found = layer(x)
    torch.testing.assert_close(found.detach(), value if gather else part(value, -1), **EXACT)
    found.backward(slope if gather else part(slope, -1))
    torch.testing.assert_close(x.grad, grad_x, **EXACT)
    for parameter, grad in zip(layer.parameters(), grads, strict=True):
        torch.testing.assert_close(parameter.grad, part(grad, 0), **EXACT)


def row(parallel: bool, bias: bool) -> None:
    linear, x, slope = problem(8, 6, bias)
    value, (grad_x, grad_weight, *grad_bias) = reference(linear, x, slope)
    layer = RowParallelLinear.from_linear(linear, input_is_parallel=parallel)
    given = part(x.detach(), -1).requires_grad_() if parallel else x
    found = layer(given)
    torch.testing.assert_close(found.detach(), value, **EXACT)
    found.backward(slope)
    torch.testing.assert_close(given.grad, part(grad_x, -1) if parallel else grad_x, **EXACT)
    torch.testing.assert_close(layer.weight.grad, part(grad_weight, 1), **EXACT)
    if bias:
        torch.testing.assert_close(layer.bias.grad, grad_bias[0], **EXACT)


def pair() -> None:
    torch.manual_seed(3)
    up, down = (nn.Linear(*shape, dtype=torch.float64) for shape in ((6, 8), (8, 6)))
    x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    value = down(nn.functional.gelu(up(x)))
    wanted = torch.autograd.grad(value.square().sum(), [x, up.weight, down.weight])
    torch.manual_seed(3)  # the layers draw what nn.Linear draws under the same seed
    first = ColumnParallelLinear(6, 8, dtype=torch.float64)
    second = RowParallelLinear(8, 6, dtype=torch.float64)
    found = second(nn.functional.gelu(first(x)))
    torch.testing.assert_close(found, value, **EXACT)
    grads = torch.autograd.grad(found.square().sum(), [x, first.weight, second.weight])
    for grad, want in zip(grads, (wanted[0], part(wanted[1], 0), part(wanted[2], 1)), strict=True):
        torch.testing.assert_close(grad, want, **EXACT)


def refusals() -> None:
    with pytest.raises(MegalithError, match="ColumnParallelLinear: 7 outputs do not divide over 2"):
        ColumnParallelLinear(4, 7)
    with pytest.raises(MegalithError, match="RowParallelLinear: 5 inputs do not divide over 2"):
        RowParallelLinear(5, 4)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("gather", [True, False])
def test_column_parallel_pieces_are_gathered(tmp_path: Path, ranks: int, gather: bool, bias: bool):
    on_ranks(ranks, tmp_path, column, gather, bias)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("parallel", [True, False])
def test_row_parallel_pieces_are_summed(tmp_path: Path, ranks: int, parallel: bool, bias: bool):
    on_ranks(ranks, tmp_path, row, parallel, bias)


def test_one_after_the_other_is_the_whole_feed_forward_part(tmp_path: Path):
    on_ranks(2, tmp_path, pair)


def test_sizes_that_do_not_divide_are_refused_by_name(tmp_path: Path):
    on_ranks(2, tmp_path, refusals)
