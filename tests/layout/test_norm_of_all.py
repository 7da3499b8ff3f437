"""The norm before clipping is one number everywhere, and so is whether it is finite."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from megalith import step
from megalith.layout import mesh as meshes
from megalith.recipe.schema import LayoutSection
from megalith.step import Step
from megalith.verify.problem import Problem
from trials import forked, one_thread, small
from trials import outcome as computed

CPU = torch.device("cpu")
EVERY: dict[int, list[dict[str, Any]]] = {
    2: [
        {"replicate": 2},
        {"shard": 2},
        {"shard": 2, "zero": 1},
        {"tensor": 2},
        {"tensor": 2, "sequence_parallel": False},
        {"context": 2},
        {"pipeline": 2},
        {"expert": 2},
    ],
    4: [
        {"replicate": 2, "shard": 2},
        {"shard": 2, "tensor": 2},
        {"shard": 2, "expert": 2},
        {"pipeline": 2, "tensor": 2},
        {"pipeline": 2, "replicate": 2},
        {"context": 2, "tensor": 2},
        {"context": 2, "shard": 2},
    ],
}


def given(fields: dict[str, Any]) -> Problem:
    """With experts where they are shared out; tied, so that a pipeline has one weight twice."""
    change: dict[str, Any] = {"tied": True, "heads": 8, "kv_heads": 4}
    if "expert" in fields:
        change |= {"experts": 4, "expert_hidden": 24, "activation": "swiglu", "mlp_bias": False}
    return small(change=change, train={"clip": 0.05}, optim={"weight_decay": 0.0})


def build(fields: dict[str, Any]) -> Step:
    section = LayoutSection(**fields)
    problem = given(fields)
    recipe = problem.recipe.model_copy(update={"layout": section})
    return step.build(recipe, problem.facts, CPU, meshes.build(section, CPU), torch.float64)


def norms(layouts: list[dict[str, Any]]) -> list[list[float]]:
    """By layout, the norm on each rank before clipping, and over all ranks after it."""
    found = []
    for fields in layouts:
        built = build(fields)
        batches = given(fields).updates[0]
        measured = built.backward(batches[built.mesh.data_rank :: built.mesh.data_ranks])
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, float(measured.norm))
        found.append(everyone)
    return found


@pytest.mark.parametrize("ranks", EVERY)
def test_one_norm_on_every_rank_of_every_layout(ranks: int) -> None:
    right: dict[bool, float] = {}
    with one_thread():
        for fields in ({"expert": 1}, {}):
            numbers = computed(given(fields), updates=1).numbers
            right["expert" in fields] = numbers["norm of update 1"]
    assert right[False] > 0.05
    found = forked(ranks, norms, EVERY[ranks])
    for fields, everyone in zip(EVERY[ranks], found, strict=True):
        assert len(set(everyone)) == 1, f"{fields}: ranks disagree: {everyone}"
        assert everyone[0] == pytest.approx(right["expert" in fields], rel=1e-12), fields


def poisoned(layouts: list[dict[str, Any]]) -> list[list[Any]]:
    """The last rank's loss is not a number in one update: what each rank makes of it."""
    found = []
    for fields in layouts:
        built = build(fields)
        mine = slice(built.mesh.data_rank, None, built.mesh.data_ranks)
        updates = given(fields).updates
        before = {n: piece.tensor.clone() for n, piece in built.pieces()["model"].items()}
        real = built.task.loss
        if built.mesh.rank == built.mesh.size - 1:

            def loss(model: Any, batch: Any, real: Any = real) -> Any:
                good = real(model, batch)
                good.total = good.total * float("nan")
                return good

            built.task.loss = loss  # pyright: ignore
        measured = built.backward(updates[0][mine])
        finite = measured.finite()
        built.skip()
        kept = all(
            torch.equal(before[n], p.tensor) for n, p in built.pieces()["model"].items()
        ) and all(p.grad is None for p in built.model.parameters())
        built.task.loss = real  # pyright: ignore
        again = built.backward(updates[1][mine])
        good = again.finite()
        built.update(again)
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(
            everyone, (finite, kept, good, built.done, built.skipped, float(again.norm))
        )
        found.append(everyone)
    return found


@pytest.mark.parametrize("ranks", EVERY)
def test_what_is_not_finite_on_one_rank_is_seen_and_skipped_by_all(ranks: int) -> None:
    for fields, everyone in zip(EVERY[ranks], forked(ranks, poisoned, EVERY[ranks]), strict=True):
        assert len(set(everyone)) == 1, f"{fields}: ranks disagree: {everyone}"
        finite, kept, good, done, skipped, _ = everyone[0]
        assert not finite, f"{fields}: NaN is not seen"
        assert kept, f"{fields}: weights or gradients are left changed"
        assert good, f"{fields}: NaN outlives the update"
        assert (done, skipped) == (2, 1)
