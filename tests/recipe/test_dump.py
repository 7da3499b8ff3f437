"""A recipe written as TOML is read back as the same recipe."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from megalith.recipe import dump, load, parse
from megalith.recipe.presets import presets

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.toml"))
CASES = [
    (),
    ("train.clip=none", "train.ema=0.99", "evaluate.samples=3"),
    ("optim.groups=[{match='*.bias', lr=0.1}, {match='x', weight_decay=0.0}]",),
    ("model.preset=gpt2-small", "model.vocab=none", "model.dropout=0.1"),
    ("model.positions=rope", "model.rope_scaling.kind=yarn", "model.rope_scaling.factor=4"),
    ("model.family=resnet", "model.preset=resnet18", "data.source=digits", "task.name=classify"),
    ("model.factory=a.b:c", "model.args={lr = 1, names = ['x', 'y'], deep = {on = true}}"),
    ("data.factory=a.b:c", "data.args.path='a\"b'", "optim.args.fused=false"),
    ('evaluate.prompt="line\\nline"',),
]


@pytest.mark.parametrize("overrides", CASES)
@pytest.mark.parametrize("comments", [False, True])
def test_reading_what_was_written_gives_an_equal_recipe(overrides, comments) -> None:
    recipe = load(None, *overrides)
    assert parse(tomllib.loads(dump(recipe, comments=comments))) == recipe


@pytest.mark.parametrize("path", RECIPES, ids=[path.stem for path in RECIPES])
def test_each_recipe_of_the_project_round_trips(path: Path) -> None:
    recipe = load(path)
    assert parse(tomllib.loads(dump(recipe))) == recipe


@pytest.mark.parametrize("family", ["decoder", "resnet"])
def test_each_preset_round_trips(family: str) -> None:
    for name in presets(family):
        recipe = load(None, f"model.family={family}", f"model.preset={name}", "data.sequence=8")
        assert parse(tomllib.loads(dump(recipe))) == recipe, name


def test_none_is_written_only_where_leaving_it_out_means_something_else() -> None:
    text = dump(load(None, "train.clip=none"))
    assert 'clip = "none"' in text
    assert "ema" not in text


def test_comments_give_meaning_and_unit_once_per_field() -> None:
    text = dump(load(None), comments=True)
    assert "# longest sequence [tokens]\ncontext = 1024\n" in text
    assert text.count("\n# the rule; 'none' leaves the angles as they are\nkind = ") == 1
