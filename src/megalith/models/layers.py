"""Parts that more than one model family is made of: norms, rotary positions, feed-forward."""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megalith.recipe.families import RopeScaling

Activation = Literal["gelu", "gelu_tanh", "relu", "swiglu"]


class Absent(nn.Module):
    """Stands where a part is left out: a stage of a pipeline holds some of the parts only."""

    def forward(self, x: Tensor, *rest: object, **options: object) -> Tensor:
        """The input, as it is."""
        return x


class RMSNorm(nn.RMSNorm):
    """``x / rms(x) * weight`` (Zhang and Sennrich 2019) in the dtype of ``x``."""

    def forward(self, x: Tensor) -> Tensor:
        """``[..., width]`` to the same. A float32 weight meets bf16 activations under autocast."""
        weight = self.weight.to(x.dtype)
        return F.rms_norm(x, self.normalized_shape, weight, self.eps).to(x.dtype)


def norm(kind: Literal["layernorm", "rmsnorm"], width: int, eps: float) -> nn.Module:
    """A normalisation over the last dimension; its statistics are float32 for any activations."""
    return nn.LayerNorm(width, eps=eps) if kind == "layernorm" else RMSNorm(width, eps=eps)


class FeedForward(nn.Module):
    """``down(act(up(x)))``, or with a gate ``down(silu(gate(x)) * up(x))`` (Shazeer 2020, SwiGLU).

    Args:
        width: size of input and output.
        hidden: size between the two matrices.
    """

    def __init__(self, width: int, hidden: int, activation: Activation, bias: bool) -> None:
        super().__init__()
        self.activation = activation
        self.gate = nn.Linear(width, hidden, bias=bias) if activation == "swiglu" else None
        self.up = nn.Linear(width, hidden, bias=bias)
        self.down = nn.Linear(hidden, width, bias=bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """``[..., width]`` to ``[..., width]``.

        What lies between the matrices is cheap and wide, so backward computes it again instead of
        keeping it: a quarter of a GPT block's activations for a few elementwise operations. A
        compiler makes that choice by itself.
        """
        inner = (self.up(hidden),) if self.gate is None else (self.gate(hidden), self.up(hidden))
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            # Recomputation stops at the last tensor that backward needs: ``down`` runs once.
            return checkpoint(self._down, *inner, use_reentrant=False, preserve_rng_state=False)
        return self._down(*inner)

    def _down(self, inner: Tensor, factor: Tensor | None = None) -> Tensor:
        if factor is not None:
            return self.down(F.silu(inner) * factor)
        if self.activation == "relu":
            return self.down(F.relu(inner))
        return self.down(
            F.gelu(inner, approximate="tanh" if self.activation == "gelu_tanh" else "none")
        )


def rotary_tables(
    positions: Tensor,
    head_dim: int,
    theta: float,
    scaling: RopeScaling,
    context: int,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Cosine and sine of each position's angles (Su et al. 2021, RoFormer, section 3.2.2).

    A pure function: no buffer, so that casting a model to bf16 cannot coarsen its angles.

    Args:
        positions: int64 ``[batch or 1, seq]``.
        scaling: how angles are stretched; ``dynamic`` looks at the largest of ``positions``.
        context: longest sequence without ``dynamic`` scaling.
        dtype: of the tables; float32, or float64 in a float64 model.

    Returns:
        Two tensors ``[batch or 1, 1, seq, head_dim / 2]``.
    """
    frequencies = _frequencies(positions, head_dim, theta, scaling, context, dtype)
    angles = positions[:, None, :, None].to(dtype) * frequencies
    factor = _yarn_factor(scaling) if scaling.kind == "yarn" else 1.0
    cos, sin = angles.cos(), angles.sin()
    return (cos, sin) if factor == 1.0 else (cos * factor, sin * factor)


def rotate(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair ``(i, i + head_dim / 2)`` by its angle, in the tables' dtype.

    Args:
        states: ``[batch, heads, seq, head_dim]``.
        cos: from :func:`rotary_tables`, as ``sin``.

    Returns:
        The shape and dtype of ``states``.
    """
    first, second = states.chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.to(states.dtype)


def _frequencies(
    positions: Tensor,
    head_dim: int,
    theta: float,
    scaling: RopeScaling,
    context: int,
    dtype: torch.dtype,
) -> Tensor:
    """Radians per token of each pair, ``[head_dim / 2]``."""
    pairs = torch.arange(0, head_dim, 2, device=positions.device).to(dtype) / head_dim
    factor = scaling.factor
    if scaling.kind == "dynamic":
        # NTK-aware: the base grows with the sequence, so the fastest pairs hardly change.
        length = (positions.max() + 1).clamp(min=context).to(dtype)
        stretch = factor * length / context - (factor - 1)
        return (theta * stretch ** (head_dim / (head_dim - 2))) ** -pairs
    plain = theta**-pairs
    if scaling.kind == "linear":
        return plain / factor
    if scaling.kind == "llama3":
        # Slow pairs are stretched, fast ones kept, those between blended (Llama 3 report, 3.4.1).
        turns = scaling.original_context * plain / (2 * math.pi)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        keep = ((turns - low) / (high - low)).clamp(0, 1)
        return plain * (keep + (1 - keep) / factor)
    if scaling.kind == "yarn":
        # Peng et al. 2023 (YaRN), section 3.2: the blend is linear in the pair's index.
        low = _yarn_pair(scaling.beta_fast, head_dim, theta, scaling)
        high = _yarn_pair(scaling.beta_slow, head_dim, theta, scaling)
        if scaling.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        if low == high:
            high += 0.001
        index = torch.arange(head_dim // 2, device=positions.device).to(dtype)
        stretched = ((index - low) / (high - low)).clamp(0, 1)
        return plain * (1 - stretched + stretched / factor)
    return plain


def _yarn_pair(turns: float, head_dim: int, theta: float, scaling: RopeScaling) -> float:
    """Index of the pair that turns ``turns`` times within the original context."""
    wavelengths = scaling.original_context / (turns * 2 * math.pi)
    return head_dim * math.log(wavelengths) / (2 * math.log(theta))


def _yarn_factor(scaling: RopeScaling) -> float:
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    return 0.1 * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0
