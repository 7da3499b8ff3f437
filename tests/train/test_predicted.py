"""A run that was planned says at its end how right the plan was."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import megalith
from megalith.recipe import parse


def recipe(folder: Path) -> megalith.Recipe:
    (folder / "text").mkdir(exist_ok=True)
    for number in range(8):
        (folder / "text" / f"{number}.txt").write_text(f"a line of text, number {number}\n" * 40)
    return parse(
        {
            "model": {"layers": 2, "width": 32, "heads": 2, "context": 32},
            "data": {"files": [str(folder / "text")], "sequence": 32, "validation": 0.3},
            "train": {"steps": 3, "global_batch": 4},
            "run": {"dir": str(folder / "run")},
        }
    )


def said(folder: Path) -> list[str]:
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    return [event["message"] for event in events if event.get("event") == "plan"]


def test_a_planned_run_sets_what_happened_beside_the_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    planned = megalith.plan(recipe(tmp_path))
    megalith.train(recipe(tmp_path))
    (line,) = said(tmp_path)
    assert line.startswith("memory: predicted ")
    assert "an update: predicted " in line
    assert planned.ranks[0].allocated > 0


def test_a_run_that_was_not_planned_traces_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".cache" / "megalith" / "plan").mkdir(parents=True)
    megalith.train(recipe(tmp_path))
    assert said(tmp_path) == []
