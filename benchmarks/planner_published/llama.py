"""A Llama as published training programs write it, and how they spread it.

It is a module of the user's own to the planner. What differs from the project's decoder, and
decides memory: positions by complex numbers, keys and values repeated for grouped heads, whole
logits, torch's DTensor for tensor parallelism with gathered inputs kept for the weights' gradient,
and selective checkpointing that keeps every other matrix product.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts


@dataclass(frozen=True)
class Shape:
    """Sizes of a Llama."""

    width: int
    layers: int
    heads: int
    kv_heads: int
    hidden: int
    vocab: int
    sequence: int


class Norm(nn.Module):
    """RMSNorm as single operators on a float32 copy: torchtitan's own, and torch's before 2.9."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """Same shape and dtype as ``x``."""
        wide = x.float()
        found = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return found.type_as(x) * self.weight


def _norm(width: int, loose: bool) -> nn.Module:
    return Norm(width) if loose else nn.RMSNorm(width, eps=1e-5)


class Attention(nn.Module):
    """Grouped causal attention over rotated queries and keys ``[batch, tokens, width]``."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.size = shape.width // shape.heads
        self.repeats = shape.heads // shape.kv_heads
        narrow = shape.kv_heads * self.size
        self.query = nn.Linear(shape.width, shape.width, bias=False)
        self.key = nn.Linear(shape.width, narrow, bias=False)
        self.value = nn.Linear(shape.width, narrow, bias=False)
        self.out = nn.Linear(shape.width, shape.width, bias=False)

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        """Same shape as ``x``."""
        query, key, value = (
            part(x).unflatten(-1, (-1, self.size)) for part in (self.query, self.key, self.value)
        )
        query, key = _turned(query, turns), _turned(key, turns)
        if self.repeats > 1:
            key, value = (_repeated(part, self.repeats) for part in (key, value))
        found = F.scaled_dot_product_attention(
            *(part.transpose(1, 2) for part in (query, key, value)), is_causal=True
        )
        return self.out(found.transpose(1, 2).contiguous().flatten(2))


class Mlp(nn.Module):
    """SwiGLU, every intermediate left to autograd."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.width, shape.hidden, bias=False)
        self.up = nn.Linear(shape.width, shape.hidden, bias=False)
        self.down = nn.Linear(shape.hidden, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Same shape as ``x``."""
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Attention and MLP, each behind a norm and beside the residual stream."""

    def __init__(self, shape: Shape, loose: bool) -> None:
        super().__init__()
        self.attention_norm = _norm(shape.width, loose)
        self.attention = Attention(shape)
        self.mlp_norm = _norm(shape.width, loose)
        self.mlp = Mlp(shape)

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        """Same shape as ``x``."""
        x = x + self.attention(self.attention_norm(x), turns)
        return x + self.mlp(self.mlp_norm(x))


class Llama(nn.Module):
    """Tokens ``[batch, tokens]`` to logits ``[batch, tokens, vocab]``.

    Args:
        loose: norms are single operators, not one kernel.
    """

    def __init__(self, shape: Shape, loose: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocab, shape.width)
        self.blocks = nn.ModuleList(Block(shape, loose) for _ in range(shape.layers))
        self.norm = _norm(shape.width, loose)
        self.head = nn.Linear(shape.width, shape.vocab, bias=False)
        self.register_buffer("turns", _turns(shape), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """The logits, in the dtype of the head's product."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.turns)
        return self.head(self.norm(x))


def loss(logits: Tensor, targets: Tensor, widened: bool) -> Tensor:
    """Mean cross-entropy of the logits as they are, or of their float32 copy."""
    flat = logits.flatten(0, 1)
    return F.cross_entropy(flat.float() if widened else flat, targets.flatten(0, 1))


def split(model: Llama, mesh: DeviceMesh, *, gathered: bool) -> None:
    """Tensor and sequence parallelism by torch's DTensor.

    Args:
        gathered: every rank holds the whole embedding, gets all logits, and gathers the input of
            each product by itself; else embedding and logits are divided by the vocabulary, and
            products share a gathered input.
    """
    whole, rows = Replicate(), Shard(1)
    column = ColwiseParallel(input_layouts=rows) if gathered else ColwiseParallel()
    given = PrepareModuleInput(input_layouts=(rows, None), desired_input_layouts=(whole, None))
    taken = PrepareModuleInput(input_layouts=(rows,), desired_input_layouts=(whole,))
    cut = RowwiseParallel(input_layouts=whole, output_layouts=rows)
    kept = PrepareModuleOutput(output_layouts=whole, desired_output_layouts=rows)
    ends: dict[str, Any] = {
        "embedding": kept if gathered else cut,
        "norm": SequenceParallel(),
        "head": ColwiseParallel(
            input_layouts=rows,
            output_layouts=whole if gathered else Shard(-1),
            use_local_output=gathered,
        ),
    }
    parallelize_module(model, mesh, ends)
    table: dict[str, Any] = {} if gathered else {"attention": given, "mlp": taken}
    table |= dict.fromkeys(("attention_norm", "mlp_norm"), SequenceParallel())
    names = ("attention.query", "attention.key", "attention.value", "mlp.gate", "mlp.up")
    table |= dict.fromkeys(names, column)
    table |= dict.fromkeys(("attention.out", "mlp.down"), RowwiseParallel(output_layouts=rows))
    for block in model.blocks:
        parallelize_module(block, mesh, table)


def recompute(model: Llama, how: str) -> None:
    """``full``: blocks; ``layer``: every other; ``op``: all but attention and half the products."""
    for place, block in enumerate(model.blocks):
        if how == "full" or (how == "layer" and place % 2 == 0):
            model.blocks[place] = checkpoint_wrapper(block, preserve_rng_state=False)
        elif how == "op":
            model.blocks[place] = checkpoint_wrapper(
                block, context_fn=_every_other, preserve_rng_state=False
            )


def shard(model: Llama, mesh: DeviceMesh) -> None:
    """FSDP2: bfloat16 weights, float32 reduction; the last block's weights stay for backward."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    last = len(model.blocks) - 1
    for place, block in enumerate(model.blocks):
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=place < last)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=True)


def _turns(shape: Shape) -> Tensor:
    """Unit complex numbers ``[tokens, size / 2]``."""
    size = shape.width // shape.heads
    rates = 500000.0 ** (-torch.arange(0, size, 2).float() / size)
    angles = torch.outer(torch.arange(shape.sequence).float(), rates)
    return torch.polar(torch.ones_like(angles), angles)


def _turned(x: Tensor, turns: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turns[None, : x.shape[1], None]).flatten(3).type_as(x)


def _repeated(x: Tensor, times: int) -> Tensor:
    batch, tokens, heads, size = x.shape
    wide = x[:, :, :, None, :].expand(batch, tokens, heads, times, size)
    return wide.reshape(batch, tokens, heads * times, size)


def _every_other() -> Any:
    aten, sent = torch.ops.aten, torch.ops._c10d_functional
    kept = {
        aten.mm.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
        sent.reduce_scatter_tensor.default,
    }
    return create_selective_checkpoint_contexts(partial(_policy, kept, defaultdict(int)))


def _policy(
    kept: set[Any], products: dict[bool, int], ctx: Any, op: Any, *args: Any, **kwargs: Any
) -> CheckpointPolicy:
    if op is torch.ops.aten.mm.default:
        products[ctx.is_recompute] += 1
        if products[ctx.is_recompute] % 2 == 0:
            return CheckpointPolicy.PREFER_RECOMPUTE
    return CheckpointPolicy.MUST_SAVE if op in kept else CheckpointPolicy.PREFER_RECOMPUTE
