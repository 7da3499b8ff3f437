"""A training step saved under one layout goes on under another: model, optimizer and average."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megalith import checkpoint, step
from megalith.layout import mesh as meshes
from megalith.recipe import parse
from ranks import on_ranks

MODEL = {"layers": 2, "width": 16, "heads": 2, "context": 12, "vocab": 24, "tied": True}
CPU = torch.device("cpu")


def _built(layout: dict[str, int], optimizer: str) -> step.Step:
    recipe = parse(
        {
            "model": MODEL,
            "data": {"sequence": 12},
            "train": {"global_batch": 4, "micro_batch": 1, "ema": 0.9, "steps": 9},
            "optim": {"name": optimizer, "lr": 0.05},
            "layout": layout,
        }
    )
    mesh = meshes.build(recipe.layout, CPU)
    return step.build(recipe, {}, CPU, mesh, torch.float64)


def _update(one: step.Step, number: int) -> None:
    """The update of one batch of four, of which each data rank gets its samples."""
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(24, (4, 13), generator=generator)
    ranks, rank = one.mesh.data_ranks, one.mesh.data_rank
    batches = [
        {
            "tokens": tokens[n : n + 1, :-1].contiguous(),
            "targets": tokens[n : n + 1, 1:].contiguous(),
            "sample": torch.tensor([n]),
        }
        for n in range(rank, 4, ranks)
    ]
    one.update(one.backward(batches))


def _go_on(folder: Path, layout: dict[str, int], optimizer: str, source: Path | None) -> None:
    """Two updates from the start, or from a checkpoint, then save."""
    one = _built(layout, optimizer)
    if source is not None:
        entry = checkpoint.newest_whole(source, one.mesh)
        assert entry is not None
        checkpoint.restore(one, entry, one.mesh)
        loaded = entry.path
        for part, pieces in one.pieces().items():  # bit for bit, before anything is computed
            saved = checkpoint.load(loaded, part)
            for name, piece in pieces.items():
                assert torch.equal(piece.tensor, saved[name][piece.box]), name
    for _ in range(2):
        _update(one, one.done)
    checkpoint.save(folder, one.done, one.pieces(), checkpoint.numbers(one), one.mesh)


def _tensors(folder: Path) -> dict[str, Tensor]:
    entry = checkpoint.newest_whole(folder)
    assert entry is not None
    assert entry.step == 4
    return {
        f"{part}/{name}": tensor
        for part in ("model", "optimizer", "ema")
        for name, tensor in checkpoint.load(entry.path, part).items()
    }


# In each row: a layout, and the one that its checkpoint is loaded under.
QUICK: list[Any] = [
    ({"tensor": 2}, {"shard": 2}, "sgd"),
    ({"pipeline": 2}, {"replicate": 2}, "adamw"),
]
SLOW: list[Any] = [
    ({"shard": 4}, {"tensor": 2}, "adamw"),
    ({"shard": 2}, {"pipeline": 2}, "sgd"),
    ({"tensor": 2, "shard": 2}, {}, "adamw"),
    ({"pipeline": 2, "shard": 2}, {"tensor": 2}, "sgd"),
    ({}, {"shard": 2, "tensor": 2}, "adamw"),
]


def _row(row: Any, *marks: Any) -> Any:
    sides = ["-".join(f"{axis}{n}" for axis, n in side.items()) or "one" for side in row[:2]]
    return pytest.param(*row, id=" to ".join(sides) + f" {row[2]}", marks=marks)


CHANGES = [*map(_row, QUICK), *(_row(row, pytest.mark.slow) for row in SLOW)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Tensor]]:
    """Four updates of one process."""
    found = {}
    for optimizer in ("adamw", "sgd"):
        folder = tmp_path_factory.mktemp(optimizer)
        _go_on(folder, {}, optimizer, None)
        _go_on(folder, {}, optimizer, folder)
        found[optimizer] = _tensors(folder)
    return found


@pytest.mark.parametrize(("first", "second", "optimizer"), CHANGES)
def test_a_step_goes_on_under_another_layout(
    tmp_path: Path, alone: dict[str, dict[str, Tensor]], first: Any, second: Any, optimizer: str
) -> None:
    source: Path | None = None
    for number, layout in enumerate((first, second)):
        folder, logs = tmp_path / f"saved-{number}", tmp_path / f"logs-{number}"
        logs.mkdir()
        count = 1
        for size in layout.values():
            count *= size
        if count == 1:
            _go_on(folder, layout, optimizer, source)
        else:
            on_ranks(count, logs, _go_on, folder, layout, optimizer, source)
        source = folder
    assert source is not None
    found = _tensors(source)
    assert found.keys() == alone[optimizer].keys()
    for name, tensor in alone[optimizer].items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-9, atol=1e-10, msg=name)
