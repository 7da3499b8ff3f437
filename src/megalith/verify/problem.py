"""The problem that is solved twice: a small recipe of the same kind, and ragged batches for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from megalith import models
from megalith.core import seeds
from megalith.data.loader import Loader
from megalith.data.prepare import prepare
from megalith.recipe import Recipe
from megalith.recipe.families import DecoderConfig, FactoryModel, ResNetConfig
from megalith.recipe.schema import ImageData, LayoutSection, TextData
from megalith.tasks import Batch
from megalith.verify.trial import Update

SEQUENCE = 48  # tokens: divides over 2, 3, 4, 6 and 8 ranks, twice over for zig-zag
_VOCAB = 97  # a prime, so that it divides over nothing
_UPDATES = 2
_SIZES = (2, 1, 3, 2)  # samples of the micro-batches, in turn


@dataclass(frozen=True)
class Problem:
    """What every layout is tried with.

    Attributes:
        recipe: without a layout.
        facts: of the data.
        updates: one more than is trained before the checkpoint is saved.
    """

    recipe: Recipe
    facts: Mapping[str, int]
    updates: Sequence[Update]
    evaluation: Sequence[Batch]


def problem(recipe: Recipe, micros: int, layers: int) -> Problem:
    """A problem of the recipe's kind with ``micros`` micro-batches per update.

    Families of ours become small (``layers`` blocks); a module of the user's stays as it is and
    is fed with its own data.
    """
    small = _small(recipe, micros, layers)
    count = _UPDATES + 1
    if isinstance(small.data, TextData) and not isinstance(small.model, FactoryModel):
        facts = {"vocab": _VOCAB}
        made = [_text(small, n) for n in range(count * micros + 3)]
    elif isinstance(small.data, ImageData) and not isinstance(small.model, FactoryModel):
        facts = {"channels": 3, "classes": 10}
        made = [_images(small, n) for n in range(count * micros + 3)]
    else:
        splits = prepare(small.data, small.train.seed, None)
        facts = splits.facts
        with Loader(splits.train, seed=small.train.seed, batch=max(_SIZES)) as batches:
            made = [_first(next(batches), _size(n)) for n in range(count * micros + 3)]
    updates = [made[n * micros : (n + 1) * micros] for n in range(count)]
    return Problem(small, facts, updates, made[-3:])


def _small(recipe: Recipe, micros: int, layers: int) -> Recipe:
    train = recipe.train.model_copy(
        update={"global_batch": micros, "micro_batch": 1, "ema": recipe.train.ema or 0.9}
    )
    changes: dict[str, object] = {"layout": LayoutSection(), "train": train}
    model = recipe.model
    if isinstance(model, DecoderConfig):
        changes["model"] = _small_decoder(model, layers)
        if isinstance(recipe.data, TextData):
            changes["data"] = recipe.data.model_copy(update={"sequence": SEQUENCE})
    elif isinstance(model, ResNetConfig):
        fields = {"path": None, "blocks": [1, 1], "width": 8, "channels": 3, "classes": 10}
        changes["model"] = model.model_copy(update={**fields, "stem": "small"})
    return recipe.model_copy(update=changes)


def _small_decoder(model: DecoderConfig, layers: int) -> DecoderConfig:
    """The same kind of decoder; heads and experts keep their proportions as far as they divide."""
    grouped = model.heads // model.kv_heads
    fields: dict[str, object] = {
        "path": None,
        "vocab": None,
        "layers": layers,
        "width": 64,
        "heads": 8,
        "kv_heads": 8 if grouped == 1 else 4,
        "head_dim": 8,
        "hidden": 96,
        "context": 2 * SEQUENCE,
        "dropout": 0.0,
        "window": 20 if model.window is not None else None,
        "window_from": min(model.window_from, 1),
    }
    if model.experts:
        fields |= {"experts": 8, "experts_per_token": min(model.experts_per_token, 2)}
        fields |= {"expert_hidden": 48, "dense_layers": min(model.dense_layers, 1)}
        fields |= {"shared_hidden": 24 if model.shared_hidden else 0}
    return model.model_copy(update=fields)


def _size(number: int) -> int:
    return _SIZES[number % len(_SIZES)]


def _text(recipe: Recipe, number: int) -> Batch:
    """Random tokens; samples have very different numbers of targets, and one micro-batch none."""
    generator = seeds.generator(0, "verify", number)
    size = _size(number)
    tokens = torch.randint(_VOCAB, (size, SEQUENCE + 1), generator=generator)
    targets = tokens[:, 1:].clone()
    for row in range(size):
        targets[row, (number * 7 + row * 17) % SEQUENCE + 1 :] = -100
    if number % 8 == 3:
        targets[:] = -100
    batch = {
        "tokens": tokens[:, :-1].contiguous(),
        "targets": targets,
        "bytes": (targets != -100).sum(1) * 3,
        "sample": torch.arange(size),
    }
    if isinstance(recipe.data, TextData) and not recipe.data.cross_document_attention:
        cut = torch.randint(1, SEQUENCE, (size, 1), generator=generator)
        places = torch.arange(SEQUENCE).expand(size, -1)
        batch["documents"] = (places >= cut).long()
        batch["positions"] = torch.where(places >= cut, places - cut, places)
    return batch


def _images(recipe: Recipe, number: int) -> Batch:
    """Random images, at least two in a batch, since batch norms need a spread."""
    generator = seeds.generator(0, "verify", number)
    size = _size(number) + 1
    target = torch.randint(10, (size,), generator=generator)
    if number % 3 == 1:
        target[0] = -100
    image = torch.randn(size, 3, 8, 8, generator=generator, dtype=torch.float64)
    return {"image": image, "target": target, "sample": torch.arange(size)}


def _first(batch: Batch, size: int) -> Batch:
    return {
        name: (t[:size].double() if t.is_floating_point() else t[:size])
        for name, t in batch.items()
    }


def needs_layers(layout: LayoutSection) -> int:
    """Blocks that a small model needs: two, or one for each stage of a pipeline."""
    each = layout.stages if layout.schedule == "interleaved" else 1
    return max(2, layout.pipeline * each)


def keeps_statistics(recipe: Recipe) -> bool:
    """Whether the model has batch norms, whose running statistics are each rank's own."""
    if isinstance(recipe.model, FactoryModel):
        module = models.build(recipe.model, 0)
        return any(getattr(part, "track_running_stats", False) for part in module.modules())
    return isinstance(recipe.model, ResNetConfig)
