"""Every field can be explained, and the JSON Schema says what the recipe's types say."""

from __future__ import annotations

import runpy
import tomllib
from pathlib import Path

import jsonschema
import pytest

from megalith.core.errors import RecipeError
from megalith.recipe import dump, load
from megalith.recipe.explain import explain, schema
from megalith.recipe.fields import leaves
from megalith.recipe.schema import Recipe

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*.toml"))
FIELDS = [(path, kind, field) for path, kind, field in leaves()]


@pytest.fixture(scope="module")
def validator() -> jsonschema.Draft202012Validator:
    made = schema()
    jsonschema.Draft202012Validator.check_schema(made)
    return jsonschema.Draft202012Validator(made)


@pytest.mark.parametrize(("path", "kind", "field"), FIELDS, ids=[f"{p}-{k}" for p, k, _ in FIELDS])
def test_every_field_is_described_and_explained(path, kind, field) -> None:
    assert field.description, f"{path} says nothing about itself"
    text = explain(path)
    assert field.description in text
    assert "must be" in text
    assert "default" in text


def test_the_walk_reaches_every_section_and_kind() -> None:
    paths = {path for path, _, _ in FIELDS}
    assert {path.partition(".")[0] for path in paths} == set(Recipe.model_fields)
    assert {"model.stem", "model.window", "data.folder", "model.rope_scaling.factor"} <= paths
    assert "optim.groups.match" in paths


def test_a_field_says_its_type_unit_limits_and_default() -> None:
    assert explain("train.global_batch") == (
        "train.global_batch: samples per update, over all ranks and micro-batches\n"
        "  must be  a whole number > 0\n"
        "  unit     samples\n"
        "  default  32"
    )
    assert "default  global_batch" in explain("train.micro_batch")
    assert "gpt2-small" in explain("model.preset")
    assert "resnet50" in explain("model.preset")


def test_a_section_lists_its_fields() -> None:
    lines = explain("checkpoint").splitlines()
    assert lines[0].startswith("[checkpoint] ")
    assert [line.split()[0] for line in lines[2:]] == ["every", "keep", "asynchronous"]
    assert "[model] resnet: " in explain("model")
    assert "[run]" in explain()


UNKNOWN = {
    "steps": "steps: no such field; did you mean 'train.steps'?",
    "trian.steps": "trian.steps: no such field; did you mean 'train.steps'?",
    "data.workrs": "data.workrs: no such field; did you mean 'data.workers'?",
    "zz": "zz: no such field; `megalith recipe explain` lists the sections",
}


@pytest.mark.parametrize(("path", "line"), UNKNOWN.items())
def test_an_unknown_field_names_the_nearest(path: str, line: str) -> None:
    with pytest.raises(RecipeError) as raised:
        explain(path)
    assert str(raised.value) == line


@pytest.mark.parametrize("path", RECIPES, ids=[path.stem for path in RECIPES])
def test_the_schema_accepts_the_recipes_short_and_resolved(path: Path, validator) -> None:
    validator.validate(tomllib.loads(path.read_text()))
    validator.validate(tomllib.loads(dump(load(path))))


ACCEPTED = [
    {},
    {"model": {"preset": "gpt2-small"}},
    {"model": {"layers": 3}, "train": {"steps": 5}},
    {"model": {"family": "resnet", "preset": "resnet50"}, "data": {"source": "digits"}},
    {"train": {"clip": "none", "ema": "none"}},
    {"model": {"factory": "a.b:c", "args": {"x": [1]}}, "data": {"factory": "a:b"}},
    {"optim": {"schedule": "mine:curve", "groups": [{"match": "*.bias", "lr": 0.1}]}},
]
REFUSED = [
    {"trian": {}},
    {"train": {"stepz": 3}},
    {"train": {"steps": 0}},
    {"train": {"steps": "many"}},
    {"train": {"steps": "none"}},
    {"model": {"stem": "small"}},
    {"model": {"preset": "gpt2-smal"}},
    {"optim": {"schedule": "cosin"}},
    {"optim": {"betas": [0.9]}},
    {"data": {"source": "digits", "tokenizer": "bytes"}},
]


@pytest.mark.parametrize("values", ACCEPTED)
def test_the_schema_accepts_what_the_recipe_accepts(values, validator) -> None:
    Recipe.model_validate(values)
    validator.validate(values)


@pytest.mark.parametrize("values", REFUSED)
def test_the_schema_refuses_what_the_recipe_refuses(values, validator) -> None:
    with pytest.raises(ValueError, match="validation error"):
        Recipe.model_validate(values)
    assert not validator.is_valid(values)


def test_the_written_reference_is_current() -> None:
    made = runpy.run_path(str(ROOT / "docs" / "write_reference.py"))
    assert (ROOT / "docs/recipe.md").read_text() == made["reference"](), "run `make docs`"
    assert (ROOT / "docs/recipe.schema.json").read_text() == made["schema_text"](), "`make docs`"
