"""The search: every layout that is allowed and no other, the best of them, the largest model."""

from __future__ import annotations

import pytest

from megalith import models, tasks
from megalith.core.errors import PlanError
from megalith.layout import check
from megalith.plan import advice, closed, flops, search
from megalith.plan.machine import parse as machine
from megalith.plan.worker import Pool
from megalith.recipe import Recipe, parse

GPT = {"layers": 8, "width": 512, "heads": 8, "context": 256, "vocab": 8192}


def recipe(**train: object) -> Recipe:
    return parse(
        {
            "model": GPT,
            "data": {"tokenizer": "bpe-8192", "sequence": 256},
            "train": {"global_batch": 32, "precision": "bf16", "micro_batch": 1, **train},
        }
    )


def test_every_layout_that_is_rated_passes_the_rules_and_fills_the_machine() -> None:
    base, on = recipe(), machine("8xH100")
    rated = list(search._rated(base, on))
    assert len({str(fields) for fields, _ in rated}) == len(rated)
    for fields, rough in rated[::7]:
        other = advice.changed(base, fields)
        assert other.layout.ranks == 8
        check.check(other, models.resolve(other.model, {}), tasks.build(other.task))
        assert rough.memory > 0
        assert rough.seconds > 0
    axes = {axis for fields, _ in rated for axis in fields if axis.startswith("layout.")}
    assert {f"layout.{axis}" for axis in ("replicate", "shard", "tensor", "pipeline")} <= axes
    assert {fields["layout.zero"] for fields, _ in rated if "layout.zero" in fields} >= {1, 2, 3}


def test_formulas_go_the_right_way() -> None:
    base, on = (
        parse({"model": {"preset": "llama3-8b"}, "data": {"files": ["x"], "sequence": 8192}}),
        machine("64xH100"),
    )

    def rough(**fields: object) -> closed.Rough:
        named = {name.replace("__", "."): value for name, value in fields.items()}
        named = {"train.global_batch": 128, "train.precision": "bf16", **named}
        return closed.rough(advice.changed(base, named), on)

    zero3 = rough(layout__shard=64, train__micro_batch=1)
    assert rough(layout__replicate=64, train__micro_batch=1).memory > 2 * zero3.memory
    full = rough(layout__shard=64, train__micro_batch=1, train__checkpointing="full")
    assert full.memory < zero3.memory
    assert full.seconds > zero3.seconds
    # Tensor parallelism over nodes is worse than inside of one.
    inside = rough(layout__shard=8, layout__tensor=8, train__micro_batch=1)
    few = machine("64xH100,node=2")
    across = closed.rough(
        advice.changed(
            base,
            {
                "train.global_batch": 128,
                "layout.shard": 8,
                "layout.tensor": 8,
                "train.micro_batch": 1,
                "train.precision": "bf16",
            },
        ),
        few,
    )
    assert across.seconds > inside.seconds


def test_only_decoders_are_searched() -> None:
    digits = parse({"model": {"family": "resnet"}, "data": {"source": "digits"}})
    with pytest.raises(PlanError, match="--search knows decoders"):
        search.search(digits, "8xH100")


def test_a_scaled_model_keeps_its_proportions() -> None:
    config = parse({"model": {"preset": "llama3-8b"}}).model
    double = search.scaled(config, 64)  # type: ignore[arg-type]
    assert (double.width, double.kv_heads, double.head_dim) == (8192, 16, 128)
    assert double.hidden == 2 * 14336
    assert double.layers == 64
    assert flops.parameters(double) > 7 * flops.parameters(config)  # type: ignore[arg-type]


@pytest.mark.slow
def test_the_best_fits_and_no_traced_one_that_fits_is_quicker() -> None:
    found = search.search(recipe(), "4xL4", traced=2, pool=Pool(None))
    assert found.best is not None
    assert found.best.plan is not None
    assert found.best.plan.fits
    assert found.best.plan.machine.count == 4
    traced = [one for one in found.ranked if one.plan is not None and one.plan.fits]
    assert found.best.seconds == min(one.seconds for one in traced)
    assert found.considered > 20


@pytest.mark.slow
def test_the_largest_model_fits_and_one_twice_as_large_would_not() -> None:
    model, found = search.largest(recipe(), "1xL4,memory=4", pool=Pool(None))
    assert found.best is not None
    assert flops.parameters(model) * 16 < 4 * 2**30
    assert flops.parameters(model) * 16 > 1.0 * 2**30


def test_a_refused_value_is_a_row_of_a_sweep() -> None:
    def make(value: str) -> Recipe:
        return recipe(micro_batch=int(value))

    rows = search.sweep(make, ["3"], "1xL4", pool=Pool(None))
    assert "micro_batch" in str(rows[0][1])
