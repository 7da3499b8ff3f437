"""A wrong recipe is refused in one line: the field's path, what it must be, what is nearest."""

from __future__ import annotations

import pytest

from megalith.core.errors import RecipeError
from megalith.recipe import load, parse

SCHEDULES = "'constant', 'linear', 'cosine', 'wsd' or 'package.module:name'"
SOURCES = "'stdlib', 'files', 'digits', 'fashion-mnist', 'idx' or 'factory'"

WRONG = {
    # names
    "trian.steps=3": "trian: no such section; did you mean 'train'?",
    "train.stepz=3": "train.stepz: no such field; did you mean 'steps'?",
    "train.lr=3": "train.lr: no such field; did you mean 'optim.lr'?",
    "train.name=x": "train.name: no such field; did you mean 'task.name' or 'optim.name'?",
    "steps=3": "steps: no such section; did you mean 'train.steps'?",
    "zzz=1": "zzz: no such section; `megalith recipe explain` lists them",
    "train.zzz=1": "train.zzz: no such field; `megalith recipe explain train` lists them",
    "model.rope_scaling.kindd=3": "model.rope_scaling.kindd: no such field; did you mean 'kind'?",
    "model.stem=small": "model.stem: no such field for decoder model; it belongs to resnet",
    "data.folder=x": "data.folder: no such field for text data; it belongs to images",
    "optim.groups=[{macth='a'}]": "optim.groups[0].macth: no such field; did you mean 'match'?",
    # types and limits
    "train.steps=abc": "train.steps: must be a whole number > 0, not 'abc'",
    "train.steps=none": "train.steps: must be a whole number > 0, not none",
    "train.steps=true": "train.steps: must be a number, not true",
    "train.steps.x=3": "train.steps: must be a whole number > 0, not a section",
    "train=3": "train: must be a section, not 3",
    "model=none": "model: must be a section, not none",
    "model.heads=-2": "model.heads: must be a whole number > 0, not -2",
    "model.dropout=1": "model.dropout: must be a number >= 0 and < 1, not 1",
    "optim.lr=inf": "optim.lr: must be a number > 0, not inf",
    "optim.betas=[0.9]": "optim.betas: must be a list of 2 numbers >= 0 and < 1, not [0.9]",
    "optim.betas=[0.9, 1.5]": "optim.betas[1]: must be a number >= 0 and < 1, not 1.5",
    "optim.groups=[{match='a', lr=-1}]": (
        "optim.groups[0].lr: must be a number >= 0 or none, not -1"
    ),
    "data.files=x": "data.files: must be a list of text, not 'x'; did you mean [\"x\"]?",
    "data.files=[1]": "data.files[0]: must be text, not 1",
    "train.compile=maybe": "train.compile: must be true or false, not 'maybe'",
    # choices
    "optim.schedule=cosin": f"optim.schedule: must be {SCHEDULES}; did you mean 'cosine'?",
    "optim.schedule=3": f"optim.schedule: must be {SCHEDULES}, not 3",
    "train.precision=fp8": (
        "train.precision: must be 'fp32', 'bf16' or 'fp16'; did you mean 'fp32'?"
    ),
    "model.family=resnetx": (
        "model.family: must be 'decoder', 'resnet' or 'factory'; did you mean 'resnet'?"
    ),
    "model.family=3": "model.family: must be 'decoder', 'resnet' or 'factory'",
    "data.source=foo": f"data.source: must be {SOURCES}",
    "data.source=digit": f"data.source: must be {SOURCES}; did you mean 'digits'?",
    "model.preset=gpt2-smal": (
        "model.preset: 'gpt2-smal' is none of decoder's presets; did you mean 'gpt2-small'?"
    ),
    "model.factory=a.b": "model.factory: must be 'package.module:name', not 'a.b'",
    "task.loss=a.b": "task.loss: must be 'package.module:name' or none, not 'a.b'",
    # what is missing
    "data.source=factory": "data.factory: is missing; it must be 'package.module:name'",
    "data.source=idx": 'data.folder: is needed with source = "idx"',
    "data.source=files": 'data.files: source = "files" needs at least one file, folder or glob',
    # fields that do not fit each other
    "model.heads=5": "model.heads: 5 heads do not divide width 384",
    "model.kv_heads=4": "model.kv_heads: 4 key/value heads do not divide 6 heads",
    "train.micro_batch=64": "train.micro_batch: 64 is larger than global_batch 32",
    "train.micro_batch=5": "train.micro_batch: 5 does not divide global_batch 32",
    "data.sequence=4096": "data.sequence: 4096 is longer than model.context 1024",
    "optim.warmup=1000": "optim.warmup: 1000 updates leave nothing of train.steps 1000",
    # how an override is written
    "steps": "'steps': an override has the form section.field=value",
    "=3": "'=3': an override has the form section.field=value",
    "train..steps=3": "'train..steps=3': an override has the form section.field=value",
}


@pytest.mark.parametrize(("override", "line"), WRONG.items(), ids=WRONG)
def test_a_wrong_override_gives_exactly_this_line(override: str, line: str) -> None:
    with pytest.raises(RecipeError) as raised:
        load(None, override)
    assert str(raised.value) == line


SEVERAL = [
    (
        ("model.family=resnet", "data.source=digits", "model.blockz=3"),
        "model.blockz: no such field; did you mean 'block'?",
    ),
    (
        ("model.family=resnet", "model.blocks=[]"),
        "model.blocks: every stage needs at least one block, not []",
    ),
    (
        ("train.stepz=3", "optim.lr=x"),
        "train.stepz: no such field; did you mean 'steps'? (and 1 more)",
    ),
    (
        ("train.steps=3", "train.steps.x=3"),
        "train.steps.x: 'train.steps' is a value, not a section",
    ),
    (
        ("model.factory=a:b", "model.args.x=none"),
        "model.args.x: none cannot be written in a recipe; leave it out",
    ),
]


@pytest.mark.parametrize(("overrides", "line"), SEVERAL)
def test_overrides_that_are_wrong_together(overrides: tuple[str, ...], line: str) -> None:
    with pytest.raises(RecipeError) as raised:
        load(None, *overrides)
    assert str(raised.value) == line


def test_a_name_with_a_line_break_still_gives_one_line() -> None:
    for values in ({"tra\nin": {}}, {"train": {"a\nb": 1}}, {"train": {"device": ["a\nb"]}}):
        with pytest.raises(RecipeError) as raised:
            parse(values)
        assert "\n" not in str(raised.value)


FILES = [
    (b"[train]\nsteps = = 3\n", "not TOML: Invalid value (at line 2, column 9)"),
    (b"\xff\xfe", "is not a text file in UTF-8"),
]


@pytest.mark.parametrize(("content", "line"), FILES)
def test_a_file_that_is_no_recipe(tmp_path, content: bytes, line: str) -> None:
    path = tmp_path / "r.toml"
    path.write_bytes(content)
    with pytest.raises(RecipeError) as raised:
        load(path)
    assert str(raised.value) == f"{path}: {line}"


def test_a_missing_file_names_the_nearest(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.toml").write_text("")
    with pytest.raises(RecipeError, match=r"^smal.toml: no such recipe; did you mean 'small.toml'"):
        load("smal.toml")
    with pytest.raises(RecipeError, match="the recipe's file comes before any override"):
        load("train.steps=3")
    with pytest.raises(RecipeError, match="cannot read the recipe"):
        load(tmp_path)


def test_overrides_are_read_as_toml_and_quotes_may_be_left_out() -> None:
    recipe = load(
        None,
        "train.steps=1e3",
        "optim.betas=[0.8, 0.9]",
        "run.dir=runs/a b",
        'evaluate.prompt="def "',
        "train.clip=none",
        "model.factory=a.b:c",
        "model.args.sizes={a = [1, 2]}",
    )
    assert recipe.train.steps == 1000
    assert recipe.optim.betas == (0.8, 0.9)
    assert recipe.run.dir == "runs/a b"
    assert recipe.evaluate.prompt == "def "
    assert recipe.train.clip is None
    assert recipe.model.args == {"sizes": {"a": [1, 2]}}  # type: ignore[union-attr]


def test_an_override_wins_over_the_file(tmp_path) -> None:
    path = tmp_path / "r.toml"
    path.write_text("[train]\nsteps = 5\nglobal_batch = 8\n")
    recipe = load(path, "train.steps=7")
    assert (recipe.train.steps, recipe.train.global_batch, recipe.train.micro_batch) == (7, 8, 8)
