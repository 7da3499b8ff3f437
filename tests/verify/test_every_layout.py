"""All layouts of a number of ranks are found, each once, and those that are refused are not."""

from __future__ import annotations

from itertools import product
from math import prod

import pytest

from megalith.core.errors import RecipeError
from megalith.layout.mesh import AXES
from megalith.recipe import Recipe, parse
from megalith.recipe.schema import LayoutSection
from megalith.verify import layouts
from megalith.verify.problem import problem


def small(**sections: dict[str, object]) -> Recipe:
    return problem(parse(sections), 8, 16).recipe


def sizes(layout: LayoutSection) -> tuple[int, ...]:
    return tuple(getattr(layout, axis) for axis in AXES)


GPT = small()
MOE = small(model={"experts": 8, "mlp_bias": False})
RESNET = small(
    model={"family": "resnet"}, data={"source": "digits"}, task={"name": "classify"}
)  # fmt: skip


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_every_way_to_share_out_the_ranks_is_there(ranks: int) -> None:
    # Found by trying all sizes, not by taking the number of ranks apart.
    numbers = range(1, ranks + 1)
    expected = {
        one
        for one in product(numbers, repeat=len(AXES))
        if 2 <= prod(one) <= ranks and layouts.allows(GPT, _of(one))
    }
    found = layouts.every(GPT, ranks)
    assert {sizes(layout) for layout in found} == expected


def _of(one: tuple[int, ...]) -> LayoutSection:
    return LayoutSection(**dict(zip(AXES, one, strict=True)))  # pyright: ignore


@pytest.mark.parametrize("recipe", [GPT, MOE, RESNET], ids=["gpt", "moe", "resnet"])
def test_each_is_there_once_and_the_smallest_first(recipe: Recipe) -> None:
    found = layouts.every(recipe, 8)
    assert len({layout.model_dump_json() for layout in found}) == len(found)
    names = [layouts.label(layout) for layout in found]
    assert len(set(names)) == len(names)
    counts = [layout.ranks for layout in found]
    assert counts == sorted(counts)
    assert set(counts) <= set(range(2, 9))


def test_every_axis_alone_and_every_pair_is_among_those_of_eight() -> None:
    found = {layouts.spread_axes(layout) for layout in layouts.every(GPT, 8)}
    axes = [axis for axis in AXES if axis != "expert"]
    assert {(axis,) for axis in axes} <= found
    assert {(a, b) for i, a in enumerate(axes) for b in axes[i + 1 :]} <= found
    assert sum(len(spread) == 3 for spread in found) >= 4


def test_a_model_without_experts_has_no_expert_layouts_and_one_with_them_no_tensor_ones() -> None:
    assert not any(layout.expert > 1 for layout in layouts.every(GPT, 8))
    found = layouts.every(MOE, 4)
    assert any(layout.expert == 4 for layout in found)
    assert not any(layout.tensor > 1 or layout.pipeline > 1 for layout in found)


def test_a_resnet_has_data_layouts_only() -> None:
    found = layouts.every(RESNET, 4)
    assert {axis for layout in found for axis in layouts.spread_axes(layout)} == {
        "replicate",
        "shard",
    }
    assert any(layout.synchronised_norms for layout in found)
    assert not any(layout.synchronised_norms for layout in layouts.every(GPT, 4))


@pytest.mark.parametrize(
    ("layout", "field"),
    [
        ({"tensor": 3}, "layout.tensor"),
        ({"context": 5}, "data.sequence"),
        ({"expert": 2}, "layout.expert"),
        ({"replicate": 2, "shard": 2, "engine": "ddp"}, "layout.engine"),
        ({"replicate": 2, "offload": True}, "layout.offload"),
    ],
)
def test_a_refused_layout_is_not_allowed_and_says_why(layout: dict, field: str) -> None:
    section = LayoutSection(**layout)
    assert not layouts.allows(GPT, section)
    with pytest.raises(RecipeError, match=rf"^{field}"):
        layouts.refuse(GPT.model_copy(update={"layout": section}))


def test_every_allowed_layout_has_the_recipes_own_choices() -> None:
    own = GPT.model_copy(update={"layout": LayoutSection(shard=2, zero=2)})
    plain = [layout for layout in layouts.every(own, 2) if layout.shard == 2]
    assert 2 in {layout.zero for layout in plain}


def test_parts_have_fewer_axes_the_fewest_first() -> None:
    parts = layouts.parts(LayoutSection(replicate=2, context=2, tensor=2))
    spread = [layouts.spread_axes(part) for part in parts]
    assert sorted(spread[:3]) == [("context",), ("replicate",), ("tensor",)]
    assert sorted(spread[3:]) == [
        ("context", "tensor"),
        ("replicate", "context"),
        ("replicate", "tensor"),
    ]
    assert layouts.parts(LayoutSection(tensor=4)) == []


def test_labels_are_the_layout_in_words() -> None:
    assert layouts.label(LayoutSection()) == "one process"
    assert layouts.label(LayoutSection(shard=2, tensor=4)) == "shard 2 (zero 3) x tensor 4"
    assert layouts.label(LayoutSection(context=2, exchange="all-to-all")) == (
        "context 2 (all-to-all)"
    )
