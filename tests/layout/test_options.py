"""Precision, recomputation, compilation, averages and optimizers in every axis alone.

Each is what one process computes, or refused by name with what works instead.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from megalith import models, tasks
from megalith.core.errors import RecipeError
from megalith.layout import check, compile
from megalith.recipe import Recipe, parse
from megalith.verify.compare import Difference
from trials import alone, differences, one_thread, outcome, small

EVERY_AXIS = alone()
SHARED = {"heads": 8, "kv_heads": 4, "qkv_bias": False}
# A key's bias has no gradient but rounding, and Adam and Adafactor make updates of it.
COARSE = {"bf16": 3e-2, "fp16": 5e-3}
"""Largest relative difference of a gradient whose matmuls are rounded to 8 and 11 bits."""


def beyond_the_gradient(difference: Difference) -> bool:
    """Adam makes large differences of small ones, so weights are not compared in half precision."""
    return difference.kind != "gradient" and "update 1" not in difference.name


@pytest.mark.parametrize("precision", COARSE)
def test_half_precision_in_every_axis(precision: str) -> None:
    """fp16 with its loss scale, which must leave gradients, norm and loss as they are."""
    given = small(change=SHARED, train={"precision": precision})
    wrong = differences(
        given, EVERY_AXIS, COARSE[precision], beyond_the_gradient, dtype=torch.float32, updates=1
    )
    assert wrong == {}


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_recomputation_in_every_axis(mode: str) -> None:
    given = small(change=SHARED, train={"checkpointing": mode})
    assert differences(given, EVERY_AXIS) == {}


def test_the_average_of_the_weights_in_every_axis() -> None:
    given = small(change=SHARED, train={"ema": 0.9, "clip": 0.05})
    assert (
        differences(given, [{"replicate": 2}, {"shard": 2}, {"tensor": 2}, {"pipeline": 2}]) == {}
    )


def test_updates_without_clipping() -> None:
    given = small(change=SHARED, train={"clip": None})
    assert differences(given, [{"shard": 2}, {"tensor": 2}, {"pipeline": 2}]) == {}


def _compiled_ahead(units: dict[str, nn.Module]) -> None:
    for unit in units.values():
        unit.compile(backend="aot_eager")  # no C++ compiler needed, and the same graphs


@pytest.mark.parametrize(
    "layouts",
    [
        [{"replicate": 2}, {"shard": 2}],
        pytest.param(alone("replicate", "shard"), marks=pytest.mark.slow),
    ],
    ids=["", "all"],
)
def test_compilation_with_replicate_and_shard(
    layouts: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile, "apply", _compiled_ahead)
    before = compile.graphs_compiled()
    given = small(change=SHARED, train={"compile": True})
    assert differences(given, layouts, updates=1) == {}
    assert compile.graphs_compiled() > before


LOSSES: dict[str, dict[str, Any]] = {
    "label smoothing and z-loss": {"label_smoothing": 0.1, "z_loss": 1e-2},
    "a loss of the user's": {"loss": "trials:squared"},
}


@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_in_every_axis(loss: str) -> None:
    assert differences(small(change=SHARED, task=LOSSES[loss]), EVERY_AXIS) == {}


def test_a_regularizer_where_weights_are_whole() -> None:
    given = small(change=SHARED, task={"regularizer": "trials:l2"})
    plain = small(change=SHARED)
    assert differences(given, alone("replicate", "context")) == {}
    with one_thread():
        with_it, without = outcome(given, updates=1), outcome(plain, updates=1)
    assert with_it.numbers["norm of update 1"] != without.numbers["norm of update 1"]


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw, amsgrad": {"name": "adamw", "args": {"amsgrad": True}},
    "adamw": {"name": "adamw", "weight_decay": 0.1},
    "sgd": {"name": "sgd", "lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    "adafactor": {"name": "adafactor", "lr": 1e-2},
    "muon": {"name": "muon", "lr": 1e-2},
}
WHOLE = alone("replicate", "context", "pipeline")
"""Axes under which a rank has whole matrices."""


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_in_every_axis_that_is_not_refused(name: str) -> None:
    """Muon orthogonalises in bfloat16 (torch's does): a last bit more or less is 1e-2 there."""
    groups = [{"match": "*.mlp.*", "lr": 0.02, "weight_decay": 0.2}]
    section = {**OPTIMIZERS[name], "schedule": "constant", "groups": groups}
    given = small(change=SHARED, optim=section)
    layouts = WHOLE if name in ("muon", "adafactor") else EVERY_AXIS
    tolerance = 2e-2 if name == "muon" else 1e-11
    assert differences(given, layouts, tolerance) == {}


def checked(values: dict[str, Any]) -> None:
    recipe: Recipe = parse({"data": {"source": "stdlib", "sequence": 48}, **values})
    config = models.resolve(recipe.model, {"vocab": 97, "channels": 3, "classes": 10})
    check.check(recipe, config, tasks.build(recipe.task))


RESNET = {"model": {"family": "resnet"}, "data": {"source": "digits"}, "task": {"name": "classify"}}
EXPERTS = {"experts": 4, "width": 64, "heads": 8, "activation": "swiglu", "mlp_bias": False}
REFUSED: list[tuple[dict[str, Any], str]] = [
    *(
        (
            {"optim": {"name": name}, "layout": {axis: 2}},
            rf"optim\.name: {name} needs whole matrices, which layout\.{axis} divides; adamw",
        )
        for name in ("muon", "adafactor")
        for axis in ("shard", "tensor")
    ),
    (
        {"optim": {"factory": "toy_optimizer:Sign"}, "layout": {"tensor": 2}},
        r"optim\.factory: may need whole matrices, which layout\.tensor divides; shard works",
    ),
    *(
        ({"train": {"compile": True}, "layout": {axis: 2}}, r"train\.compile: works with replicate")
        for axis in ("tensor", "context", "pipeline")
    ),
    (
        {"train": {"compile": True}, "model": EXPERTS, "layout": {"expert": 2}},
        r"train\.compile: works with replicate and shard",
    ),
    (
        {**RESNET, "train": {"compile": True}, "layout": {"shard": 2, "synchronised_norms": True}},
        r"train\.compile: .* without layout\.synchronised_norms",
    ),
    *(
        (
            {"task": {"regularizer": "trials:l2"}, "layout": {axis: 2}},
            rf"task\.regularizer: needs whole weights, which layout\.{axis} divides; replicate and",
        )
        for axis in ("shard", "tensor", "pipeline")
    ),
    *(
        ({**RESNET, "layout": {axis: 2}}, rf"layout\.{axis}: does not divide a resnet; replicate")
        for axis in ("tensor", "context", "pipeline", "expert")
    ),
    ({"layout": {"tensor": 4}}, r"layout\.tensor: 4 does not divide model\.heads 6; 3 works"),
    (
        {"model": {"heads": 6, "kv_heads": 2}, "layout": {"tensor": 3}},
        r"layout\.tensor: 3 does not divide model\.kv_heads 2; 2 works",
    ),
    ({"layout": {"context": 5}}, r"data\.sequence: 48 is not a multiple of 10, which layout\.con"),
    (
        {"layout": {"context": 4, "exchange": "all-to-all"}},
        r'layout\.exchange: 4 ranks do not divide model\.kv_heads 6; "gather" works',
    ),
    (
        {"data": {"source": "stdlib", "sequence": 45}, "layout": {"tensor": 2}},
        r"data\.sequence: 45 tokens .* layout\.tensor 2; layout\.sequence_parallel = false works",
    ),
    (
        {"layout": {"split": {"a.*": "row"}, "tensor": 2}},
        r"layout\.split: is for a module of yours",
    ),
    ({"layout": {"cuts": ["blocks.1"]}}, r"layout\.cuts: go with layout\.pipeline > 1"),
    ({"layout": {"offload": True}}, r"layout\.offload: goes with layout\.shard > 1"),
    (
        {"layout": {"engine": "ddp", "shard": 2}},
        r'layout\.engine: "ddp" works with replicate alone',
    ),
    (
        {"layout": {"expert": 2}},
        r"layout\.expert: the model has no experts .*; replicate and shard",
    ),
    (
        {"model": EXPERTS, "layout": {"expert": 8}},
        r"layout\.expert: 8 does not divide model\.experts 4",
    ),
    *(
        (
            {"model": EXPERTS, "layout": {axis: 2}},
            rf"layout\.{axis}: does not go with model\.experts; expert and shard work",
        )
        for axis in ("tensor", "pipeline")
    ),
    (
        {"model": EXPERTS, "layout": {"replicate": 2, "engine": "ddp"}},
        r'layout\.engine: "ddp" does not go with model\.experts; "own" works',
    ),
    (
        {"model": {**EXPERTS, "capacity": 1.0}, "layout": {"context": 2}},
        r"model\.capacity: is counted over whole sequences, .* layout\.context .*; none .* works",
    ),
    (
        {
            "train": {"global_batch": 6, "micro_batch": 2},
            "layout": {"pipeline": 2, "schedule": "interleaved"},
        },
        r"layout\.schedule: interleaved needs micro-batches in multiples of .* 2, .* 3; 1f1b works",
    ),
    (
        {"model": {"layers": 3}, "layout": {"pipeline": 4}},
        r"layout\.pipeline: 4 stages need as many blocks, and model\.layers is 3; .* = 3 works",
    ),
    (
        {
            "model": {
                "positions": "rope",
                "rope_scaling": {"kind": "dynamic", "factor": 2.0},
            },
            "layout": {"context": 2},
        },
        r"layout\.context: dynamic rotary scaling looks at the longest position; yarn works",
    ),
    (
        {"layout": {"replicate": 2, "synchronised_norms": True}},
        r"layout\.synchronised_norms: a decoder has no batch norms; leave it out",
    ),
]


@pytest.mark.parametrize(("values", "message"), REFUSED)
def test_what_no_test_covers_is_refused_with_what_works(
    values: dict[str, Any], message: str
) -> None:
    with pytest.raises(RecipeError, match=message):
        checked(values)
