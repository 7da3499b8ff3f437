"""Samples change nothing of the run that writes them, and a resumed run writes the same."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import megalith
from megalith.core.errors import RecipeError
from megalith.core.runs import RunFolder
from megalith.generate import load_for_generation
from megalith.train.loop import Run
from megalith.train.sample import check_sampling, trim_samples


@pytest.fixture
def text(tmp_path: Path) -> str:
    folder = tmp_path / "text"
    folder.mkdir()
    for number in range(12):
        lines = f"document {number} says hello to {number + 1}. " * 20
        (folder / f"{number}.txt").write_text(lines)
    return str(folder)


def recipe(text: str, name: str, *more: str) -> Any:
    base = Path(text).parent
    return megalith.load(
        None,
        f"data.files=['{text}']",
        f"data.cache='{base / 'cache'}'",
        f"run.dir='{base / name}'",
        "data.sequence=16",
        "data.validation=0.2",
        "model.context=32",
        "model.layers=1",
        "model.width=16",
        "model.heads=2",
        "model.dropout=0.2",
        "train.steps=6",
        "train.global_batch=4",
        "train.ema=0.5",
        "evaluate.every=2",
        "evaluate.samples=8",
        "evaluate.sample_tokens=12",
        "checkpoint.every=2",
        "checkpoint.keep=9",
        *more,
    )


PROMPT = "evaluate.prompt='document '"


def samples(run: Run) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run.folder / "samples.jsonl").open()]


def same_weights(one: Run, other: Run) -> bool:
    pairs = zip(one.model.parameters(), other.model.parameters(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def test_samples_change_no_weight_and_a_resumed_run_writes_the_same(text: str) -> None:
    with_samples = megalith.train(recipe(text, "with", PROMPT))
    without = megalith.train(recipe(text, "without"))
    assert same_weights(with_samples, without)
    found = samples(with_samples)
    assert [entry["step"] for entry in found] == [2, 4, 6]
    assert len({entry["text"] for entry in found}) == 3
    assert all(entry["prompt"] == "document " for entry in found)
    assert all(entry["text"].startswith("document ") for entry in found)
    assert all(len(entry["text"]) > len("document ") for entry in found)
    assert not (without.folder / "samples.jsonl").exists()

    # As if killed after the sample of step 4, the last line half written.
    for step in (4, 6):
        shutil.rmtree(with_samples.folder / "checkpoints" / f"step-{step:08d}")
    lines = (with_samples.folder / "samples.jsonl").read_text().splitlines(keepends=True)
    (with_samples.folder / "samples.jsonl").write_text(lines[0] + lines[1] + lines[2][:20])
    again = megalith.train(recipe(text, "with", PROMPT), resume=True)
    assert samples(again) == found
    assert same_weights(again, without)


def test_a_sample_is_written_with_the_averaged_weights(text: str, monkeypatch: Any) -> None:
    from megalith.train import sample

    seen = []

    def spy(model: Any, *rest: Any) -> str:
        seen.append(model.embedding.weight.detach().clone())
        return ""

    monkeypatch.setattr(sample, "generate", spy)
    run = megalith.train(recipe(text, "run", PROMPT))
    averaged, _, _ = load_for_generation(run.folder, step=6)
    assert torch.equal(seen[-1], averaged.embedding.weight)
    assert not torch.equal(seen[-1], run.model.get_parameter("embedding.weight"))


def test_logits_that_are_not_finite_do_not_end_training(text: str, monkeypatch: Any) -> None:
    from megalith.train import sample

    def broken(*_: Any) -> str:
        raise megalith.MegalithError("generate: the model's logits are not finite")

    monkeypatch.setattr(sample, "generate", broken)
    run = megalith.train(recipe(text, "run", PROMPT))
    assert run.status == "done"
    assert [entry["text"] for entry in samples(run)] == ["document "] * 3
    assert "not finite" in samples(run)[0]["error"]


def test_the_run_folder_alone_is_enough_to_generate(text: str, tmp_path: Path) -> None:
    run = megalith.train(recipe(text, "run", "data.tokenizer=bpe-280"))
    shutil.rmtree(tmp_path / "cache")
    shutil.rmtree(text)
    moved = run.folder.rename(tmp_path / "moved")
    model, tokenizer, _ = load_for_generation(moved)
    assert tokenizer.to_json() == run.tokenizer.to_json()
    assert megalith.generate(model, tokenizer, "document ") != ""


def test_trimming_keeps_samples_up_to_a_step_and_drops_torn_lines(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    trim_samples(folder, 5)
    assert not folder.samples.exists()
    lines = [json.dumps({"step": step, "prompt": "", "text": "é\u2028x"}) for step in (3, 5, 7)]
    folder.samples.write_text("\n".join(lines) + '\n{"step": 5, "pro')
    trim_samples(folder, 5)
    assert folder.samples.read_text() == "\n".join(lines[:2]) + "\n"


def test_a_prompt_for_what_cannot_write_is_refused_before_training(text: str) -> None:
    language = recipe(text, "run", PROMPT)
    with pytest.raises(RecipeError, match=r"evaluate\.prompt: a Linear cannot continue text"):
        check_sampling(language, torch.nn.Linear(2, 2), None)
    check_sampling(recipe(text, "run"), torch.nn.Linear(2, 2), None)
    images = megalith.load(
        None,
        "model.family=resnet",
        "data.source=digits",
        "task.name=classify",
        PROMPT,
        f"run.dir='{Path(text).parent / 'images'}'",
    )
    with pytest.raises(RecipeError, match=r"evaluate\.prompt"):
        megalith.train(images)
    assert not (Path(text).parent / "images" / "recipe.toml").exists()
