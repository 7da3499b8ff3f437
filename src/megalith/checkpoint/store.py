"""Checkpoints on disk: written whole or not at all, and only read when whole.

```
checkpoints/step-00000100/
  model.safetensors  optimizer.safetensors  ema.safetensors   state.json  manifest.json
```

A checkpoint is written under a temporary name, forced to disk, and renamed. A crash at any moment
leaves either the old ones or one more.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from megalith.checkpoint import manifest
from megalith.core.errors import CheckpointError

Tensors = dict[str, dict[str, Tensor]]
"""Named tensors of each part: ``model``, ``optimizer``, ``ema``."""


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


def save(checkpoints: Path, step: int, tensors: Tensors, state: dict[str, Any]) -> Path:
    """Write one checkpoint and return its folder; one of the same step is replaced."""
    checkpoints.mkdir(parents=True, exist_ok=True)
    final = checkpoints / f"step-{step:08d}"
    temporary = checkpoints / f".{final.name}.tmp"
    _remove(temporary)
    temporary.mkdir()
    for part, named in tensors.items():
        contiguous = {name: tensor.detach().contiguous() for name, tensor in named.items()}
        save_file(contiguous, temporary / f"{part}.safetensors", metadata={"format": "pt"})
    (temporary / "state.json").write_text(json.dumps(state, indent=1) + "\n")
    manifest.write(temporary)
    if final.exists():
        old = checkpoints / f".{final.name}.old"
        _remove(old)
        final.rename(old)
        temporary.rename(final)
        _remove(old)
    else:
        temporary.rename(final)
    manifest.sync_folder(checkpoints)
    return final


def entries(checkpoints: Path) -> list[Entry]:
    """The checkpoints with a readable state, oldest first; checksums are not looked at."""
    found = []
    for path in sorted(checkpoints.glob("step-*")):
        try:
            manifest.read(path)
            state = json.loads((path / "state.json").read_text())
        except (OSError, json.JSONDecodeError, CheckpointError):
            continue  # not whole: it was never finished, and is never used
        found.append(Entry(path, int(path.name.removeprefix("step-")), state))
    return found


def newest_whole(checkpoints: Path) -> Entry | None:
    """The newest checkpoint whose every byte is as it was written."""
    for entry in reversed(entries(checkpoints)):
        try:
            manifest.verify(entry.path)
        except CheckpointError:
            continue  # damaged: an older one may be whole
        return entry
    return None


def load(path: Path, part: str, device: str = "cpu") -> dict[str, Tensor]:
    """The tensors of one part.

    Raises:
        CheckpointError: the checkpoint has no such part.
    """
    file = path / f"{part}.safetensors"
    if not file.exists():
        raise CheckpointError(f"{path}: holds no '{part}' tensors")
    return load_file(file, device=device)


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
        _remove(path)
    for entry in found:
        if entry.path not in kept:
            # The manifest goes first: a half-removed checkpoint must not look whole.
            (entry.path / manifest.NAME).unlink()
            _remove(entry.path)


def _leftovers(checkpoints: Path) -> Iterator[Path]:
    yield from checkpoints.glob(".step-*.tmp")
    yield from checkpoints.glob(".step-*.old")
    for path in checkpoints.glob("step-*"):
        if not (path / manifest.NAME).exists():
            yield path


def _remove(path: Path) -> None:
    if path.exists():
        shutil.rmtree(path)
