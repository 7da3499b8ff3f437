"""Every recipe in recipes/ runs: shortened here, whole where it is quick."""

from __future__ import annotations

from pathlib import Path

import pytest

from megalith.recipe import load
from megalith.train.loop import train

RECIPES = sorted((Path(__file__).parent.parent / "recipes").glob("*.toml"))
# The others need a machine of many devices; `megalith plan` runs them (tests/plan).
SMALL = [path for path in RECIPES if load(path).layout.ranks == 1]
FASHION = Path("/usr/share/datasets/fashion-mnist")


@pytest.mark.parametrize("path", SMALL, ids=lambda path: path.stem)
def test_runs_and_saves(path: Path, tmp_path: Path):
    full = load(path)
    if full.data.source == "fashion-mnist" and not FASHION.is_dir():
        pytest.skip("Debian's dataset-fashion-mnist is not installed")
    shorter = ["train.steps=2", "optim.warmup=0", "evaluate.samples=8", "evaluate.sample_tokens=4"]
    if full.data.source == "stdlib":
        shorter += ["data.limit=200_000", f"data.cache={tmp_path / 'cache'}"]
    run = train(load(path, *shorter, f"run.dir={tmp_path / 'run'}"))
    assert run.status == "done"
    assert run.validation["loss"] > 0
    assert (tmp_path / "run" / "checkpoints" / "step-00000002" / "manifest.json").exists()
