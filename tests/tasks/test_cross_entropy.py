"""The chunked cross-entropy is the plain one: in value, in gradient, and in less memory."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from megalith.plan import accuracy
from megalith.tasks.cross_entropy import cross_entropy, linear_cross_entropy


def problem(dtype: torch.dtype, rows: int = 37, vocab: int = 101) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    hidden = torch.randn(rows, 16, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocab, 16, dtype=dtype, requires_grad=True)
    targets = torch.randint(vocab, (rows,))
    targets[::5] = -100
    return hidden, weight, targets


def plain(hidden: Tensor, weight: Tensor, targets: Tensor, smoothing: float, z: float) -> Tensor:
    logits = F.linear(hidden, weight)
    total = F.cross_entropy(logits, targets, reduction="sum", label_smoothing=smoothing)
    return total + z * logits.logsumexp(-1)[targets != -100].square().sum()


@pytest.mark.parametrize("chunk", [1, 8, 37, 1000])
@pytest.mark.parametrize(("smoothing", "z"), [(0.0, 0.0), (0.1, 0.0), (0.0, 0.01), (0.1, 0.01)])
def test_equals_the_plain_form_in_value_and_gradient(chunk: int, smoothing: float, z: float):
    hidden, weight, targets = problem(torch.float64)
    expected = plain(hidden, weight, targets, smoothing, z)
    wanted = torch.autograd.grad(expected * 0.3, [hidden, weight])
    found = linear_cross_entropy(
        hidden, weight, targets, label_smoothing=smoothing, z_loss=z, chunk=chunk
    )
    grads = torch.autograd.grad(found * 0.3, [hidden, weight])
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(grads, wanted, rtol=1e-11, atol=1e-12)
    from_logits = cross_entropy(
        F.linear(hidden, weight), targets, label_smoothing=smoothing, z_loss=z
    )
    torch.testing.assert_close(from_logits, expected, rtol=1e-12, atol=1e-12)


def test_a_second_backward_is_refused_not_wrong():
    hidden, weight, targets = problem(torch.float64)
    loss = linear_cross_entropy(hidden, weight, targets)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_keeps_the_loss_and_the_weight_gradient_in_float32(dtype: torch.dtype):
    hidden, weight, targets = problem(torch.float32)
    wanted = torch.autograd.grad(plain(hidden, weight, targets, 0.0, 0.0), [hidden, weight])
    with torch.autocast("cpu", dtype):
        loss = linear_cross_entropy(hidden, weight, targets, chunk=8)
    assert loss.dtype == torch.float32
    grads = torch.autograd.grad(loss, [hidden, weight])
    for grad, want in zip(grads, wanted, strict=True):
        assert grad.dtype == torch.float32
        assert (grad - want).norm() < 0.02 * want.norm()


def test_small_probabilities_survive_float16():
    # 2.5e-5 of probability on each wrong token lies among float16's subnormal numbers, where two
    # digits are left; the internal scale keeps all of them.
    vocab = 40_000
    hidden = torch.ones(1, 4, dtype=torch.float16, requires_grad=True)
    weight = torch.zeros(vocab, 4, requires_grad=True)
    loss = linear_cross_entropy(hidden, weight, torch.tensor([0]))
    (grad,) = torch.autograd.grad(loss, weight)
    torch.testing.assert_close(grad[1:], torch.full((vocab - 1, 4), 1 / vocab), rtol=1e-2, atol=0)


def test_no_valid_target_gives_zero_loss_and_zero_gradient():
    hidden, weight, targets = problem(torch.float64)
    loss = linear_cross_entropy(hidden, weight, torch.full_like(targets, -100))
    grads = torch.autograd.grad(loss, [hidden, weight])
    assert loss.item() == 0
    assert all(grad.abs().max() == 0 for grad in grads)


def peak_bytes(run) -> int:
    """Peak of live bytes that the CPU allocator sees while ``run`` works."""
    with torch.profiler.profile(profile_memory=True) as profile:
        run()
    return max(accumulate(accuracy.sizes(profile), initial=0))


def test_peak_memory_does_not_hold_the_logits():
    rows, vocab = 2048, 8000
    hidden = torch.randn(rows, 32, requires_grad=True)
    weight = torch.randn(vocab, 32, requires_grad=True)
    targets = torch.randint(vocab, (rows,))
    logits = rows * vocab * 4
    plain_peak = peak_bytes(lambda: plain(hidden, weight, targets, 0.0, 0.0).backward())
    chunk_peak = peak_bytes(
        lambda: linear_cross_entropy(hidden, weight, targets, chunk=128).backward()
    )
    assert plain_peak > 2 * logits
    assert chunk_peak < 0.25 * logits
