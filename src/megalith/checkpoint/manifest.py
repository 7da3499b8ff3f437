"""The manifest of a checkpoint: its files with their checksums, and where each tensor lies.

Format 1 lists files only; format 2 adds the tensors, the number of ranks, and its own checksum.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megalith.checkpoint import catalogue
from megalith.checkpoint.catalogue import Catalogue
from megalith.checkpoint.tensorfile import Written
from megalith.core.errors import CheckpointError

NAME = "manifest.json"
FORMATS = (1, 2)
Files = dict[str, Written]


def write(folder: Path, files: Files, tensors: Catalogue, ranks: int) -> None:
    """Write the manifest and force it to disk; the files it lists are there already."""
    content: dict[str, Any] = {
        "format": FORMATS[-1],
        "ranks": ranks,
        "files": {name: asdict(files[name]) for name in sorted(files)},
        "tensors": catalogue.to_json(tensors),
    }
    content["sha256"] = _own_checksum(content)
    write_synced(folder / NAME, json.dumps(content) + "\n")
    sync(folder)


def verify(folder: Path, rank: int = 0, ranks: int = 1) -> None:
    """Check the files against the manifest.

    Args:
        rank: of ``ranks`` that share the work: this one looks at its share of the files.

    Raises:
        CheckpointError: what is missing or damaged.
    """
    listed = read(folder)["files"]
    for name in sorted(listed)[rank::ranks]:
        entry, path = listed[name], folder / name
        if not path.exists():
            raise CheckpointError(f"{folder}: '{name}' is missing")
        if path.stat().st_size != entry["bytes"]:
            raise CheckpointError(
                f"{folder}: '{name}' has {path.stat().st_size} bytes, not {entry['bytes']}"
            )
        if measure(path).sha256 != entry["sha256"]:
            raise CheckpointError(f"{folder}: '{name}' is damaged (its checksum differs)")


def read(folder: Path) -> dict[str, Any]:
    """The manifest.

    Raises:
        CheckpointError: there is none, it is damaged, or of another format.
    """
    try:
        manifest = json.loads((folder / NAME).read_text())
        found = manifest["format"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder}: no readable {NAME}; not a whole checkpoint") from error
    if found not in FORMATS:
        raise CheckpointError(f"{folder}: format {found}, this version reads {FORMATS}")
    if found > 1 and manifest.pop("sha256", None) != _own_checksum(manifest):
        raise CheckpointError(f"{folder}: '{NAME}' is damaged (its checksum differs)")
    if "files" not in manifest:
        raise CheckpointError(f"{folder}: '{NAME}' is damaged (it lists no files)")
    return manifest


def tensors(folder: Path) -> Catalogue:
    """Where each tensor of the checkpoint lies, in either format.

    Raises:
        CheckpointError: as :func:`read`, or a file of format 1 is damaged.
    """
    found = read(folder)
    if found["format"] == 1:
        return catalogue.of_files(folder, found["files"])
    return catalogue.from_json(found["tensors"])


def measure(path: Path) -> Written:
    """Size and checksum of a file."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return Written(path.stat().st_size, digest)


def write_synced(path: Path, text: str) -> Written:
    """Write a small file, force it to disk, and measure it."""
    path.write_text(text)
    sync(path)
    return Written(len(text.encode()), hashlib.sha256(text.encode()).hexdigest())


def sync(path: Path) -> None:
    """Force a file, or a folder's entries, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _own_checksum(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
