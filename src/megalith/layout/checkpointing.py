"""Activation checkpointing: recompute activations in backward instead of keeping them.

``full`` keeps the input of each unit and runs the unit again in backward (Chen et al. 2016).
``selective`` keeps the results of matmuls, convolutions and attention, and recomputes the cheap
operations between them (Korthikanti et al. 2022). Recomputation replays the same random numbers.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

_EXPENSIVE = (
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "convolution",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
)


def apply(units: dict[str, nn.Module], mode: Literal["none", "selective", "full"]) -> None:
    """Make each unit's forward recompute in backward; names and state dicts stay as they are."""
    if mode == "none":
        return
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": True}
    if mode == "selective":
        policy = partial(_policy, _operators())
        options["context_fn"] = partial(create_selective_checkpoint_contexts, policy)
    for unit in units.values():
        unit.forward = partial(checkpoint, unit.forward, **options)


def _operators() -> frozenset[Any]:
    aten = torch.ops.aten
    return frozenset(getattr(aten, name).default for name in _EXPENSIVE)


def _policy(kept: frozenset[Any], ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in kept else CheckpointPolicy.PREFER_RECOMPUTE
