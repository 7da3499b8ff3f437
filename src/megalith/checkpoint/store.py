"""The checkpoints of a run: which there are, which is whole, which are kept.

```
checkpoints/step-00000100/
  model.safetensors  optimizer.safetensors  ema.safetensors   state.json  manifest.json
checkpoints/step-00000200/                  saved by several ranks
  model-rank-00000.safetensors  model-rank-00001.safetensors  ...   state.json  manifest.json
```
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megalith.checkpoint import manifest
from megalith.checkpoint.write import STATE, remove
from megalith.core.errors import CheckpointError
from megalith.layout.mesh import Mesh, single


@dataclass(frozen=True)
class Entry:
    """A checkpoint's place and its state, without its tensors."""

    path: Path
    step: int
    state: dict[str, Any]

    @property
    def validation_loss(self) -> float | None:
        """Of the evaluation at this very step, if there was one."""
        return self.state.get("validation_loss")

    @property
    def bytes(self) -> int:
        """Size of all files."""
        return sum(file.stat().st_size for file in self.path.iterdir())


def read_entry(path: Path) -> Entry:
    """The checkpoint in ``path``; checksums are not looked at.

    Raises:
        CheckpointError: its manifest or its state cannot be read.
    """
    manifest.read(path)
    try:
        state = json.loads((path / STATE).read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: '{STATE}' is missing or damaged") from error
    number = path.name.removeprefix(".").removesuffix(".old").removeprefix("step-")
    return Entry(path, int(number) if number.isdecimal() else state.get("done", 0), state)


def entries(checkpoints: Path) -> list[Entry]:
    """The checkpoints with a readable state, oldest first; checksums are not looked at."""
    found = []
    for path in [*checkpoints.glob("step-*"), *_set_aside(checkpoints)]:
        try:
            found.append(read_entry(path))
        except CheckpointError:
            continue  # not whole: it was never finished, and is never used
    return sorted(found, key=lambda entry: entry.step)


def newest_whole(checkpoints: Path, mesh: Mesh | None = None) -> Entry | None:
    """The newest checkpoint whose every byte is as it was written.

    Args:
        mesh: its ranks all call this, read a share of the files each, and get the same answer.
    """
    mesh = mesh or single()
    for entry in reversed(entries(checkpoints)):
        damaged = 0
        try:
            manifest.verify(entry.path, mesh.rank, mesh.size)
        except CheckpointError:
            damaged = 1  # an older one may be whole
        if not mesh.sum_(torch.tensor(damaged)):
            return entry
    return None


def best(found: list[Entry]) -> Entry | None:
    """The entry with the lowest validation loss; the earliest of equals."""
    evaluated = [entry for entry in found if entry.validation_loss is not None]
    return min(evaluated, key=lambda e: (e.validation_loss, e.step), default=None)


def prune(checkpoints: Path, keep: int) -> None:
    """Remove all but the newest ``keep`` and the best, and what crashes left behind."""
    found = entries(checkpoints)
    kept = {entry.path for entry in found[-keep:]}
    top = best(found)
    if top is not None:
        kept.add(top.path)
    for path in _leftovers(checkpoints):
        remove(path)
    for entry in found:
        if entry.path not in kept:
            # The manifest goes first: a half-removed checkpoint must not look whole.
            (entry.path / manifest.NAME).unlink()
            remove(entry.path)


def _set_aside(checkpoints: Path) -> list[Path]:
    """Checkpoints whose replacement was about to get their name when the process died."""
    return [
        path
        for path in checkpoints.glob(".step-*.old")
        if not (checkpoints / path.name[1:].removesuffix(".old")).exists()
    ]


def _leftovers(checkpoints: Path) -> Iterator[Path]:
    yield from checkpoints.glob(".step-*.tmp")
    yield from set(checkpoints.glob(".step-*.old")) - set(_set_aside(checkpoints))
    for path in checkpoints.glob("step-*"):
        if not (path / manifest.NAME).exists():
            yield path
