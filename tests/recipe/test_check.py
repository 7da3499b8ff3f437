"""What the types cannot know is refused before any work: names, places, devices, combinations."""

from __future__ import annotations

from pathlib import Path

import pytest

from megalith.core import devices
from megalith.core.errors import RecipeError
from megalith.recipe import load
from megalith.recipe.check import check

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _folder_with_modules(tmp_path, monkeypatch) -> None:
    (tmp_path / "mine_works.py").write_text("limit = 3\ndef curve(update, steps): return 1.0\n")
    (tmp_path / "mine_raises.py").write_text("raise ValueError('two\\nlines')\n")
    (tmp_path / "mine_syntax.py").write_text("def (\n")
    monkeypatch.chdir(tmp_path)


WRONG = {
    ("optim.schedule=mine_works:curv",): (
        "optim.schedule: 'mine_works' has no 'curv'; did you mean 'curve'?"
    ),
    ("optim.schedule=mine_works:limit",): (
        "optim.schedule: 'mine_works:limit' is neither a function nor a class"
    ),
    ("task.loss=mine_nowhere:f",): (
        "task.loss: cannot import 'mine_nowhere' (no module 'mine_nowhere' here or installed)"
    ),
    ("model.attention=mine_raises:A",): (
        "model.attention: importing 'mine_raises' failed (ValueError: two lines)"
    ),
    ("optim.factory=mine_syntax:f",): (
        "optim.factory: importing 'mine_syntax' failed "
        "(SyntaxError: invalid syntax (mine_syntax.py, line 1))"
    ),
    ("model.path=weights",): "model.path: 'weights' does not exist",
    ("data.source=digits",): (
        "task.name: 'language' needs text, not data.source 'digits'; "
        "the task for images is 'classify'"
    ),
    ("task.name=classify",): (
        "task.name: 'classify' needs images, not data.source 'stdlib'; "
        "the task for text is 'language'"
    ),
    ("data.source=digits", "task.name=classify"): (
        "model.family: 'decoder' reads text, not data.source 'digits'; "
        "the family for images is 'resnet'"
    ),
    ("model.family=resnet",): (
        "model.family: 'resnet' reads images, not data.source 'stdlib'; "
        "the family for text is 'decoder'"
    ),
}


@pytest.mark.parametrize(("overrides", "line"), WRONG.items(), ids=[" ".join(o) for o in WRONG])
def test_it_is_refused_in_exactly_this_line(overrides: tuple[str, ...], line: str) -> None:
    recipe = load(None, *overrides)
    with pytest.raises(RecipeError) as raised:
        check(recipe)
    assert str(raised.value) == line


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").glob("*.toml")), ids=lambda p: p.stem)
def test_the_recipes_of_the_project_pass(path: Path, monkeypatch) -> None:
    monkeypatch.chdir(ROOT)
    recipe = load(path)
    check(recipe)
    assert recipe.run.dir == f"runs/{path.stem}"


def test_names_of_the_users_own_that_resolve_pass() -> None:
    recipe = load(None, "optim.schedule=mine_works:curve", "model.factory=mine_works:curve")
    check(recipe)
    assert recipe.optim.schedule == "mine_works:curve"


def test_a_device_that_is_not_here_is_refused() -> None:
    with pytest.raises(
        RecipeError, match=r"^train\.device: 'tpux' is no device type, which offers"
    ):
        check(load(None, "train.device=tpux"))


def test_a_precision_that_the_device_lacks_is_refused(monkeypatch) -> None:
    monkeypatch.setattr(devices, "supports", lambda device, precision: precision == "fp32")
    with pytest.raises(RecipeError) as raised:
        check(load(None, "train.precision=fp16", "train.device=cpu"))
    assert str(raised.value) == "train.precision: 'fp16' does not run on cpu; fp32 does"


def test_none_on_the_command_line_is_a_choice_where_the_field_has_it() -> None:
    recipe = load(
        ROOT / "recipes" / "gpt-stdlib.toml",
        "train.checkpointing=none",
        "train.clip=none",
        "evaluate.prompt=none",
    )
    assert recipe.train.checkpointing == "none"
    assert recipe.train.clip is None
    assert recipe.evaluate.prompt is None
