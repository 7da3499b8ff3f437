"""The comparison with peers: its arithmetic, and that both sides train the same model."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megalith import models
from megalith.recipe.families import DecoderConfig
from megalith.recipe.schema import TaskSection
from megalith.train.flops import model_flops

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def summary(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("peers_summary")


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("train_vs_peers")


def test_flops_are_those_that_torch_counts(summary: Any) -> None:
    config = DecoderConfig(layers=3, width=32, heads=4, vocab=101, context=64)
    batch = {name: torch.zeros(2, 48, dtype=torch.int64) for name in ("tokens", "targets")}
    assert summary.train_flops(3, 32, 101, 48) * 2 * 48 == model_flops(config, TaskSection(), batch)


def test_parameters_are_those_of_the_model(driver: Any) -> None:
    for size, given in driver.SIZES.items():
        model = models.build(DecoderConfig(**given), seed=0, device="meta")
        told = driver.Setting(size, "fp32", compile=False, batch=1, sequence=1).parameters
        assert told == sum(p.numel() for p in model.parameters())


def test_settings_are_read_as_written(driver: Any) -> None:
    assert driver.Setting.parse("30m/fp32", 4, 512) == driver.Setting("30m", "fp32", False, 4, 512)
    assert driver.Setting.parse("124m/bf16/compile@1x128", 4, 512) == driver.Setting(
        "124m", "bf16", True, 1, 128
    )
    for wrong in ("30m", "31m/fp32", "30m/fp16", "30m/fp32@4"):
        with pytest.raises(ValueError, match="is no setting"):
            driver.Setting.parse(wrong, 4, 512)


def _setting(runs: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    shape = {"layers": 1, "width": 8, "heads": 1, "vocab": 16, "batch": 2, "sequence": 5}
    return {**shape, "precision": "fp32", "warmup": 1, "peers": ["plain", "megalith"], **more} | {
        "runs": runs
    }


def _run(peer: str, number: int, seconds: float, peak: int) -> dict[str, Any]:
    times = {"seconds": [99.0, seconds, seconds, 50.0], "losses": [3.0, 2.0, 2.0, 2.0]}
    return {"peer": peer, "round": number, "peak_rss": peak, **times}


def test_ratios_are_taken_within_a_round(summary: Any) -> None:
    """The machine is twice as slow in round 1: the ratio of the rounds' medians would be off."""
    runs = [
        _run("plain", 0, 1.0, 400 << 20),
        _run("megalith", 0, 0.5, 100 << 20),
        _run("plain", 1, 2.0, 400 << 20),
        _run("megalith", 1, 0.8, 200 << 20),
    ]
    plain, ours = summary.table(_setting(runs), {"fp32": 1e9}).splitlines()[2:4]
    assert "| 8 (5–10) | 2.250 (2.000–2.500) |" in plain
    assert "| 400 (400–400) | 0.375 (0.250–0.500) |" in plain
    assert "| 16 (12–20) |  |" in ours


def test_the_best_peer_is_chosen_round_by_round(summary: Any) -> None:
    runs = [_run("plain", n, s, 100 << 20) for n, s in enumerate((1.0, 4.0))]
    runs += [_run("litgpt_loop", n, 2.0, 200 << 20) for n in range(2)]
    runs += [_run("megalith", n, 1.0, 50 << 20) for n in range(2)]
    text = summary.table(_setting(runs, peers=["plain", "litgpt_loop", "megalith"]), {"fp32": 1e9})
    assert "megalith: 1.500 (1.000–2.000) times the tokens/s of the fastest peer" in text
    assert "0.500 (0.500–0.500) times the memory of the smallest" in text


def test_a_peer_that_failed_says_why(summary: Any) -> None:
    runs = [
        {"peer": "plain", "round": 0, "error": "failed: no | wheel"},
        _run("megalith", 0, 1.0, 1 << 20),
    ]
    assert "| plain | failed: no / wheel |" in summary.table(_setting(runs), {"fp32": 1e9})


def test_other_losses_are_noticed(summary: Any) -> None:
    same = [_run("plain", 0, 1, 1), _run("megalith", 0, 1, 1)]
    assert summary.disagreement(same, "fp32") is None
    other = [same[0], {**same[1], "losses": [3.0002, 2.0, 2.0, 2.0]}]
    assert "megalith, round 0: loss of update 1 is 3.000200" in (
        summary.disagreement(other, "fp32") or ""
    )
    assert summary.disagreement(other, "bf16") is None


@pytest.mark.slow
def test_plain_pytorch_and_megalith_train_the_same_model(tmp_path: Path) -> None:
    shape = {"layers": 2, "width": 32, "heads": 2, "vocab": 64, "context": 32}
    shape |= {"batch": 2, "sequence": 16, "steps": 3}
    peers = BENCHMARKS / "peers"
    subprocess.run(
        [sys.executable, peers / "inputs.py", tmp_path, json.dumps(shape)], check=True, timeout=120
    )
    optimizer = {"lr": 1e-2, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1, "clip": 1.0}
    files = {"weights": str(tmp_path), "tokens": str(tmp_path / "tokens.npy")}
    job = {**shape, **files, **optimizer, "precision": "fp32", "compile": False}
    job["checkpointing"] = "none"
    found = {}
    for script in ("plain", "megalith_run"):
        folder = tmp_path / script
        folder.mkdir()
        (folder / "job.json").write_text(json.dumps({**job, "scratch": str(folder)}))
        done = subprocess.run(
            [sys.executable, peers / f"{script}.py", folder / "job.json"],
            check=True,
            capture_output=True,
            text=True,
            timeout=120,
            cwd=folder,
        )
        found[script] = json.loads(done.stdout)
        assert len(found[script]["seconds"]) == 3
        assert found[script]["peak_rss"] > 50 << 20
    assert found["megalith_run"]["losses"] == pytest.approx(found["plain"]["losses"], abs=2e-6)
    assert found["plain"]["losses"][2] < found["plain"]["losses"][0]
