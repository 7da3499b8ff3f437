"""Cross-entropy over a vocabulary that is divided over ranks.

Each rank has the logits of its own rows. The largest logit, the sum of exponentials and the
target's logit are agreed on by two small collectives per chunk of tokens; logits themselves never
travel (Shoeybi et al. 2019, section 3). Like the undivided form, it works on a chunk of tokens at a
time and has both gradients ready when forward ends.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from megalith.layout import collectives
from megalith.tasks.base import IGNORE
from megalith.tasks.cross_entropy import HALF_SCALE, chunk_rows, matmul_dtype


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    group: dist.ProcessGroup,
    vocab: int,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Tensor:
    """The sum that ``megalith.tasks.cross_entropy.linear_cross_entropy`` gives, on every rank.

    Args:
        hidden: ``[..., width]``, the same on every rank; its gradient is this rank's part of a sum.
        weight: this rank's rows of the head, ``[rows, width]``.
        targets: int64 ``[...]`` in the whole vocabulary; ``-100`` does not count.
        vocab: rows of the whole head.
    """
    total: Tensor = _Divided.apply(  # pyright: ignore[reportAssignmentType]
        hidden.flatten(0, -2).to(matmul_dtype(hidden)),
        weight,
        targets.flatten(),
        (group, vocab, label_smoothing, z_loss),
    )
    return total


def linear(hidden: Tensor, weight: Tensor, *, group: dist.ProcessGroup, vocab: int) -> Tensor:
    """All logits ``[..., vocab]`` on every rank, for losses that need them.

    ``hidden`` is the same on every rank and its gradient this rank's part of a sum; what follows
    must be the same on every rank.
    """
    part = F.linear(hidden, weight)
    share = -(-vocab // dist.get_world_size(group))
    padded = F.pad(part, (0, share - part.shape[-1]))
    return collectives.gather(padded, part.ndim - 1, group)[..., :vocab]


class _Divided(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, how: Any) -> Tensor:
        group, vocab, smoothing, z_loss = how
        first = dist.get_rank(group) * -(-vocab // dist.get_world_size(group))
        exact = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        matrix = weight.to(hidden.dtype)
        total = torch.zeros((), dtype=exact, device=hidden.device)
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.zeros_like(hidden) if wants_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=exact) if wants_weight else None
        scale = HALF_SCALE if hidden.dtype == torch.float16 else 1.0
        chunk = chunk_rows(len(weight), hidden.device)
        for begin in range(0, len(hidden), chunk):
            rows = slice(begin, begin + chunk)
            part, target = hidden[rows], targets[rows]
            valid = target != IGNORE
            logits = (part @ matrix.T).to(exact)
            largest = collectives.max_now(logits.amax(-1), group)
            local = target - first
            here = (local >= 0) & (local < len(weight))
            local = local.clamp(0, len(weight) - 1).unsqueeze(-1)
            found = logits.gather(-1, local).squeeze(-1) * here
            slope = (logits - largest.unsqueeze(-1)).exp_()
            sums = torch.stack([slope.sum(-1), found, logits.sum(-1)])
            exponentials, found, everything = collectives.sum_now(sums, group)
            normaliser = exponentials.log() + largest
            loss = normaliser - (1 - smoothing) * found - smoothing / vocab * everything
            loss = loss + z_loss * normaliser.square()
            total += torch.where(valid, loss, 0.0).sum()
            if grad_hidden is None and grad_weight is None:
                continue
            factor = (1 + 2 * z_loss * normaliser) / exponentials
            slope.mul_(factor.unsqueeze(-1)).sub_(smoothing / vocab)
            chosen = here.to(exact).mul_(smoothing - 1)  # a bool times a float is float32
            slope.scatter_add_(-1, local, chosen.unsqueeze(-1))
            slope = (slope * (valid * scale).unsqueeze(-1)).to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden[rows] = slope @ matrix
            if grad_weight is not None:
                grad_weight += slope.T @ part
        ctx.scale, ctx.weight_dtype = scale, weight.dtype
        ctx.save_for_backward(grad_hidden, grad_weight)
        return total

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        grad_hidden, grad_weight = ctx.saved_tensors
        factor = grad_total / ctx.scale
        if grad_hidden is not None:
            grad_hidden = grad_hidden.mul_(factor)
        if grad_weight is not None:
            grad_weight = grad_weight.mul_(factor).to(ctx.weight_dtype)
        return grad_hidden, grad_weight, None, None
