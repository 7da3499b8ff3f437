"""Half precision on devices without half-precision matmuls."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from megalith.layout.precision import Precision, WidenedMatmuls

HALVES = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", HALVES)
def test_widened_matmuls_are_the_products_of_the_same_rounded_numbers(dtype: torch.dtype):
    torch.manual_seed(0)
    x, weight = torch.randn(5, 33).to(dtype), torch.randn(7, 33).to(dtype)
    bias = torch.randn(7).to(dtype)
    with WidenedMatmuls():
        found = F.linear(x, weight, bias)
    exact = F.linear(x.double(), weight.double(), bias.double())
    assert found.dtype == dtype
    # One rounding of the exact result, and float32's error before it.
    torch.testing.assert_close(found.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-5)


@pytest.mark.parametrize("dtype", HALVES)
def test_a_product_into_given_memory_arrives_there(dtype: torch.dtype):
    x, room = torch.eye(4).to(dtype), torch.full((4, 6), torch.nan).to(dtype)
    with WidenedMatmuls():
        found = torch.mm(x, x, out=room[:, :4])
    assert torch.equal(room[:, :4], x)
    assert found.data_ptr() == room.data_ptr()


@pytest.mark.parametrize("dtype", HALVES)
def test_backward_and_attention_are_widened_too(dtype: torch.dtype):
    torch.manual_seed(0)
    parts = [torch.randn(2, 2, 9, 8).to(dtype).requires_grad_() for _ in range(3)]
    wide = [p.detach().double().requires_grad_() for p in parts]
    with WidenedMatmuls():
        found = F.scaled_dot_product_attention(*parts, is_causal=True)
        found.float().square().sum().backward()
    exact = F.scaled_dot_product_attention(*wide, is_causal=True)
    exact.square().sum().backward()
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), exact, rtol=0.02, atol=0.02)
    for part, other in zip(parts, wide, strict=True):
        assert part.grad is not None
        assert part.grad.dtype == dtype
        torch.testing.assert_close(part.grad.double(), other.grad, rtol=0.05, atol=0.05)


def test_convolutions_of_images_are_widened():
    image = torch.randn(2, 3, 8, 8).bfloat16()
    kernel = torch.randn(4, 3, 3, 3).bfloat16().requires_grad_()
    with WidenedMatmuls():
        found = F.conv2d(image, kernel, padding=1)
        found.sum().backward()
    exact = F.conv2d(image.double(), kernel.double(), padding=1)
    torch.testing.assert_close(found.double(), exact, rtol=0.01, atol=0.02)
    assert kernel.grad is not None
    assert kernel.grad.dtype == torch.bfloat16


def test_what_is_not_half_precision_passes_through():
    x = torch.randn(3, 4, dtype=torch.float64)
    plain = x @ x.T
    with WidenedMatmuls():
        assert torch.equal(x @ x.T, plain)
        assert (x.float() @ x.T.float()).dtype == torch.float32
        assert (x.bfloat16() + 1).dtype == torch.bfloat16


def test_float32_is_never_widened():
    precision = Precision("fp32", torch.device("cpu"))
    assert not precision.widened
    assert precision.computing_dtype == torch.float32
