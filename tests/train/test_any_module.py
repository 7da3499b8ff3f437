"""Any ``nn.Module`` trains: the guide's own code and recipes, run as they stand."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import helpers_torchvision
import megalith
from megalith.recipe import Recipe

pytest.importorskip("transformers", reason="transformers is not installed (megalith[dev])")
helpers_torchvision.models()  # transformers imports torchvision where that is installed

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "any-module.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", GUIDE, re.MULTILINE | re.DOTALL)


def recipe(number: int, tmp_path: Path, *overrides: str) -> Recipe:
    file = tmp_path / "recipe.toml"
    file.write_text(blocks("toml")[number], encoding="utf-8")
    return megalith.load(file, f'run.dir="{tmp_path / "run"}"', "run.log_every=10", *overrides)


def lines(tmp_path: Path, kind: str) -> list[dict[str, Any]]:
    text = (tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8")
    return [line for line in map(json.loads, text.splitlines()) if line["kind"] == kind]


def test_the_guide_shows_the_code_that_runs_here() -> None:
    code = (ROOT / "tests" / "user_code.py").read_text(encoding="utf-8")
    shown = blocks("python")
    assert len(shown) == 3
    assert all(block in code for block in shown)


@pytest.mark.usefixtures("one_thread")
def test_vit_on_digits_with_a_loss_of_the_users(tmp_path: Path) -> None:
    run = megalith.train(recipe(0, tmp_path))
    losses = [line["loss"] for line in lines(tmp_path, "train")]
    assert losses[-1] < 0.4 * losses[0]
    assert run.validation["accuracy"] > 0.75
    assert run.status == "done"
    assert type(run.model).__name__ == "ViTForImageClassification"
    assert run.model.config.num_hidden_layers == 1  # type: ignore[union-attr]


@pytest.mark.usefixtures("one_thread")
def test_bert_with_data_and_task_of_the_users(tmp_path: Path) -> None:
    run = megalith.train(recipe(1, tmp_path))
    losses = [line["loss"] for line in lines(tmp_path, "train")]
    assert losses[-1] < 0.75 * losses[0]
    # Bytes of Python source repeat the blank most: better than always guessing that is learning.
    assert run.validation["accuracy"] > 0.3
    assert all(line["bytes_per_s"] > 0 for line in lines(tmp_path, "train"))
    tied = run.model.get_output_embeddings().weight, run.model.get_input_embeddings().weight  # type: ignore[operator]
    assert tied[0] is tied[1]


@pytest.fixture
def one_thread() -> Any:
    """These models are too small to share between threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
