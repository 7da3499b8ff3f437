"""What a rank holds falls with the ZeRO stage as the table in ``layout/data.py`` says.

Counted through the storages of live tensors, not resident memory.
"""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import torch

from megalith import step
from megalith.layout import mesh as meshes
from megalith.layout.pieces import local
from megalith.layout.units import units
from megalith.recipe.schema import LayoutSection
from megalith.step import Step
from megalith.verify.problem import Problem
from trials import differences, forked, small

CPU = torch.device("cpu")
RANKS = 2
LAYERS = 8
SLACK = 0.2
"""Of all weights: embeddings, which are no unit, and activations."""
ON_THEIR_WAY = 8
"""Units whose weights and gradients FSDP2 holds whole at once: gathered and copied out, the next
one too, their gradients, and what of them travels."""


def wide() -> Problem:
    """Weights that are much larger than the activations: batches of one sample of 12 tokens."""
    sizes = {"layers": LAYERS, "width": 64, "hidden": 256, "tied": True}
    given = small(4, change=sizes, optim={"name": "adamw"})
    short = [
        [{name: t[:1, :12] if t.ndim == 2 else t[:1] for name, t in batch.items()} for batch in one]
        for one in given.updates
    ]
    return replace(given, updates=short)


def live() -> int:
    """Bytes of all storages that some Python object holds; freed ones have none."""
    gc.collect()
    storages: dict[int, int] = {}
    for one in gc.get_objects():
        if not isinstance(one, torch.Tensor) or one.device.type != "cpu":
            continue
        # Backward leaves gradients that no Python object holds until they are asked for.
        for tensor in (one, one.grad if one.is_leaf else None):
            if tensor is not None:
                storage = local(tensor).untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def peak(given: Problem, section: LayoutSection) -> tuple[float, float]:
    """Most, and lastingly held, bytes of the second update, over those of the whole weights."""
    before = live()
    recipe = given.recipe.model_copy(update={"layout": section})
    built = step.build(recipe, given.facts, CPU, meshes.build(section, CPU))
    highest = 0.0

    def look(*_: Any) -> None:
        nonlocal highest
        highest = max(highest, live() - before)

    hooks: list[Any] = []
    for update in given.updates[:2]:
        built.update(built.backward(update[built.mesh.data_rank :: built.mesh.data_ranks]))
        if not hooks:
            for unit in list(units(built.model).values())[:: LAYERS - 1]:  # first and last
                hooks.append(unit.register_forward_hook(look))
                hooks.append(unit.register_full_backward_hook(look))
    for hook in hooks:
        hook.remove()
    weights = sum(p.numel() * p.element_size() for p in built.model.parameters())
    return highest / weights, (live() - before) / weights


def of_all(given: Problem, layouts: list[dict[str, Any]]) -> list[tuple[float, float]]:
    gc.freeze()  # what was there before is not looked at again
    return [peak(given, LayoutSection(**fields)) for fields in layouts]


def test_peak_and_rest_fall_with_the_stage() -> None:
    layouts: list[dict[str, Any]] = [
        {"replicate": RANKS},
        *({"shard": RANKS, "zero": zero} for zero in (1, 2, 3)),
    ]
    (none, one, two, three) = forked(RANKS, of_all, wide(), layouts)
    part = 1 / RANKS
    # Weights, gradients, and AdamW's two moments; a stage shares out one kind more. (The
    # buckets of replicas, a second copy of the gradients, are filled after the last look.)
    expected = {
        "none": (none, 1 + 1 + 2),
        "1": (one, 1 + part + 1 + 2 * part),
        "2": (two, 1 + part + part + 2 * part),
        "3": (three, part + part + 2 * part),
    }
    for stage, ((most, _), wanted) in expected.items():
        spare = SLACK + (0.0 if stage == "none" else ON_THEIR_WAY / LAYERS)
        assert wanted - SLACK < most < wanted + spare, f"stage {stage}: {most} of the weights"
    assert none[0] > one[0] > two[0] > three[0]
    # Between updates: weights and moments, all shared out, whatever the stage.
    for _, rest in (one, two, three):
        assert rest < 3 * part + SLACK
    assert 3 <= none[1] < 3 + SLACK


def hybrid(given: Problem) -> list[float]:
    found = []
    for fields in ({"shard": 2, "replicate": 2}, {"shard": 4}):
        section = LayoutSection(**fields)
        recipe = given.recipe.model_copy(update={"layout": section})
        built: Step = step.build(recipe, given.facts, CPU, meshes.build(section, CPU))
        held = sum(local(p).numel() for p in built.model.parameters())
        found.append(held / sum(p.numel() for p in built.model.parameters()))
    return found


def test_hybrid_shards_share_out_over_one_axis_only() -> None:
    over_two, over_four = forked(4, hybrid, wide())
    assert abs(over_two - 1 / 2) < 0.01
    assert abs(over_four - 1 / 4) < 0.01


def test_hybrid_and_offloaded_shards_compute_what_one_process_does() -> None:
    layouts: list[dict[str, Any]] = [
        {"shard": 2, "offload": True},
        {"shard": 2, "offload": True, "zero": 1},
        {"replicate": 2, "shard": 2, "zero": 2},
        {"replicate": 2, "shard": 2, "offload": True},
        {"shard": 3},
    ]
    assert differences(small(12, train={"ema": 0.9}), layouts) == {}
