"""Activation checkpointing: recompute activations in backward instead of keeping them.

``full`` keeps the input of each unit and runs the unit again in backward (Chen et al. 2016).
``selective`` keeps the results of matmuls, convolutions and attention, and recomputes the cheap
operations between them (Korthikanti et al. 2022). Recomputation replays the same random numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from megalith.layout.units import norms_with_statistics
from megalith.models import grouped

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]

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
    """Make each unit's forward recompute in backward; names and state dicts stay as they are.

    The running statistics of batch norms are those of one forward pass, not of two.
    """
    if mode == "none":
        return
    kept = _operators() if mode == "selective" else None
    for unit in units.values():
        unit.forward = _recomputed(unit, kept)


def _recomputed(unit: nn.Module, kept: frozenset[Any] | None) -> Callable[..., Any]:
    inner = unit.forward
    norms = norms_with_statistics(unit)
    plain: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": True}
    if kept is not None:
        plain["context_fn"] = partial(_selective, kept)
    careful = {**plain, "context_fn": partial(_contexts, kept, norms)}

    # A function and not a functools.partial, which torch.compile passes over without a word.
    def forward(*args: Any, **kwargs: Any) -> Any:
        # A compiled graph updates a buffer once, whatever it recomputes.
        options = careful if norms and not torch.compiler.is_compiling() else plain
        return checkpoint(inner, *args, **options, **kwargs)

    return forward


def _selective(kept: frozenset[Any]) -> Contexts:
    return create_selective_checkpoint_contexts(partial(_policy, kept))


def _contexts(kept: frozenset[Any] | None, norms: list[nn.Module]) -> Contexts:
    """Around forward and recomputation, which works on copies of the running statistics."""
    first, again = _selective(kept) if kept is not None else (nullcontext(), nullcontext())
    return first, _on_copies(norms, again)


@contextmanager
def _on_copies(norms: list[nn.Module], inner: AbstractContextManager[Any]) -> Iterator[None]:
    originals = [(norm, dict(norm.named_buffers(recurse=False))) for norm in norms]
    for norm, buffers in originals:
        for name, buffer in buffers.items():
            setattr(norm, name, buffer.clone())
    try:
        with inner:
            yield
    finally:
        for norm, buffers in originals:
            for name, buffer in buffers.items():
                setattr(norm, name, buffer)


def _operators() -> frozenset[Any]:
    aten = torch.ops.aten
    return frozenset([*(getattr(aten, name).default for name in _EXPENSIVE), grouped.PRODUCT])


def _policy(kept: frozenset[Any], ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in kept else CheckpointPolicy.PREFER_RECOMPUTE
