"""Kernels that the fake accelerator cannot have and a GPU has, as what they allocate.

Attention picks its kernel by the rules of ``sdp::select_sdp_backend``. A fused RMSNorm keeps one
number per row where its decomposition would keep copies of its input. Each stand-in allocates
exactly what the kernel and its backward do; `tests/plan/test_kernels.py` compares those that have a
CPU kernel or a formula.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_HALF = (torch.float16, torch.bfloat16)
_libraries: list[torch.library.Library] = []
"""Held for the life of the process, like those of autocast."""


def install(capability: tuple[int, int], attention: Sequence[str]) -> None:
    """Register the stand-ins for a GPU of ``capability``."""

    def attend(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        kind = choose(attention, capability, query, value, attn_mask, enable_gqa)
        return _ATTENTION[kind](
            query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
        )

    for dispatch in ("AutogradPrivateUse1", "PrivateUse1"):
        library = torch.library.Library("aten", "IMPL", dispatch)
        library.impl("scaled_dot_product_attention", attend)
        _libraries.append(library)
    norms = torch.library.Library("aten", "IMPL", "AutogradPrivateUse1")
    norms.impl("rms_norm", _rms_norm)
    _libraries.append(norms)


def choose(
    order: Sequence[str],
    capability: tuple[int, int],
    query: Tensor,
    value: Tensor,
    mask: Tensor | None,
    grouped: bool,
) -> str:
    """The first kernel of ``order`` that takes these inputs."""
    size, half = query.shape[-1], query.dtype in _HALF
    ampere = capability >= (8, 0)
    fits = {
        "cudnn": half and mask is None and size % 8 == 0 and size <= 128 and ampere,
        "flash": half and mask is None and size == value.shape[-1] and size <= 256 and ampere,
        "efficient": not grouped and query.dtype != torch.float64,
    }
    return next((kind for kind in order if fits.get(kind, False)), "math")


def _flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    causal: bool,
    scale: float | None,
    grouped: bool,
) -> Tensor:
    size = query.shape[-1]
    padding = -size % 8
    if padding:
        query, key, value = (torch.nn.functional.pad(t, (0, padding)) for t in (query, key, value))
    scale = scale if scale is not None else 1 / math.sqrt(size)
    found = torch.ops.aten._scaled_dot_product_flash_attention(
        query, key, value, dropout, causal, False, scale=scale
    )[0]
    return found[..., :size] if padding else found


def _cudnn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    causal: bool,
    scale: float | None,
    grouped: bool,
) -> Tensor:
    return torch.ops.aten._scaled_dot_product_cudnn_attention(
        query, key, value, mask, _trains(query, key, value), dropout, causal, False, scale=scale
    )[0]


def _efficient(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    causal: bool,
    scale: float | None,
    grouped: bool,
) -> Tensor:
    return torch.ops.aten._scaled_dot_product_efficient_attention(
        query,
        key,
        value,
        _additive(mask, query.dtype),
        _trains(query, key, value),
        dropout,
        causal,
        scale=scale,
    )[0]


def _math(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    causal: bool,
    scale: float | None,
    grouped: bool,
) -> Tensor:
    # Torch's own, made of operators that every device has; half precision is widened.
    return torch.ops.aten._scaled_dot_product_attention_math(
        query,
        key,
        value,
        _additive(mask, query.dtype),
        dropout,
        causal,
        scale=scale,
        enable_gqa=grouped,
    )[0]


_ATTENTION = {"flash": _flash, "cudnn": _cudnn, "efficient": _efficient, "math": _math}


def _trains(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


def _additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask.logical_not(), -math.inf)


class _FusedRmsNorm(torch.autograd.Function):
    """Allocates what CUDA's ``_fused_rms_norm`` does: the result, and a float32 number per row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: list[int], weight: Tensor | None) -> Tensor:
        rows = x.shape[: x.ndim - len(shape)]
        scale = x.new_empty((*rows, *[1] * len(shape)), dtype=torch.float32)
        ctx.save_for_backward(x, weight, scale)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, Tensor | None]:  # pyright: ignore
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), None, None if weight is None else torch.empty_like(weight)


def _rms_norm(
    x: Tensor, shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Any:
    return _FusedRmsNorm.apply(x, list(shape), weight)
