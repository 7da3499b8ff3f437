"""Checkpoints are whole or not there, and damage is never loaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from megalith import checkpoint
from megalith.checkpoint import manifest
from megalith.core.errors import CheckpointError
from toys import ragged_batch, toy_step


def save(folder: Path, step: int, loss: float | None = None) -> Path:
    pieces = checkpoint.wholes({"weight": torch.full((3, 4), float(step))})
    return checkpoint.save(folder, step, {"model": pieces}, {"validation_loss": loss})


def steps(folder: Path) -> list[int]:
    return [entry.step for entry in checkpoint.entries(folder)]


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "adafactor", "muon"])
def test_what_is_saved_comes_back_bit_for_bit(tmp_path: Path, optimizer: str):
    """Also state that an optimizer only makes in its first step, which the second has not taken."""
    fields = {"train__ema": 0.9, "optim__name": optimizer}
    step, again = (toy_step(torch.float32, **fields) for _ in range(2))
    for seed in range(3):
        step.update(step.backward([ragged_batch(4, seed=seed)]))
    step.skip()
    path = checkpoint.save(tmp_path, step.done, step.pieces(), checkpoint.numbers(step))
    entry = checkpoint.newest_whole(tmp_path)
    assert entry is not None
    assert entry.path == path
    checkpoint.restore(again, entry)
    assert (again.done, again.skipped) == (4, 1)
    for a, b in zip(step.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(a, b)
    for part, named in step.pieces().items():
        for name, piece in named.items():
            found = again.pieces()[part][name]
            assert torch.equal(piece.tensor, found.tensor), name
            assert piece.tensor.dtype == found.tensor.dtype
    for one in (step, again):
        one.update(one.backward([ragged_batch(4, seed=9)]))
    for a, b in zip(step.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(a, b), "they go on alike"


def test_tied_weights_are_written_once_and_stay_tied(tmp_path: Path):
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(3, 3), "b": torch.nn.Linear(3, 3)})
    model["b"].weight = model["a"].weight
    assert set(checkpoint.model_tensors(model)) == {"a.weight", "a.bias", "b.bias"}
    pieces = checkpoint.wholes(checkpoint.model_tensors(model))
    path = checkpoint.save(tmp_path, 1, {"model": pieces}, {})
    value = model["a"].weight.detach().clone()
    with torch.no_grad():
        model["a"].weight.zero_()
    checkpoint.load_model(model, path)
    assert model["b"].weight is model["a"].weight
    assert torch.equal(model["b"].weight, value)


def test_keeps_the_newest_and_the_best(tmp_path: Path):
    for step, loss in [(1, 3.0), (2, 1.0), (3, 2.0), (4, None), (5, 1.5)]:
        save(tmp_path, step, loss)
        checkpoint.prune(tmp_path, keep=2)
    assert steps(tmp_path) == [2, 4, 5]
    best = checkpoint.best(checkpoint.entries(tmp_path))
    assert best is not None
    assert best.step == 2


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "no manifest", "bad manifest"])
def test_a_damaged_checkpoint_is_passed_over_for_the_newest_whole_one(tmp_path: Path, damage: str):
    save(tmp_path, 1)
    path = save(tmp_path, 2)
    file = path / "model.safetensors"
    content = bytearray(file.read_bytes())
    if damage == "flip":
        content[-1] ^= 1
        file.write_bytes(content)
    elif damage == "truncate":
        file.write_bytes(content[:-1])
    elif damage == "remove":
        file.unlink()
    elif damage == "no manifest":
        (path / manifest.NAME).unlink()
    else:
        (path / manifest.NAME).write_text('{"format": 1, "fil')
    with pytest.raises(CheckpointError, match="step-00000002"):
        manifest.verify(path)
    entry = checkpoint.newest_whole(tmp_path)
    assert entry is not None
    assert entry.step == 1


def test_a_crash_before_the_rename_leaves_nothing_that_looks_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    save(tmp_path, 1)

    def crash(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(manifest, "write", crash)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, 2)
    assert steps(tmp_path) == [1]
    monkeypatch.undo()
    save(tmp_path, 3)
    checkpoint.prune(tmp_path, keep=5)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000001", "step-00000003"]


def test_saving_the_same_step_again_replaces_it(tmp_path: Path):
    save(tmp_path, 1, 2.0)
    save(tmp_path, 1, 1.0)
    assert [e.validation_loss for e in checkpoint.entries(tmp_path)] == [1.0]


def test_another_models_checkpoint_is_refused_by_name(tmp_path: Path):
    pieces = checkpoint.wholes({"other": torch.zeros(2)})
    path = checkpoint.save(tmp_path, 1, {"model": pieces}, {})
    with pytest.raises(CheckpointError, match="is missing in the"):
        checkpoint.load_model(torch.nn.Linear(2, 2), path)
    pieces = checkpoint.wholes({"weight": torch.zeros(3, 2), "bias": torch.zeros(2)})
    path = checkpoint.save(tmp_path, 2, {"model": pieces}, {})
    with pytest.raises(
        CheckpointError, match=r"'weight' has shape \[3, 2\], the model's is \[2, 2\]"
    ):
        checkpoint.load_model(torch.nn.Linear(2, 2), path)


def test_a_newer_format_is_refused(tmp_path: Path):
    path = save(tmp_path, 1)
    content = json.loads((path / manifest.NAME).read_text())
    (path / manifest.NAME).write_text(json.dumps(content | {"format": 99}))
    with pytest.raises(CheckpointError, match="format 99"):
        manifest.read(path)
