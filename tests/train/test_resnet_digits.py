"""The recipe for digits does what its first lines say."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import megalith

pytest.importorskip("sklearn", reason="scikit-learn is not installed (megalith[vision])")
RECIPE = Path(__file__).parents[2] / "recipes" / "resnet-digits.toml"


@pytest.fixture
def one_thread() -> Iterator[None]:
    """The network is too small to share between threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
def test_digits_reach_97_percent(tmp_path: Path) -> None:
    run = megalith.train(megalith.load(RECIPE, f'run.dir="{tmp_path / "run"}"'))
    assert run.validation["accuracy"] >= 0.97
    assert run.validation["accuracy_top5"] >= 0.99
    assert run.report.stat().st_size > 10_000

    lines = (run.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    train = [line for line in map(json.loads, lines) if line["kind"] == "train"]
    assert train[-1]["loss"] < train[0]["loss"] / 2
    assert all(line["images_per_s"] > 0 for line in train)
    assert all("tokens" not in name for line in train for name in line)


@pytest.mark.usefixtures("one_thread")
def test_a_resumed_run_has_the_weights_and_statistics_of_an_undisturbed_one(tmp_path: Path) -> None:
    def run(folder: str, *overrides: str, resume: bool = False) -> dict[str, torch.Tensor]:
        recipe = megalith.load(
            RECIPE,
            f'run.dir="{tmp_path / folder}"',
            "optim.warmup=2",
            "evaluate.every=0",
            "checkpoint.every=3",
            "model.width=8",
            "train.micro_batch=32",
            "train.ema=0.9",
            *overrides,
        )
        return megalith.train(recipe, resume=resume).model.state_dict()

    whole = run("whole", "train.steps=8", 'optim.schedule="constant"')
    run("parts", "train.steps=5", 'optim.schedule="constant"')
    resumed = run("parts", "train.steps=8", 'optim.schedule="constant"', resume=True)
    assert int(whole["bn1.num_batches_tracked"]) == 16
    for name, tensor in whole.items():
        assert torch.equal(tensor, resumed[name]), name
