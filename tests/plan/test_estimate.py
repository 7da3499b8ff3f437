"""Plans: what is inferred is what a full trace says, what does not fit is said, nothing is read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megalith.core.errors import PlanError, RecipeError
from megalith.plan import extrapolate
from megalith.plan.estimate import plan, question, traces
from megalith.plan.extrapolate import Point, extend
from megalith.plan.machine import parse as machine
from megalith.plan.samples import facts_and_sample
from megalith.plan.worker import Pool, Seen, key, refused
from megalith.recipe import Recipe, parse

SMALL = {"layers": 2, "width": 64, "heads": 4, "context": 64, "vocab": 512}


def recipe(model: dict | None = None, layout: dict | None = None, **train: object) -> Recipe:
    return parse(
        {
            "model": {**SMALL, **(model or {})},
            "data": {"tokenizer": "bpe-512", "sequence": 64},
            "train": {"global_batch": 16, "precision": "bf16", **train},
            "layout": layout or {},
        }
    )


def test_facts_and_shapes_come_without_a_corpus(tmp_path: Path) -> None:
    text = {"files": [str(tmp_path / "none.txt")], "tokenizer": "bpe-5000", "sequence": 8}
    facts, sample = facts_and_sample(parse({"data": text}))
    assert facts == {"vocab": 5000}
    assert sample["tokens"] == ((8,), "int64")
    assert "documents" not in sample
    apart = parse({"data": {**text, "tokenizer": "bytes", "cross_document_attention": False}})
    facts, sample = facts_and_sample(apart)
    assert facts == {"vocab": 257}
    assert sample["documents"] == sample["positions"] == ((8,), "int64")
    assert not list(tmp_path.iterdir())


def test_a_vocabulary_that_nobody_knows_is_asked_for(tmp_path: Path) -> None:
    data = {"files": ["x"], "tokenizer": str(tmp_path / "gone.json")}
    with pytest.raises(RecipeError, match=r"^model.vocab: .*say it"):
        facts_and_sample(parse({"data": data}))
    assert facts_and_sample(parse({"data": data, "model": {"vocab": 9}}))[0] == {}


def test_shapes_are_those_of_real_samples() -> None:
    from megalith.data.prepare import prepare

    digits = parse({"model": {"family": "resnet"}, "data": {"source": "digits"}})
    facts, sample = facts_and_sample(digits)
    splits = prepare(digits.data, 0)
    assert facts == splits.facts
    real = {n: (tuple(t.shape), str(t.dtype)[6:]) for n, t in splits.train[0].items()}
    assert {name: shape for name, shape in sample.items() if name != "sample"} == real


def line(layers: int, kept: int, micros: int, operator: str = "mm", bend: float = 0.0) -> Seen:
    """What a step would say whose memory and work are exactly bilinear, but for ``bend``."""
    size = 1000.0 + 10 * layers + 5 * kept + 7 * layers * kept + bend
    return Seen(
        memory={"allocated": size, "reserved": 1.5 * size, "reserved_expandable": size},
        kinds={"activations": size},
        candidates={
            f"backward|blocks.*|{operator}|": {"activations": size},
            "update||add|": {"optimizer": 900.0 + 19 * layers * kept},
        },
        most={"activations": size},
        moment={"phase": "backward", "operator": operator, "module": ""},
        largest=[],
        computed={"matmul/forward/bfloat16": [micros * layers, 100.0 * micros * layers, 0.0]},
        sent={"allreduce_/forward/world": [2.0, 8.0 * micros]},
    )


GRID = [Point(n, k, k + 1) for n in (2, 3) for k in (2, 3)] + [Point(4, 4, 5)]


def test_few_layers_and_micro_batches_tell_of_many() -> None:
    found = extend(GRID, [line(p.layers, p.kept, p.micros) for p in GRID], Point(96, 16, 192))
    assert found is not None
    # The update is the peak of a deep model, though it is none of a shallow one.
    assert found.memory["allocated"] == pytest.approx(900 + 19 * 96 * 16)
    assert found.moment == {"phase": "update", "module": "", "operator": "add"}
    assert found.kinds["optimizer"] == pytest.approx(900 + 19 * 96 * 16)
    assert found.computed["matmul/forward/bfloat16"][1] == pytest.approx(100.0 * 96 * 192)
    assert found.sent["allreduce_/forward/world"] == pytest.approx([2.0, 8.0 * 192])


def test_a_point_beside_the_line_is_not_believed() -> None:
    goal = Point(96, 16, 192)
    rows = [line(p.layers, p.kept, p.micros) for p in GRID]
    assert extend(GRID, [*rows[:-1], line(4, 4, 5, bend=10.0)], goal) is None


def test_a_pipelines_stages_are_seen_once_each() -> None:
    even = recipe({"layers": 16}, {"pipeline": 4}, micro_batch=1)
    parts = extrapolate.parts(even, even.model)
    assert [(p.stage, p.ranks) for p in parts] == [(0, 1), (1, 2), (3, 1)]
    assert sum(p.ranks * p.layers for p in parts) == 16
    ends = extrapolate.parts(even, even.model, ends_only=True)
    assert [p.stage for p in ends] == [0, 3]


def test_a_pipeline_holds_nothing_of_the_micro_batches_that_are_done() -> None:
    """What was sent is let go: more micro-batches cost no more than their tokens and losses."""
    on, pool = machine("2xH100"), Pool(None)
    asked = [
        replace(question(recipe(layout={"pipeline": 2}, micro_batch=1, global_batch=n), on), rank=r)
        for r in (0, 1)
        for n in (4, 8)
    ]
    sizes = [one.memory["allocated"] for one in refused(pool.see(asked))]
    hidden = 64 * 64 * 2
    assert 0 < sizes[1] - sizes[0] < (8 - 4) * hidden / 2
    assert 0 < sizes[3] - sizes[2] < (8 - 4) * hidden / 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [{"shard": 4}, {"replicate": 2}, {"tensor": 2}, {"pipeline": 2}, {"pipeline": 8}],
    ids=str,
)
def test_what_is_inferred_is_what_a_full_trace_says(layout: dict) -> None:
    wide = {"layers": 16, "width": 2048, "heads": 16, "context": 1024}
    deep = recipe(wide, layout, micro_batch=1, global_batch=16)
    deep = deep.model_copy(update={"data": deep.data.model_copy(update={"sequence": 1024})})
    pool, on = Pool(None), machine(f"{deep.layout.ranks}xH100")
    asked = question(deep, on)
    few, whole = (
        traces(asked, pool, full=full, ends_only=True, say=print) for full in (False, True)
    )
    assert any(look.points for look in few)
    for inferred, traced in zip(few, whole, strict=True):
        for name, off in (("allocated", 1e-3), ("reserved", 0.07), ("reserved_expandable", 0.03)):
            assert inferred.seen.memory[name] == pytest.approx(traced.seen.memory[name], rel=off)
        for kind in ("computed", "sent"):
            said, saw = getattr(inferred.seen, kind), getattr(traced.seen, kind)
            assert {n: v for n, v in said.items() if v[0] > 0.5}.keys() == saw.keys()
            for name, values in saw.items():
                assert said[name] == pytest.approx(values, rel=1e-3), name


@pytest.mark.parametrize("on", ["1xH100", "this machine"])
@pytest.mark.parametrize(
    ("name", "least", "most"),
    [("adamw", 8, 8.3), ("sgd", 4, 4.2), ("muon", 4, 8), ("adafactor", 0.01, 1)],
)
def test_every_optimizer_is_planned_with_its_state(
    name: str, least: float, most: float, on: str
) -> None:
    """Bytes of state per parameter: two moments, momentum, momentum of matrices, factors."""
    values = recipe(micro_batch=1).model_dump() | {"optim": {"name": name}}
    (rank,) = plan(parse(values), on, pool=Pool(None)).ranks
    assert least <= rank.kinds["optimizer"] / rank.parameters <= most


def test_what_is_offloaded_is_not_on_the_device() -> None:
    pool = Pool(None)
    kept, moved = (
        plan(recipe(layout={"shard": 2, "offload": away}, micro_batch=1), "2xH100", pool=pool)
        for away in (False, True)
    )
    assert kept.ranks[0].kinds["optimizer"] > 0
    assert moved.ranks[0].kinds["optimizer"] == moved.ranks[0].kinds["weights"] == 0


@pytest.mark.parametrize(
    "values",
    [
        {
            "model": {**SMALL, "dropout": 0.1},
            "data": {"tokenizer": "bpe-512", "sequence": 64},
            "layout": {"tensor": 2, "sequence_parallel": False},
        },
        {"model": {"factory": "toys_plan:truncated"}, "data": {"factory": "toy_data:ragged"}},
    ],
    ids=["dropout drawn alike", "weights drawn again while out of bounds"],
)
def test_a_number_that_the_host_reads_does_not_stop_a_plan(values: dict) -> None:
    recipe = parse({**values, "train": {"global_batch": 4}})
    assert plan(recipe, "2xH100", pool=Pool(None)).ranks[0].allocated > 0


def test_experts_are_planned_with_equal_shares_of_the_tokens() -> None:
    sparse = {"experts": 8, "experts_per_token": 2, "mlp_bias": False, "hidden": 128}
    pool = Pool(None)
    alone, apart = (
        plan(recipe(sparse, layout, micro_batch=4), "8xH100", pool=pool)
        for layout in ({}, {"expert": 4})
    )
    per_layer = 8 * 2 * 64 * 128
    assert alone.ranks[0].parameters - apart.ranks[0].parameters == 2 * per_layer * 3 // 4
    assert "expert all_to_all_single" in apart.time.collectives
    assert any("equal share" in note for note in apart.notes)


def test_a_grouped_product_counts_its_operations() -> None:
    """As many as the dense products of the same rows: 2 forward and 4 backward per weight met."""
    dense = {"mlp_bias": False, "hidden": 128, "layers": 1}
    sparse = {**dense, "experts": 2, "experts_per_token": 1, "expert_hidden": 128}
    pool, on = Pool(None), machine("1xH100")
    counted = [
        sum(values[1] for name, values in one.computed.items() if name.startswith("matmul"))
        for one in refused(pool.see([question(recipe(m), on) for m in (dense, sparse)]))
    ]
    tokens, width = 64 * 16, 64
    router, mixing = 6 * width * 2 * tokens, 6 * width * tokens
    assert counted[1] - counted[0] == router + mixing


def test_the_layout_takes_a_part_of_the_machine_or_is_refused() -> None:
    small = recipe(micro_batch=4)
    found = plan(small, "8xH100", pool=Pool(None))
    assert found.machine.count == 1
    assert any("one device of 8" in note for note in found.notes)
    assert found.fits
    assert found.run.device_hours == pytest.approx(found.time.seconds * small.train.steps / 3600)
    with pytest.raises(PlanError, match=r"^layout: needs 16 devices, and 8xH100 has 8"):
        plan(recipe(layout={"shard": 16}), "8xH100", pool=Pool(None))


def test_a_close_call_by_what_is_inferred_is_said() -> None:
    pool, deep = Pool(None), recipe({"layers": 12}, micro_batch=4)
    wide = plan(deep, "1xL4", pool=pool)
    assert wide.ranks[0].traced
    assert not any("close call" in note for note in wide.notes)
    tight = f"1xL4,memory={(wide.needed + 1000) / 2**30}"
    assert any("close call" in note for note in plan(deep, tight, pool=pool).notes)


def test_a_compiled_step_moves_less_and_computes_as_much() -> None:
    pool = Pool(None)
    eager, compiled = (
        plan(recipe({"width": 512}, micro_batch=4, compile=way), "1xH100", pool=pool)
        for way in (False, True)
    )
    assert compiled.time.compute < eager.time.compute
    assert compiled.ranks[0].allocated == eager.ranks[0].allocated
    assert any("train.compile" in note for note in compiled.notes)


def test_what_does_not_fit_is_said_with_what_would() -> None:
    found = plan(recipe(micro_batch=16), "1xL4,memory=0.605", pool=Pool(None))
    assert not found.fits
    assert found.why.startswith("does not fit: a rank needs")
    assert found.changes
    for change in found.changes:
        assert change.needed <= found.limit < found.needed
    plain = found.as_dict()
    assert plain["ranks"][0]["kinds"]["activations"] > 0
    assert sum(plain["ranks"][0]["kinds"].values()) == plain["ranks"][0]["allocated"]
    assert plain["not_modelled"]


def test_a_worker_that_dies_in_torch_is_one_line_and_the_planner_goes_on(tmp_path: Path) -> None:
    values = {
        "model": {"factory": "toys_plan:aborts"},
        "data": {"factory": "toy_data:ragged"},
    }
    found = Pool(None).see([question(parse(values), machine("1xH100"))] * 2)
    for one in found:
        assert isinstance(one, PlanError)
        assert "signal 6" in str(one)
        assert "\n" not in str(one)


def test_traces_are_kept_by_what_decides_them(tmp_path: Path) -> None:
    pool, small = Pool(tmp_path), recipe(micro_batch=2)
    first = plan(small, "1xH100", pool=pool)
    assert pool.traced >= 1
    before = pool.traced
    dearer = plan(small, "1xH100,price=99", pool=pool)
    assert pool.traced == before
    assert dearer.ranks == first.ranks
    other = recipe(micro_batch=2, steps=7)
    on = machine("1xH100")
    assert key(question(other, on)) == key(question(small, on))
    assert key(question(recipe(micro_batch=4), on)) != key(question(small, on))
    assert key(question(small, machine("1xL4"))) != key(question(small, on))
