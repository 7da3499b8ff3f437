"""``megalith verify`` as a user meets it: a line for each layout, JSON, and exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import megalith
from megalith import cli
from megalith.layout import collectives
from planted import replace

TEXT = """
[model]
factory = "user_module:Tiny"

[data]
factory = "user_module:counting"

[task]
name = "language"
"""


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    file = tmp_path / "tiny.toml"
    file.write_text(TEXT)
    return str(file)


def run(*words: str) -> Any:
    return CliRunner().invoke(cli.app, ["verify", *words])


def test_a_right_layout_is_a_green_line_in_float64_and_in_the_recipes_precision(
    recipe: str,
) -> None:
    done = run(recipe, "layout.replicate=2")
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines[:2]] == ["equal", "equal"]
    assert "float64" in lines[0]
    assert "fp32" in lines[1]
    assert lines[2].startswith("2 of 2 equal to one process; largest relative difference")


def test_all_layouts_as_json(recipe: str) -> None:
    done = run(recipe, "--all", "2", "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert {one["layout"] for one in found} >= {"replicate 2", "shard 2 (zero 3)"}
    for one in found:
        assert one["equal"]
        assert one["ranks"] == 2
        assert 0 <= one["error"] < 1e-11
        assert one["differences"] == []


def test_what_differs_is_said_with_its_axis_and_ends_with_one(
    recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace(monkeypatch, collectives, "copy", lambda right, x, group: x)
    split = 'layout.split={"blocks.*.up" = "column", "blocks.*.down" = "row"}'
    done = run(recipe, "layout.tensor=2", split)
    assert done.exit_code == 1
    lines = done.stdout.splitlines()
    assert lines[0].startswith("DIFFERS")
    assert lines[1].strip() == "brought in by tensor"
    assert any("gradient of 'blocks.0.norm.weight'" in line for line in lines)
    plain = run(recipe, "layout.tensor=2", split, "--json")
    assert plain.exit_code == 1
    first = json.loads(plain.stdout)[0]
    assert not first["equal"]
    assert first["axes"] == ["tensor"]
    assert {d["kind"] for d in first["differences"]} >= {"gradient", "parameter"}


@pytest.mark.parametrize(
    ("override", "field"),
    [
        ("layout.replicate=1", "layout:"),
        ("layout.context=2", "layout.context:"),
        ("layout.pipeline=9", "layout.pipeline:"),
        ("layout.tensor=2", "layout.split:"),
        ("layout.nonsense=2", "layout.nonsense:"),
    ],
)
def test_a_layout_that_is_refused_is_one_line_and_two(
    recipe: str, override: str, field: str
) -> None:
    done = run(recipe, override)
    assert done.exit_code == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith(f"error: {field}")


def test_a_family_of_ours_is_refused_by_its_own_sizes_not_by_those_of_the_small_model() -> None:
    file = Path(__file__).parents[2] / "recipes" / "gpt-stdlib.toml"
    done = run(str(file), "layout.tensor=8")
    assert done.exit_code == 2
    assert done.stderr.splitlines() == [
        "error: layout.tensor: 8 does not divide model.heads 4; 4 works"
    ]


def test_from_python_each_verdict_is_reported_as_soon_as_it_is_there(recipe: str) -> None:
    reported: list[object] = []
    found = megalith.verify(megalith.load(recipe, "layout.shard=2"), report=reported.append)
    assert reported == found
    assert all(verdict.right for verdict in found)
