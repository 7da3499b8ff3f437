"""Dropout under layouts (contract 4): one process's masks where a rank does the same work."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from megalith import step
from megalith.layout import mesh as meshes
from megalith.recipe.schema import LayoutSection
from megalith.verify.problem import Problem
from trials import differences, forked, outcome, small

CPU = torch.device("cpu")
SAMPLES, SEQUENCE = 2, 48


def dropping(**train: Any) -> Problem:
    return small(change={"dropout": 0.25, "attention": "reference"}, train=train)


def test_ranks_with_their_own_samples_draw_the_masks_of_one_process() -> None:
    layouts: list[dict[str, Any]] = [
        {"replicate": 2},
        {"replicate": 2, "engine": "ddp"},
        {"shard": 2},
        {"shard": 2, "zero": 1},
        {"replicate": 2, "shard": 2},
    ]
    assert differences(dropping(), layouts) == {}
    assert differences(dropping(checkpointing="full"), [{"shard": 2}]) == {}


@contextmanager
def recorded() -> Iterator[list[Tensor]]:
    """Every mask that is drawn inside: of activations [batch, sequence, width] or of scores."""
    real = F.dropout
    masks: list[Tensor] = []

    def dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or not p:
            return x
        mask = real(torch.ones_like(x), p)
        masks.append(mask.detach().bool())
        return x * mask

    F.dropout = dropout  # pyright: ignore
    try:
        yield masks
    finally:
        F.dropout = real  # pyright: ignore


def draw(given: Problem, section: LayoutSection) -> list[list[list[Tensor]]]:
    """By rank, the masks of each of two updates with two equal-sized micro-batches each."""
    mesh = meshes.build(section, CPU)
    recipe = given.recipe.model_copy(update={"layout": section})
    built = step.build(recipe, given.facts, CPU, mesh)
    batch = {
        "tokens": torch.zeros(SAMPLES, SEQUENCE, dtype=torch.int64),
        "targets": torch.ones(SAMPLES, SEQUENCE, dtype=torch.int64),
        "bytes": torch.zeros(SAMPLES, dtype=torch.int64),
        "sample": torch.arange(SAMPLES),
    }
    updates = []
    for _ in range(2):
        with recorded() as masks:
            built.update(built.backward([batch, batch]))
        updates.append(masks)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, updates)
    return everyone


def residual(masks: list[Tensor]) -> list[Tensor]:
    return [mask for mask in masks if mask.ndim == 3]


def scores(masks: list[Tensor]) -> list[Tensor]:
    return [mask for mask in masks if mask.ndim == 5]


def agree(one: list[Tensor], other: list[Tensor]) -> bool:
    assert len(one) == len(other) > 0
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def differ(one: list[Tensor], other: list[Tensor]) -> bool:
    """All of them; masks of thousands of numbers are never equal by chance."""
    assert len(one) == len(other) > 0
    return not any(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def halves(masks: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Of the first and the second micro-batch."""
    return masks[: len(masks) // 2], masks[len(masks) // 2 :]


def on_two(given: Problem) -> None:
    def drawn(**fields: Any) -> tuple[list[list[Tensor]], list[list[Tensor]]]:
        first, second = draw(given, LayoutSection(**fields))
        for rank in (first, second):
            assert differ(residual(rank[0]), residual(rank[1])), f"{fields}: updates are alike"
            assert differ(*halves(residual(rank[0]))), f"{fields}: micro-batches are alike"
            assert differ(*halves(scores(rank[0]))), f"{fields}: micro-batches are alike"
        return first, second

    one, two = drawn(tensor=2, sequence_parallel=False)
    assert residual(one[0])[0].shape == (SAMPLES, SEQUENCE, 64), "activations are whole"
    assert agree(residual(one[0]), residual(two[0])), "what is whole on all ranks is dropped alike"
    assert differ(scores(one[0]), scores(two[0])), "each rank has heads of its own"

    one, two = drawn(tensor=2)
    assert residual(one[0])[0].shape == (SAMPLES, SEQUENCE // 2, 64), "a part of the sequence each"
    assert differ(residual(one[0]), residual(two[0]))
    assert differ(scores(one[0]), scores(two[0]))

    for fields in ({"replicate": 2}, {"shard": 2}, {"context": 2}):
        one, two = drawn(**fields)
        assert differ(residual(one[0]), residual(two[0])), f"{fields}: ranks are alike"
        assert differ(scores(one[0]), scores(two[0])), f"{fields}: ranks are alike"

    one, two = drawn(pipeline=2)
    first, second = (scores(rank[0]) for rank in (one, two))  # a block each, in the same place
    assert differ(first, second), "stages are alike"


def on_four(given: Problem) -> None:
    ranks = draw(given, LayoutSection(replicate=2, tensor=2, sequence_parallel=False))
    for group in (ranks[:2], ranks[2:]):
        assert agree(residual(group[0][0]), residual(group[1][0]))
    for one, two in ((0, 2), (1, 3)):
        assert differ(residual(ranks[one][0]), residual(ranks[two][0]))
        assert differ(scores(ranks[one][0]), scores(ranks[two][0]))


def test_masks_agree_on_what_is_whole_and_differ_on_what_is_divided() -> None:
    forked(2, on_two, dropping())
    forked(4, on_four, dropping())


def replayed(layouts: list[dict[str, Any]]) -> list[str]:
    """Layouts whose gradients depend, to the bit, on what is recomputed."""
    wrong = []
    for fields in layouts:
        found = [
            outcome(dropping(checkpointing=mode), LayoutSection(**fields), updates=1)
            for mode in ("none", "selective", "full")
        ]
        kept, *others = [one.tensors["gradient"] for one in found]
        for mode, other in zip(("selective", "full"), others, strict=True):
            assert kept.keys() == other.keys()
            wrong += [
                f"{fields} {mode} {name}"
                for name in kept
                if not torch.equal(kept[name], other[name])
            ]
    return wrong


@pytest.mark.parametrize("axis", ["tensor", "shard", "context", "pipeline"])
def test_recomputation_replays_the_masks(axis: str) -> None:
    layouts: list[dict[str, Any]] = [{axis: 2}]
    if axis == "tensor":
        layouts.append({"tensor": 2, "sequence_parallel": False})
    assert forked(2, replayed, layouts) == []
