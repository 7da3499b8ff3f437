"""Runs tell which share of a device's rates they reached, and later plans use it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from megalith.core.errors import PlanError
from megalith.plan import constants, estimate, machine
from megalith.plan.calibrate import calibrate, changed, device_of, told
from megalith.plan.worker import Pool
from megalith.recipe.schema import TrainSection

RECIPE = """
[model]
layers = 2
width = {width}
heads = 4
context = 1024
vocab = 512

[data]
tokenizer = "bpe-512"
sequence = 1024

[train]
global_batch = 16
precision = "bf16"
micro_batch = {micro}

[layout]
shard = {shard}
"""


def folder(place: Path, seconds: float, width: int = 1024, micro: int = 4, shard: int = 1) -> Path:
    """A run of 30 updates that took ``seconds`` each, but for the first ten."""
    place.mkdir()
    (place / "recipe.toml").write_text(RECIPE.format(width=width, micro=micro, shard=shard))
    said = {"device": "gpu:0", "device_name": "NVIDIA H200"}
    (place / "environment.json").write_text(json.dumps(said))
    lines = [
        {"kind": "train", "step": step, "seconds_compute": 10 * took}
        for step, took in ((10, 3 * seconds), (20, seconds), (30, seconds))
    ]
    (place / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return place


def test_a_run_tells_its_median_update_without_warming_up(tmp_path: Path) -> None:
    run = folder(tmp_path / "run", 0.5)
    assert told(run).seconds == pytest.approx(0.5)
    assert device_of(run) == "H200"
    with pytest.raises(PlanError, match="no run folder"):
        told(tmp_path)
    (run / "metrics.jsonl").write_text("")
    with pytest.raises(PlanError, match="fewer than two lines"):
        told(run)
    (run / "environment.json").write_text(json.dumps({"device": "gpu:0", "device_name": "Odd"}))
    with pytest.raises(PlanError, match=r"'Odd' of .* is not in the catalogue"):
        device_of(run)


def test_constants_that_made_the_times_are_found_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Times are made by a device with other shares; runs of several kinds tell which."""
    monkeypatch.chdir(tmp_path)
    pool, catalogue = Pool(None), machine.parse("1xH200")
    truth = changed(catalogue.device, (0.6, 0.8, 0.5))
    shapes = [
        {"width": 8192, "micro": 16},
        {"width": 256, "micro": 2},
        {"width": 2048, "micro": 1, "shard": 16},
    ]
    runs = []
    for number, shape in enumerate(shapes):
        run = folder(tmp_path / f"run{number}", 1.0, **shape)
        recipe = told(run).recipe
        on = machine.Machine(recipe.layout.ranks, truth, catalogue.network)
        seconds = estimate.plan(recipe, on, advise=False, pool=pool).time.seconds
        for file in run.iterdir():
            file.unlink()
        run.rmdir()
        runs.append(folder(tmp_path / f"run{number}", seconds, **shape))
    found = calibrate(runs, pool=pool)
    before = max(abs(fit.before / fit.measured - 1) for fit in found.fits)
    after = max(abs(fit.after / fit.measured - 1) for fit in found.fits)
    assert before > 0.2
    assert after < 0.05
    assert found.device.share["matmul"] == pytest.approx(truth.share["matmul"], rel=0.15)

    constants.keep(found.device, ["runs/one", 'a "quoted" run'])
    used, notes = constants.machine("16xH200", TrainSection())
    assert used.device.share["matmul"] == pytest.approx(found.device.share["matmul"], abs=1e-4)
    assert 'a "quoted" run' in notes[0]
    assert constants.machine("16xH100", TrainSection())[1] == []
    assert any("as fitted to" in note for note in estimate.plan(recipe, "16xH200", pool=pool).notes)
    constants.FILE.write_text("[H200]\nshare = 3")
    with pytest.raises(PlanError, match="damaged"):
        constants.machine("1xH200", TrainSection())


def test_this_machine_is_its_accelerator_where_it_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine.this("cpu") == machine.HERE
    monkeypatch.setattr(machine.devices, "pick", lambda name: torch.device("xpu", 0))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)
    monkeypatch.setattr(machine.devices, "describe", lambda device: "NVIDIA H200")
    assert machine.this() == "4xH200"
    assert machine.this(count=2) == "2xH200"
    assert constants.machine(machine.HERE, TrainSection())[0].device.key == "H200"
    monkeypatch.setattr(machine.devices, "describe", lambda device: "Odd 9000")
    with pytest.raises(PlanError, match="this machine's 'Odd 9000' is not in the catalogue"):
        machine.this()


def test_one_run_moves_what_it_is_made_of_and_nothing_else(tmp_path: Path) -> None:
    pool = Pool(None)
    run = folder(tmp_path / "run", 1.0)
    slow = calibrate([run], pool=pool)
    assert slow.fits[0].after > slow.fits[0].before
    assert slow.device.share["matmul"] < slow.before.share["matmul"]
    assert slow.device.link_share == pytest.approx(slow.before.link_share)
