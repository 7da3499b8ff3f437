"""What the layouts are measured with: the GPT of a recipe, at a chosen size, on random tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

import megalith
from megalith import step
from megalith.core import seeds
from megalith.layout import mesh as meshes
from megalith.recipe import Recipe
from megalith.step import Step
from megalith.tasks import Batch

RECIPE = Path(__file__).parents[2] / "recipes" / "gpt-stdlib.toml"


@dataclass(frozen=True)
class Size:
    """How large model and batches are.

    Attributes:
        sequence: tokens of a sample.
        micro_batch: samples of one.
        micros: micro-batches of an update, over all ranks.
    """

    layers: int = 8
    width: int = 512
    heads: int = 8
    vocab: int = 2048
    sequence: int = 256
    micro_batch: int = 4
    micros: int = 4


def recipe(size: Size, layout: Sequence[str] = ()) -> Recipe:
    """The recipe with a layout, given as overrides such as ``layout.shard=2``."""
    return megalith.load(
        RECIPE,
        f"model.layers={size.layers}",
        f"model.width={size.width}",
        f"model.heads={size.heads}",
        f"model.context={size.sequence}",
        f"data.sequence={size.sequence}",
        f"train.micro_batch={size.micro_batch}",
        f"train.global_batch={size.micro_batch * size.micros}",
        "optim.warmup=0",
        *layout,
    )


def build(size: Size, layout: Sequence[str] = ()) -> Step:
    """The step of this rank, on the CPU in float32."""
    device, loaded = torch.device("cpu"), recipe(size, layout)
    mesh = meshes.build(loaded.layout, device)
    return step.build(loaded, {"vocab": size.vocab}, device, mesh)


def update(size: Size, number: int) -> list[Batch]:
    """All micro-batches of one update, the same whoever asks."""
    return [_batch(size, number * size.micros + n) for n in range(size.micros)]


def _batch(size: Size, number: int) -> Batch:
    generator = seeds.generator(0, "layouts", number)
    shape = (size.micro_batch, size.sequence + 1)
    tokens = torch.randint(size.vocab, shape, generator=generator)
    return {
        "tokens": tokens[:, :-1].contiguous(),
        "targets": tokens[:, 1:].contiguous(),
        "bytes": torch.full((size.micro_batch,), 3 * size.sequence),
        "sample": torch.arange(size.micro_batch),
    }


def mine(built: Step, batches: Sequence[Batch]) -> list[Batch]:
    """Those of an update's micro-batches that this rank works on."""
    return list(batches[built.mesh.data_rank :: built.mesh.data_ranks])
