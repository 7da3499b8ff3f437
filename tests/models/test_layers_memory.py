"""What a feed-forward part keeps for backward, and what it computes again."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from megalith.models.layers import FeedForward


class Count(TorchDispatchMode):
    """Counts matmuls."""

    def __init__(self) -> None:
        super().__init__()
        self.matmuls = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.matmuls += function.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm)
        return function(*args, **(kwargs or {}))


def plain(part: FeedForward, x: Tensor) -> Tensor:
    if part.gate is not None:
        return part.down(F.silu(part.gate(x)) * part.up(x))
    return part.down(F.gelu(part.up(x), approximate="tanh"))


@pytest.mark.parametrize("activation", ["gelu_tanh", "swiglu"])
def test_the_wide_activation_is_not_kept_and_no_matmul_runs_twice(activation):
    torch.manual_seed(0)
    part = FeedForward(16, 64, activation, bias=True).double()
    x = torch.randn(5, 16, dtype=torch.float64, requires_grad=True)
    with Count() as expected:
        wanted = torch.autograd.grad(plain(part, x).sum(), [x, *part.parameters()])
    with Count() as count:
        found = torch.autograd.grad(part(x).sum(), [x, *part.parameters()])
    assert count.matmuls == expected.matmuls
    for a, b in zip(found, wanted, strict=True):
        assert torch.equal(a, b)

    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        part(x)
    wide = {t.data_ptr() for t in kept if t.shape == (5, 64)}
    assert len(wide) == (2 if activation == "swiglu" else 1)
