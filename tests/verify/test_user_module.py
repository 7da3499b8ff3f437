"""A module of the user's own is proven as it is, on its own data."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import helpers_torchvision
from megalith.core.errors import RecipeError
from megalith.recipe import Recipe, parse
from megalith.recipe.schema import LayoutSection
from megalith.verify import candidates, layouts, verify
from megalith.verify.proof import Proof

SPLIT: dict[str, Any] = {"blocks.*.up": "column", "blocks.*.down": "row"}


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Ranks are forked."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def recipe(layout: dict[str, Any] | None = None, **args: object) -> Recipe:
    return parse(
        {
            "model": {"factory": "user_module:Tiny", "args": args},
            "data": {"factory": "user_module:counting"},
            "task": {"name": "language"},
            "layout": layout or {},
        }
    )


@pytest.fixture(scope="module")
def proof() -> Proof:
    return Proof(recipe())


@pytest.mark.parametrize(
    "layout",
    [
        {"replicate": 2},
        {"replicate": 2, "engine": "ddp"},
        {"shard": 2},
        {"shard": 2, "zero": 1},
        {"tensor": 2, "split": SPLIT},
        {"pipeline": 2},
        {"pipeline": 3, "schedule": "gpipe"},
        {"shard": 2, "tensor": 2, "split": SPLIT},
    ],
    ids=lambda layout: layouts.label(LayoutSection(**layout)),
)
def test_a_module_of_the_users_is_right_under(layout: dict[str, Any], proof: Proof) -> None:
    verdict = proof.of(LayoutSection(**layout))
    assert verdict.right, verdict.lines()
    assert verdict.error < 1e-12


@pytest.mark.parametrize(
    "layout", [{"shard": 2}, {"replicate": 2}], ids=lambda one: next(iter(one))
)
def test_a_parameter_that_nothing_uses_stays_as_it_is(layout: dict[str, Any]) -> None:
    verdict = Proof(recipe(unused=True)).of(LayoutSection(**layout))
    assert verdict.right, verdict.lines()


@pytest.mark.parametrize(
    "sections",
    [
        {
            "model": {"factory": "user_code:vit", "args": {"layers": 1}},
            "data": {"source": "digits"},
            "task": {"name": "classify", "loss": "user_code:focal"},
        },
        {
            "model": {"factory": "user_code:bert", "args": {"layers": 1}},
            "data": {"factory": "user_code:source_text"},
            "task": {"factory": "user_code:FillIn"},
        },
    ],
    ids=["vit", "bert"],
)
def test_the_guides_own_modules_are_right_under_data_layouts(sections: dict[str, Any]) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed (megalith[dev])")
    helpers_torchvision.models()  # transformers imports torchvision where that is installed
    both = [LayoutSection(replicate=2), LayoutSection(shard=2)]
    for verdict in Proof(parse(sections)).of_all(both):
        assert verdict.right, verdict.lines()


def test_every_layout_of_a_users_module_is_tried_and_refused_ones_are_left_out() -> None:
    verdicts = verify(recipe(layers=2), up_to=2)
    assert all(verdict.right for verdict in verdicts)
    tried = {layouts.label(verdict.layout) for verdict in verdicts}
    assert {"replicate 2", "shard 2 (zero 3)", "pipeline 2 (1f1b)"} <= tried
    assert not any("tensor" in name for name in tried)  # no table says how to divide it


def test_with_a_table_tensor_layouts_are_among_them() -> None:
    tried = candidates(recipe({"split": SPLIT}), up_to=2)
    assert LayoutSection(tensor=2, split=SPLIT) in tried


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ({"tensor": 2}, "layout.split"),
        ({"tensor": 2, "split": {"blocks.*.sideways": "column"}}, "layout.split.*sideways"),
        ({"pipeline": 4}, "layout.pipeline"),
        ({"context": 2}, "layout.context"),
        ({"expert": 2}, "layout.expert"),
    ],
    ids=lambda one: "" if isinstance(one, str) else "-".join(one),
)
def test_what_does_not_fit_the_module_is_refused(layout: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=rf"^{message}"):
        verify(recipe(layout))


def test_a_wrong_table_is_seen(proof: Proof) -> None:
    """Only the second of the two matrices is divided: its inputs are whole, not parts."""
    layout = LayoutSection(tensor=2, split={"blocks.*.up": "column"})
    verdict = proof.of(layout)
    assert not verdict.right
    assert verdict.axes == ("tensor",)
