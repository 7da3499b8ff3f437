"""Memory and time of a decoder under a layout by formula: rough, and quick enough for thousands.

It only chooses what is worth a trace, and says nothing to the user by itself.
"""

from __future__ import annotations

from dataclasses import dataclass

from megalith.plan import flops, links
from megalith.plan.extrapolate import micros
from megalith.plan.links import Group
from megalith.plan.machine import Machine
from megalith.recipe import Recipe
from megalith.recipe.families import DecoderConfig

_STATE = {"adamw": 8, "sgd": 4, "muon": 5, "adafactor": 1}
_RESERVED = 1.08
"""What the allocator takes beyond tensors, about."""


@dataclass(frozen=True)
class Rough:
    """Bytes of the fullest rank, and seconds of an update."""

    memory: float
    seconds: float


def rough(recipe: Recipe, machine: Machine) -> Rough:
    """The formulas for a recipe whose model is a resolved decoder."""
    config = recipe.model
    assert isinstance(config, DecoderConfig)
    return Rough(_memory(recipe, config) * _RESERVED + overhead(machine), _time(recipe, machine))


def overhead(machine: Machine) -> int:
    """Bytes of a device that are no tensors: driver, libraries, collective buffers."""
    device = machine.device
    return device.context + (device.collective if machine.count > 1 else 0)


def _tokens(recipe: Recipe) -> float:
    """Tokens of a micro-batch on a rank."""
    return recipe.train.micro_batch * _sequence(recipe) / recipe.layout.context


def _sequence(recipe: Recipe) -> int:
    return getattr(recipe.data, "sequence", 1)


def _half(recipe: Recipe) -> int:
    return 4 if recipe.train.precision == "fp32" else 2


def _weights(recipe: Recipe, config: DecoderConfig) -> tuple[float, float]:
    """Weights of a layer, and of embedding and head, on a rank before ZeRO."""
    layout = recipe.layout
    _, head = flops.matrices(config)
    total = flops.parameters(config)
    ends = head * (1 if config.tied else 2)
    layer = (total - ends) / config.layers / layout.tensor
    if config.experts:
        layer /= layout.expert
    return layer, head / layout.tensor


def _cut(recipe: Recipe) -> int:
    """Ranks that share out a copy."""
    layout = recipe.layout
    return layout.shard * layout.expert * layout.context if layout.shard > 1 else 1


def _activations(recipe: Recipe, config: DecoderConfig, checkpointing: str) -> float:
    """Bytes that a layer keeps of a micro-batch."""
    layout, half, tokens = recipe.layout, _half(recipe), _tokens(recipe)
    apart = layout.tensor if layout.sequence_parallel else 1
    residual = tokens * config.width / apart
    if checkpointing == "full":
        return residual * 4
    heads = (config.heads + 2 * config.kv_heads) * config.head_dim
    inner = tokens * config.hidden / layout.tensor
    if config.experts:
        inner *= config.experts_per_token * config.expert_hidden / config.hidden
    gated = config.activation == "swiglu"
    if checkpointing == "selective":
        outputs = tokens * (heads + config.heads * config.head_dim) / layout.tensor
        return half * (outputs + 2 * residual + inner * (2 if gated else 1)) + 4 * residual
    outputs = tokens * (heads + 2 * config.heads * config.head_dim) / layout.tensor
    return half * (outputs + 3 * residual + inner * (4 if gated else 2)) + 8 * residual


def _memory(recipe: Recipe, config: DecoderConfig) -> float:
    layout, half = recipe.layout, _half(recipe)
    layer, head = _weights(recipe, config)
    layers = -(-config.layers // layout.pipeline)
    owned, cut, many = layers * layer + head, _cut(recipe), micros(recipe)
    state = 0 if layout.offload else _STATE.get(recipe.optim.name, 8)
    found = owned * (4 + 4 + state) / cut
    if cut == 1:
        found += owned * 2 if half == 2 else 0
    elif layout.zero < 3:
        found += owned * half + (owned * 4 if layout.zero == 1 or many > 1 else 0)
    else:
        found += 2 * layer * (half + 4) + head * (half + 4)
    kept = many if layout.schedule == "gpipe" else min(layout.pipeline, many)
    ways = recipe.train.checkpointing
    found += layers * kept * _activations(recipe, config, ways)
    if ways == "full":
        found += _activations(recipe, config, "none")
    vocab = (config.vocab or 0) / layout.tensor
    loss = min(_tokens(recipe) * vocab, 2**27) * (4 + half) + 4 * vocab * config.width
    return found + (loss if layout.pipeline == 1 else 0)


def _time(recipe: Recipe, machine: Machine) -> float:
    config, layout, train = recipe.model, recipe.layout, recipe.train
    assert isinstance(config, DecoderConfig)
    device, half = machine.device, _half(recipe)
    dtype = "float32" if half == 4 else "bfloat16"
    many, layers = micros(recipe), -(-config.layers // layout.pipeline)
    matrices, head = flops.matrices(config)
    tokens = _tokens(recipe)
    again = {"none": 1.0, "selective": 1.02, "full": 4 / 3}[train.checkpointing]
    dense = 6 * tokens * layers * matrices / config.layers / layout.tensor * again
    if layout.pipeline == 1:
        dense += 6 * tokens * head / layout.tensor
    square = 14 * layers * config.heads * config.head_dim / layout.tensor
    square *= tokens * _sequence(recipe) * again
    moved = 6 * layers * _activations(recipe, config, "none") * again
    # Weights are cast, and their gradients widened and added up, for every micro-batch.
    moved += 14 * layers * _weights(recipe, config)[0]
    compute = dense / device.rate("matmul", dtype) + square / device.rate("attention", dtype)
    compute += moved / device.rate("memory", dtype)
    waited = _tensor(recipe, config, machine, layers, again) + _context(
        recipe, config, machine, layers
    )
    each, once = _data(recipe, config, machine, layers)
    passes = max(compute, each) + device.shown * min(compute, each) + device.waited * waited
    stages = layout.stages if layout.schedule == "interleaved" else 1
    bubble = (layout.pipeline - 1) / stages
    # The last stage has the head besides.
    last = 6 * tokens * head / layout.tensor / device.rate("matmul", dtype)
    last = max(0.0, last - compute / max(1, layers)) if layout.pipeline > 1 else 0.0
    owned = (layers * _weights(recipe, config)[0] + head / layout.tensor) / _cut(recipe)
    return (many + bubble) * passes + many * last + once + 28 * owned / device.rate("memory", dtype)


def _near(size: int, stride: int, machine: Machine) -> Group:
    return Group(size, max(1, min(size, machine.node // max(1, stride))))


def _tensor(
    recipe: Recipe, config: DecoderConfig, machine: Machine, layers: int, again: float
) -> float:
    layout = recipe.layout
    if layout.tensor == 1:
        return 0.0
    whole = _tokens(recipe) * config.width * _half(recipe)
    calls = layers * 8 * (1.25 if again > 1.1 else 1.0)
    over = _near(layout.tensor, 1, machine)
    return links.seconds("all_gather", calls, calls * whole, over, machine)


def _context(recipe: Recipe, config: DecoderConfig, machine: Machine, layers: int) -> float:
    layout = recipe.layout
    if layout.context == 1:
        return 0.0
    over = _near(layout.context, layout.tensor, machine)
    heads = config.kv_heads * config.head_dim / layout.tensor
    whole = _tokens(recipe) * layout.context * heads * _half(recipe)
    return links.seconds("all_gather", 4 * layers, 6 * layers * whole, over, machine)


def _data(
    recipe: Recipe, config: DecoderConfig, machine: Machine, layers: int
) -> tuple[float, float]:
    """Traffic of weights and gradients: for each micro-batch, and once."""
    layout, half, many = recipe.layout, _half(recipe), micros(recipe)
    layer, head = _weights(recipe, config)
    owned, cut = layers * layer + head, _cut(recipe)
    each = once = 0.0
    if cut > 1:
        over = _near(cut, layout.tensor, machine)
        gather = links.seconds("all_gather", layers, owned * half, over, machine)
        reduce = links.seconds("reduce_scatter", layers, owned * 4, over, machine)
        if layout.zero == 3:
            each = 2 * gather + reduce
        elif layout.zero == 2:
            each, once = reduce, gather
        else:
            once = gather + reduce
    copies = layout.replicate if cut > 1 else layout.data_ranks * layout.context
    if copies > 1:
        over = _near(copies, layout.tensor * cut, machine)
        once += links.seconds("all_reduce", 8, owned * 4 / cut, over, machine)
    return each, once / (1 if many == 1 else 2)  # about half of it hides behind the last backward
