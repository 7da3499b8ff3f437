"""Small models and batches for tests of the step: no data and no family needed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from megalith import optim, step
from megalith.layout.apply import apply
from megalith.layout.mesh import single
from megalith.layout.precision import LossScale, Precision
from megalith.recipe import parse
from megalith.tasks.language import Language

VOCAB = 23


class ToyBlock(nn.Module):
    """Two matmuls, a norm and a dropout: enough for every wrapping to matter."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(torch.nn.functional.gelu(self.up(self.norm(x)))))


class Toy(nn.Module):
    """An embedding, blocks and a tied head, with the decoder's ``head`` argument."""

    def __init__(self, width: int = 16, layers: int = 2, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, width)
        self.blocks = nn.ModuleList(ToyBlock(width, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: Tensor, *, head: Any = None) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        weight = self.embedding.weight
        return head(x, weight) if head is not None else x @ weight.T


def toy_step(
    dtype: torch.dtype = torch.float64, *, dropout: float = 0.0, task: Any = None, **fields: Any
) -> step.Step:
    """A step over :class:`Toy`; ``fields`` are ``"train.clip"``-like overrides with ``__``."""
    values: dict[str, dict[str, Any]] = {}
    for name, value in fields.items():
        section, _, key = name.partition("__")
        values.setdefault(section, {})[key] = value
    recipe = parse(values)
    torch.manual_seed(0)
    model = Toy(dropout=dropout).to(dtype)
    section = recipe.train
    precision = Precision(section.precision, torch.device("cpu"))
    return step.Step(
        spread=apply(model, recipe.layout, single(), precision, section).settle(precision.device),
        task=task or Language(),
        optimizers=optim.build(recipe.optim, model),
        schedule=optim.build_schedule(recipe.optim, section.steps),
        precision=precision,
        clip=section.clip,
        ema=optim.Ema(model.named_parameters(), section.ema) if section.ema else None,
        loss_scale=LossScale() if section.precision == "fp16" else None,
        seed=section.seed,
    )


def ragged_batch(samples: int, length: int = 12, seed: int = 0) -> dict[str, Tensor]:
    """Tokens whose samples have very different numbers of valid targets; one has none."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCAB, (samples, length + 1), generator=generator)
    targets = tokens[:, 1:].clone()
    for index in range(samples):
        targets[index, (index * 5) % (length + 1) :] = -100
    return {
        "tokens": tokens[:, :-1].contiguous(),
        "targets": targets,
        "sample": torch.arange(samples),
    }


def split(batch: dict[str, Tensor], sizes: list[int]) -> list[dict[str, Tensor]]:
    """Cut a batch into micro-batches of the given sizes."""
    columns = {name: tensor.split(sizes) for name, tensor in batch.items()}
    return [{name: parts[i] for name, parts in columns.items()} for i in range(len(sizes))]


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter's gradient, by name."""
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
