"""GPT-2 as one writes it by hand in PyTorch, for the peers that bring no model of their own."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from common import Job
from safetensors.torch import load_file
from torch import Tensor, nn


class Attention(nn.Module):
    def __init__(self, job: Job) -> None:
        super().__init__()
        self.heads = job.heads
        self.c_attn = nn.Linear(job.width, 3 * job.width)
        self.c_proj = nn.Linear(job.width, job.width)

    def forward(self, x: Tensor) -> Tensor:
        batch, sequence, width = x.shape
        query, key, value = (
            part.view(batch, sequence, self.heads, -1).transpose(1, 2)
            for part in self.c_attn(x).split(width, dim=2)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.c_proj(mixed.transpose(1, 2).reshape(batch, sequence, width))


class MLP(nn.Module):
    def __init__(self, job: Job) -> None:
        super().__init__()
        self.c_fc = nn.Linear(job.width, 4 * job.width)
        self.c_proj = nn.Linear(4 * job.width, job.width)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))


class Block(nn.Module):
    def __init__(self, job: Job) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(job.width)
        self.attn = Attention(job)
        self.ln_2 = nn.LayerNorm(job.width)
        self.mlp = MLP(job)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT2(nn.Module):
    """Logits ``[batch, sequence, vocab]`` of int64 ``[batch, sequence]``."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.wte = nn.Embedding(job.vocab, job.width)
        self.wpe = nn.Embedding(job.context, job.width)
        self.h = nn.ModuleList(Block(job) for _ in range(job.layers))
        self.ln_f = nn.LayerNorm(job.width)
        self.lm_head = nn.Linear(job.width, job.vocab, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


def build(job: Job) -> GPT2:
    """The model with the shared weights."""
    model = GPT2(job)
    missing, unexpected = model.load_state_dict(linear_weights(job), strict=False)
    if missing != ["lm_head.weight"] or unexpected:
        raise RuntimeError(f"weights do not fit: {missing=} {unexpected=}")
    return model


def linear_weights(job: Job) -> dict[str, Tensor]:
    """The shared weights with matrices as ``nn.Linear`` has them: GPT-2's file transposes them."""
    found = load_file(Path(job.weights) / "model.safetensors")
    return {
        name.removeprefix("transformer."): value.t() if ".c_" in name and value.ndim == 2 else value
        for name, value in found.items()
    }


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean over all tokens."""
    return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.reshape(-1))
