"""Cross-entropy that never holds ``[tokens, vocab]`` logits.

The head's matmul, the softmax and both gradients are taken for a chunk of tokens at a time, so the
largest intermediate is ``[chunk, vocab]``. The gradients with respect to the hidden states and the
head's weight are complete when the forward pass ends; backward only scales them. The cost is
that of the plain form: three matmuls with the head's weight, none of them twice.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megalith.core import devices
from megalith.tasks.base import IGNORE

_CHUNK_LOGITS = 1 << 24
"""Logits per chunk: 64 MiB in float32, enough rows to keep the matmuls of a CPU at full speed."""

_CHUNK_LOGITS_OF_ACCELERATOR = 1 << 27
"""512 MiB in float32. Each chunk reads the head's weight and writes its float32 gradient anew, as
long on an H100 as multiplying hundreds of rows; with 64 MiB it would mostly wait for memory."""

_ALIGN = 32
"""Rows of logits are padded to a multiple of this: matmuls into rows of odd length are slower."""

HALF_SCALE = 1024.0
"""Keeps softmax probabilities above float16's smallest number; a power of two, so exact."""


def chunk_rows(vocab: int, device: torch.device) -> int:
    """Tokens per chunk for a vocabulary of ``vocab``."""
    logits = _CHUNK_LOGITS_OF_ACCELERATOR if devices.is_accelerator(device) else _CHUNK_LOGITS
    return max(32, logits // vocab // 32 * 32)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    chunk: int | None = None,
) -> Tensor:
    """Sum over valid tokens of the cross-entropy of ``hidden @ weight.T``.

    Per token with logits ``x``, target ``t`` and log-normaliser ``z = logsumexp(x)``, the loss is
    ``z - (1 - s) x_t - s mean(x) + z_loss z²``, with ``s`` the label smoothing
    (Szegedy et al. 2016, section 7; z-loss: Chowdhery et al. 2022, PaLM, section 5).

    Args:
        hidden: ``[..., width]``. Matmuls run in its dtype, or in autocast's where that is on.
        weight: ``[vocab, width]``; its gradient comes in its own dtype, summed in float32.
        targets: int64 ``[...]``; ``-100`` does not count.
        chunk: tokens at a time; left out: about 64 MiB of logits, on an
            accelerator 512 MiB.

    Returns:
        float32 scalar (float64 for float64 inputs).
    """
    total: Tensor = _LinearCrossEntropy.apply(  # pyright: ignore[reportAssignmentType]
        hidden.flatten(0, -2).to(matmul_dtype(hidden)),
        weight,
        targets.flatten(),
        label_smoothing,
        z_loss,
        chunk or chunk_rows(weight.shape[0], hidden.device),
    )
    return total


def cross_entropy(
    logits: Tensor, targets: Tensor, *, label_smoothing: float = 0.0, z_loss: float = 0.0
) -> Tensor:
    """The same sum from logits ``[..., vocab]`` that are there already, in float32."""
    logits = logits.flatten(0, -2)
    logits = logits.float() if logits.dtype != torch.float64 else logits
    targets = targets.flatten()
    total = torch.nn.functional.cross_entropy(
        logits, targets, ignore_index=IGNORE, reduction="sum", label_smoothing=label_smoothing
    )
    if z_loss:
        normaliser = logits.logsumexp(-1)
        total = total + z_loss * (normaliser.square() * (targets != IGNORE)).sum()
    return total


def matmul_dtype(tensor: Tensor) -> torch.dtype:
    """What matmuls of ``tensor`` run in: autocast's dtype where that is on, else its own."""
    kind = tensor.device.type
    # There is no autocast on the meta device, where models are traced; asking for it would fail.
    if tensor.dtype == torch.float64 or not torch.amp.is_autocast_available(kind):
        return tensor.dtype
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else tensor.dtype


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        smoothing: float,
        z_loss: float,
        chunk: int,
    ) -> Tensor:
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        exact = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        scale = HALF_SCALE if hidden.dtype == torch.float16 else 1.0
        matrix = weight.to(hidden.dtype)
        total = torch.zeros((), dtype=exact, device=hidden.device)
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=exact) if wants_weight else None
        # All chunks share this memory: fresh pages cost more to map than to fill.
        vocab, width = len(weight), -(-len(weight) // _ALIGN) * _ALIGN
        products = hidden.new_empty(min(chunk, len(hidden)), width)
        logits = products if hidden.dtype == exact else products.to(exact)
        for first in range(0, len(hidden), chunk):
            rows = slice(first, first + chunk)
            part, target = hidden[rows], targets[rows]
            valid = (target != IGNORE).unsqueeze(-1)
            product, logit = products[: len(part), :vocab], logits[: len(part)]
            torch.mm(part, matrix.T, out=product)
            if logit.dtype != product.dtype:
                logit[:, :vocab] = product
            logit[:, vocab:] = -torch.inf
            first_logit = logit[:, :1].clone()
            log_probs = torch.log_softmax(logit, -1, out=logit)[:, :vocab]
            normaliser = first_logit - log_probs[:, :1]
            total += _loss(log_probs, normaliser, target, valid, smoothing, z_loss)
            if not (wants_hidden or wants_weight):
                continue
            slope = _slope_(log_probs, normaliser, target, smoothing, z_loss)
            slope = slope.mul_(scale) if scale != 1.0 else slope
            slope = slope if slope.dtype == product.dtype else product.copy_(slope)
            # Tokens that do not count are left out of the narrow factor: a pass over [rows, width]
            # and not over [rows, vocab].
            if grad_hidden is not None:
                grad_hidden[rows] = (slope @ matrix) * valid
            if grad_weight is not None:
                _add_product_(grad_weight, slope, part * valid)
        ctx.scale = scale
        ctx.weight_dtype = weight.dtype
        ctx.save_for_backward(grad_hidden, grad_weight)
        return total

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        grad_hidden, grad_weight = ctx.saved_tensors
        factor = grad_total / ctx.scale
        # In place, to hold no second copy; a second backward is then refused by autograd itself.
        if grad_hidden is not None:
            grad_hidden = grad_hidden.mul_(factor)
        if grad_weight is not None:
            grad_weight = grad_weight.mul_(factor).to(ctx.weight_dtype)
        return grad_hidden, grad_weight, None, None, None, None


def _loss(
    log_probs: Tensor,
    normaliser: Tensor,
    target: Tensor,
    valid: Tensor,
    smoothing: float,
    z_loss: float,
) -> Tensor:
    """The summed loss of a chunk."""
    loss = -(1 - smoothing) * log_probs.gather(-1, target.clamp(min=0).unsqueeze(-1))
    if smoothing:
        loss = loss - smoothing * log_probs.mean(-1, keepdim=True)
    if z_loss:
        loss = loss + z_loss * normaliser.square()
    return torch.where(valid, loss, 0.0).sum()


def _slope_(
    log_probs: Tensor, normaliser: Tensor, target: Tensor, smoothing: float, z_loss: float
) -> Tensor:
    """Turn ``log_probs`` in place into the derivative of each row's loss by its logits."""
    slope = log_probs.exp_()
    if z_loss:
        slope.mul_(1 + 2 * z_loss * normaliser)
    if smoothing:
        slope.sub_(smoothing / slope.shape[-1])
    chosen = target.clamp(min=0).unsqueeze(-1)
    return slope.scatter_add_(-1, chosen, torch.full_like(normaliser, smoothing - 1))


def _add_product_(total: Tensor, slope: Tensor, hidden: Tensor) -> None:
    """``total += slope.T @ hidden``; the running sum stays in float32."""
    if slope.dtype == total.dtype:
        total.addmm_(slope.T, hidden)
    else:
        total += slope.T @ hidden
