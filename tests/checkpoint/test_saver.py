"""Saving while training goes on: the values of the call, one save at a time, errors told."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from megalith import checkpoint
from megalith.checkpoint import tensorfile, write
from megalith.core.errors import CheckpointError
from megalith.layout.mesh import Mesh
from thread_ranks import on_threads, spread, whole_tensors


def value(path: Path) -> float:
    return float(checkpoint.load(path, "model")["w"][0])


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Files are not written before it is opened."""
    opened = threading.Event()
    real = tensorfile.write

    def waits(*args: Any) -> Any:
        assert opened.wait(30)
        return real(*args)

    monkeypatch.setattr(tensorfile, "write", waits)
    return opened


def test_the_values_saved_are_those_of_the_call(tmp_path: Path, gate: threading.Event) -> None:
    weight, state = torch.full((4,), 1.0), {"done": 1, "nested": {"best": 1}}
    with checkpoint.Saver(tmp_path, asynchronous=True) as saver:
        stall = saver.save(1, {"model": checkpoint.wholes({"w": weight})}, state)
        assert stall < 10
        assert not checkpoint.entries(tmp_path), "nothing can have been written yet"
        weight.fill_(2.0)
        state["nested"]["best"] = 2
        gate.set()
        saver.wait()
        assert [entry.step for entry in checkpoint.entries(tmp_path)] == [1]
        saver.save(2, {"model": checkpoint.wholes({"w": weight})}, state)
        weight.fill_(3.0)
    first, second = checkpoint.entries(tmp_path)
    assert (value(first.path), value(second.path)) == (1.0, 2.0)
    assert (first.state["nested"]["best"], second.state["nested"]["best"]) == (1, 2)


def test_a_save_waits_for_the_one_before(tmp_path: Path, gate: threading.Event) -> None:
    weight = torch.zeros(4)
    with checkpoint.Saver(tmp_path, asynchronous=True) as saver:
        saver.save(1, {"model": checkpoint.wholes({"w": weight})}, {})
        threading.Timer(0.3, gate.set).start()
        assert saver.save(2, {"model": checkpoint.wholes({"w": weight})}, {}) > 0.2
        assert 1 in [entry.step for entry in checkpoint.entries(tmp_path)]
    assert [entry.step for entry in checkpoint.entries(tmp_path)] == [1, 2]


def test_an_error_in_the_thread_is_raised_at_the_next_call(tmp_path: Path, monkeypatch) -> None:
    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    pieces = {"model": checkpoint.wholes({"w": torch.zeros(4)})}
    saver = checkpoint.Saver(tmp_path, asynchronous=True)
    saver.save(1, pieces, {})
    saver.wait()
    monkeypatch.setattr(tensorfile, "write", full)
    saver.save(2, pieces, {})
    with pytest.raises(CheckpointError, match="No space left"):
        saver.save(3, pieces, {})
    monkeypatch.undo()
    saver.save(4, pieces, {})
    saver.wait()
    assert [entry.step for entry in checkpoint.entries(tmp_path)] == [1, 4]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_keeps_the_newest(tmp_path: Path, asynchronous: bool) -> None:
    with checkpoint.Saver(tmp_path, asynchronous=asynchronous, keep=2) as saver:
        for step in range(1, 5):
            saver.save(step, {"model": checkpoint.wholes({"w": torch.zeros(4)})}, {})
    assert [entry.step for entry in checkpoint.entries(tmp_path)] == [3, 4]


def test_ranks_save_in_threads_without_a_collective_call(tmp_path: Path) -> None:
    """A thread that met other ranks would be seen: the mesh knows who calls."""
    tensors = whole_tensors(0)
    layout = spread(tensors, 3, 0, fill=True)

    def work(mesh: Mesh) -> None:
        own = threading.current_thread()
        sum_, pieces = mesh.sum_, layout[mesh.rank]

        def watched(values: torch.Tensor) -> torch.Tensor:
            assert threading.current_thread() is own
            return sum_(values)

        mesh.sum_ = watched  # type: ignore[method-assign]
        with checkpoint.Saver(tmp_path, mesh, asynchronous=True, keep=2) as saver:
            for step in (1, 2, 3):
                saver.save(step, {"model": pieces}, {"done": step})

    assert on_threads(3, work) == [None] * 3
    assert [entry.step for entry in checkpoint.entries(tmp_path)] == [2, 3]
    loaded = checkpoint.load(tmp_path / "step-00000003", "model")
    assert all(loaded[name].shape == tensors[name].shape for name in tensors)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_rank_that_cannot_write_fails_the_save_on_all(
    tmp_path: Path, asynchronous: bool, monkeypatch
) -> None:
    layout = spread(whole_tensors(0), 3, 0, fill=True)
    real = write.write_pieces

    def fails(checkpoints: Path, step: int, parts: Any, mesh: Mesh) -> None:
        if mesh.rank == 1 and step == 2:
            raise OSError(28, "No space left on device")
        real(checkpoints, step, parts, mesh)

    monkeypatch.setattr(write, "write_pieces", fails)

    def work(mesh: Mesh) -> None:
        with checkpoint.Saver(tmp_path, mesh, asynchronous=asynchronous, patience=30) as saver:
            for step in (1, 2):
                saver.save(step, {"model": layout[mesh.rank]}, {})

    errors = on_threads(3, work)
    assert all(isinstance(error, CheckpointError) for error in errors), errors
    assert "No space left" in str(errors[1])
    assert [entry.step for entry in checkpoint.entries(tmp_path)] == [1]
