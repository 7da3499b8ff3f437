"""What a layout cannot do, said before any work: the field, what is wrong, what works instead."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megalith.core.errors import RecipeError
from megalith.layout import context
from megalith.models import ModelConfig
from megalith.models.decoder.sharding import check_tensor
from megalith.recipe import Recipe
from megalith.recipe.families import DecoderConfig, FactoryModel, ResNetConfig
from megalith.recipe.schema import TextData
from megalith.tasks import Task


def check(recipe: Recipe, config: ModelConfig, task: Task) -> None:
    """Refuse what no test covers.

    Args:
        config: resolved.

    Raises:
        RecipeError: one line.
    """
    for problem in _problems(recipe, config, task):
        raise RecipeError(problem)
    layout = recipe.layout
    if layout.tensor > 1 and isinstance(config, DecoderConfig):
        check_tensor(config, layout.tensor)
    if layout.context > 1 and isinstance(recipe.data, TextData):
        context.check(recipe.data.sequence, layout.context, layout.exchange)


def _problems(recipe: Recipe, config: Any, task: Task) -> Iterator[str]:
    layout, optim = recipe.layout, recipe.optim
    own = not isinstance(config, FactoryModel)
    cuts_weights = [axis for axis in ("tensor", "expert", "pipeline") if getattr(layout, axis) > 1]
    shares = [*(["shard"] if layout.shard > 1 else []), *cuts_weights]
    if recipe.task.regularizer is not None and shares:
        yield (
            f"task.regularizer: needs whole weights, which layout.{shares[0]} divides; "
            "replicate and context work"
        )
    if isinstance(config, ResNetConfig):
        for axis in ("tensor", "context", "pipeline", "expert"):
            if getattr(layout, axis) > 1:
                yield f"layout.{axis}: does not divide a resnet; replicate and shard work"
    if layout.split and own:
        yield "layout.split: is for a module of yours; a family of ours has its own table"
    if layout.cuts and layout.pipeline == 1:
        yield "layout.cuts: go with layout.pipeline > 1"
    if layout.offload and layout.shard == 1:
        yield "layout.offload: goes with layout.shard > 1"
    if layout.engine == "ddp" and layout.replicate < layout.ranks:
        yield 'layout.engine: "ddp" works with replicate alone; "own" works with every axis'
    yield from _of_experts(recipe, config)
    yield from _of_context(recipe, config, task)
    yield from _of_pipeline(recipe, config, task)
    if optim.name in ("muon", "adafactor") and optim.factory is None:
        for axis in [axis for axis in shares if axis != "pipeline"]:
            yield (
                f"optim.name: {optim.name} needs whole matrices, which layout.{axis} divides; "
                "adamw and sgd work, and so do replicate, context and pipeline"
            )
    if optim.factory is not None and layout.tensor > 1:
        yield "optim.factory: may need whole matrices, which layout.tensor divides; shard works"
    if recipe.train.compile and (cuts_weights or layout.context > 1 or layout.synchronised_norms):
        yield "train.compile: works with replicate and shard, without layout.synchronised_norms"
    if layout.synchronised_norms and isinstance(config, DecoderConfig):
        yield "layout.synchronised_norms: a decoder has no batch norms; leave it out"
    if layout.tensor > 1 and own and layout.sequence_parallel and isinstance(recipe.data, TextData):
        each = recipe.data.sequence // layout.context
        if each % layout.tensor:
            yield (
                f"data.sequence: {each} tokens on a rank do not divide over layout.tensor "
                f"{layout.tensor}; layout.sequence_parallel = false works"
            )


def _of_experts(recipe: Recipe, config: Any) -> Iterator[str]:
    layout, experts = recipe.layout, getattr(config, "experts", 0)
    if layout.expert > 1 and not experts:
        yield "layout.expert: the model has no experts (model.experts); replicate and shard work"
    if layout.expert > 1 and experts and experts % layout.expert:
        yield f"layout.expert: {layout.expert} does not divide model.experts {experts}"
    if layout.context > 1 and experts and config.capacity is not None:
        yield (
            "model.capacity: is counted over whole sequences, which layout.context divides; "
            "none (dropless) works"
        )
    if experts and layout.engine == "ddp":
        yield 'layout.engine: "ddp" does not go with model.experts; "own" works'
    if experts:
        for axis in ("tensor", "pipeline"):
            if getattr(layout, axis) > 1:
                yield f"layout.{axis}: does not go with model.experts; expert and shard work"


def _of_context(recipe: Recipe, config: Any, task: Task) -> Iterator[str]:
    layout = recipe.layout
    if layout.context == 1:
        return
    if not getattr(task, "sequences", ()):
        yield "layout.context: the task names no sequences to divide (see megalith.tasks.Task)"
    scaling = getattr(config, "rope_scaling", None)
    if scaling is not None and scaling.kind == "dynamic":
        yield "layout.context: dynamic rotary scaling looks at the longest position; yarn works"
    heads = getattr(config, "kv_heads", 0)
    if layout.exchange == "all-to-all" and heads % (layout.tensor * layout.context):
        yield (
            f"layout.exchange: {layout.context * layout.tensor} ranks do not divide model.kv_heads "
            f'{heads}; "gather" works'
        )


def _of_pipeline(recipe: Recipe, config: Any, task: Task) -> Iterator[str]:
    layout, train = recipe.layout, recipe.train
    if layout.pipeline == 1:
        return
    each = layout.stages if layout.schedule == "interleaved" else 1
    stages, layers = layout.pipeline * each, getattr(config, "layers", None)
    if layers is not None and layers < stages:
        yield (
            f"layout.pipeline: {stages} stages need as many blocks, and model.layers is {layers}; "
            f"pipeline = {layers // each} works"
        )
    for part in ("inputs", "sums"):
        if not hasattr(task, part):
            yield f"layout.pipeline: the task has no '{part}' (see megalith.tasks.Task)"
    micros = train.global_batch // (train.micro_batch * layout.data_ranks)
    if layout.schedule == "interleaved" and micros % layout.pipeline:
        yield (
            f"layout.schedule: interleaved needs micro-batches in multiples of pipeline "
            f"{layout.pipeline}, and there are {micros}; 1f1b works"
        )
