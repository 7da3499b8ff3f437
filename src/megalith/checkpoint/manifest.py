"""The manifest of a checkpoint: its files with their sizes and checksums."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from megalith.core.errors import CheckpointError

NAME = "manifest.json"
FORMAT = 1


def write(folder: Path) -> None:
    """List every file of ``folder`` and force all of them to disk."""
    files = {}
    for path in sorted(folder.iterdir()):
        _sync(path)
        files[path.name] = {"bytes": path.stat().st_size, "sha256": _sha256(path)}
    manifest = folder / NAME
    manifest.write_text(json.dumps({"format": FORMAT, "files": files}, indent=1) + "\n")
    _sync(manifest)
    _sync(folder)


def verify(folder: Path) -> None:
    """Check every file against the manifest.

    Raises:
        CheckpointError: what is missing or damaged.
    """
    listed = read(folder)["files"]
    for name, entry in listed.items():
        path = folder / name
        if not path.exists():
            raise CheckpointError(f"{folder}: '{name}' is missing")
        if path.stat().st_size != entry["bytes"]:
            raise CheckpointError(
                f"{folder}: '{name}' has {path.stat().st_size} bytes, not {entry['bytes']}"
            )
        if _sha256(path) != entry["sha256"]:
            raise CheckpointError(f"{folder}: '{name}' is damaged (its checksum differs)")


def read(folder: Path) -> dict[str, Any]:
    """The manifest.

    Raises:
        CheckpointError: there is none, or it is of another format.
    """
    try:
        manifest = json.loads((folder / NAME).read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{folder}: no readable {NAME}; not a whole checkpoint") from error
    if manifest.get("format") != FORMAT:
        raise CheckpointError(
            f"{folder}: format {manifest.get('format')}, this version reads {FORMAT}"
        )
    return manifest


def sync_folder(folder: Path) -> None:
    """Force a folder's entries to disk, after a rename in it."""
    _sync(folder)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
