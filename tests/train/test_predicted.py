"""A run that was planned says at its end how right the plan was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import megalith
from megalith.recipe import parse


def recipe(folder: Path, **layout: int) -> megalith.Recipe:
    (folder / "text").mkdir(exist_ok=True)
    for number in range(8):
        (folder / "text" / f"{number}.txt").write_text(f"a line of text, number {number}\n" * 40)
    return parse(
        {
            "model": {"layers": 2, "width": 32, "heads": 2, "context": 32},
            "data": {"files": [str(folder / "text")], "sequence": 32, "validation": 0.3},
            "train": {"steps": 3, "global_batch": 4},
            "run": {"dir": str(folder / "run"), "log_every": 1},
            "layout": layout,
        }
    )


def said(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    return [event for event in events if event.get("event") == "plan"]


def test_a_planned_run_sets_what_happened_beside_the_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    planned = megalith.plan(recipe(tmp_path))
    megalith.train(recipe(tmp_path))
    (event,) = said(tmp_path)
    assert event["message"].startswith("memory: predicted ")
    assert "an update: predicted " in event["message"]
    assert event["predicted_memory"] == planned.ranks[0].allocated
    # Tensors against tensors: what a plan of one process promises (contract 10).
    assert event["measured_memory"] == pytest.approx(event["predicted_memory"], rel=0.005)
    assert event["measured_seconds"] > 0
    page = (tmp_path / "run" / "report.html").read_text()
    assert "Planned and measured" in page
    assert f"{event['predicted_memory'] / event['measured_memory'] - 1:+.1%}"[:-1] in page


def test_ranks_of_a_layout_compare_what_is_resident(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    spread = recipe(tmp_path, replicate=2)
    megalith.plan(spread)
    megalith.train(spread)
    (event,) = said(tmp_path)
    assert event["resident"]
    assert event["measured_memory"] > 0.5 * event["predicted_memory"]


def test_a_run_that_was_not_planned_traces_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".cache" / "megalith" / "plan").mkdir(parents=True)
    megalith.train(recipe(tmp_path))
    assert said(tmp_path) == []
