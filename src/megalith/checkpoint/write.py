"""Writing a checkpoint, by one process or by all ranks: whole or not at all.

Each rank writes the pieces it owns into a folder of a temporary name, then a listing of what it
wrote. When all listings are there, rank 0 checks that the pieces make up every tensor, writes the
manifest, and renames the folder. A crash of any rank leaves the older checkpoints as they were.
``torch.distributed.checkpoint`` is not used: its metadata is a pickle, and it loads flipped bytes.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from megalith.checkpoint import catalogue, manifest, tensorfile
from megalith.checkpoint.catalogue import Catalogue, Held, Saved
from megalith.checkpoint.tensorfile import Written
from megalith.core.errors import CheckpointError
from megalith.core.runs import write_whole
from megalith.layout.mesh import Mesh, single
from megalith.layout.pieces import Piece

Parts = Mapping[str, Mapping[str, Piece]]
"""This rank's pieces of each part: ``model``, ``optimizer``, ``ema``; the same parts on all."""

STATE = "state.json"
PATIENCE = 60.0
"""Seconds until another rank's listing must be visible; network file systems may take many."""


def save(
    checkpoints: Path, step: int, parts: Parts, state: dict[str, Any], mesh: Mesh | None = None
) -> Path:
    """Write one checkpoint and return its folder; one of the same step is replaced.

    All ranks call it, on one shared file system. One process writes whole tensors into files that
    any tool opens (``model.safetensors``), several write a file each.

    Args:
        parts: pieces that are not owned are not written.
        state: numbers that go into ``state.json``; rank 0's are written.

    Raises:
        CheckpointError: on all ranks: the pieces leave a gap or overlap, or a rank failed.
    """
    mesh = mesh or single()
    begin(checkpoints, step, mesh)
    final = path_of(checkpoints, step)
    with Together(mesh, final), reported(checkpoints, step, mesh):
        write_pieces(checkpoints, step, parts, mesh)
    with Together(mesh, final):
        if mesh.main:
            finish(checkpoints, step, state, mesh, PATIENCE)
    return final


def path_of(checkpoints: Path, step: int) -> Path:
    """The folder of a step's checkpoint."""
    return checkpoints / f"step-{step:08d}"


class Together:
    """Inside, ranks work alone; at the end an error on one of them is an error on all."""

    def __init__(self, mesh: Mesh, what: Path) -> None:
        self.mesh, self.what = mesh, what

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        if kind is not None and not issubclass(kind, Exception):
            return  # told to stop: the others will miss this rank soon enough
        failed = int(self.mesh.sum_(torch.tensor(int(kind is not None))))
        if failed and kind is None:
            raise CheckpointError(f"{self.what}: failed on {failed} other ranks, see their logs")


def begin(checkpoints: Path, step: int, mesh: Mesh) -> None:
    """Make the folder of the temporary name, empty. All ranks call it.

    Raises:
        CheckpointError: a rank does not see it.
    """
    temporary = _temporary(checkpoints, step)
    with Together(mesh, temporary):
        if mesh.main:
            checkpoints.mkdir(parents=True, exist_ok=True)
            remove(temporary)
            temporary.mkdir()
    with Together(mesh, temporary):
        _await([temporary], PATIENCE, mesh.rank)


@contextmanager
def reported(checkpoints: Path, step: int, mesh: Mesh) -> Iterator[None]:
    """An error inside is also told to rank 0, which would else wait for this rank's listing.

    Raises:
        CheckpointError: instead of an ``OSError``.
    """
    try:
        yield
    except (OSError, CheckpointError) as error:
        said = f"{path_of(checkpoints, step)}: rank {mesh.rank} could not write it: {error}"
        with suppress(OSError):  # the same full disk; rank 0 finds out by waiting
            write_whole(_listing(_temporary(checkpoints, step), mesh.rank), json.dumps(said))
        raise CheckpointError(said) from error


def write_pieces(checkpoints: Path, step: int, parts: Parts, mesh: Mesh) -> None:
    """Write what this rank owns, and its listing. No other rank is needed for it."""
    temporary = _temporary(checkpoints, step)
    files: dict[str, Written] = {}
    held: Catalogue = {}
    for part, pieces in parts.items():
        owned = {name: piece for name, piece in pieces.items() if _counts(piece)}
        file = f"{part}-rank-{mesh.rank:05d}.safetensors"
        file = f"{part}.safetensors" if mesh.size == 1 else file
        specs = {name: tensorfile.spec(piece.tensor, name) for name, piece in owned.items()}
        held[part] = {
            name: Saved(
                tensorfile.Spec(specs[name].dtype, piece.shape),
                (Held(file, piece.start, tuple(piece.tensor.shape)),),
            )
            for name, piece in owned.items()
        }
        if owned or mesh.size == 1:
            tensors = {name: piece.tensor for name, piece in owned.items()}
            files[file] = tensorfile.write(temporary / file, specs, tensors.__getitem__)
    listing = {
        "files": {name: asdict(written) for name, written in files.items()},
        "tensors": catalogue.to_json(held),
    }
    manifest.sync(temporary)
    write_whole(_listing(temporary, mesh.rank), json.dumps(listing))


def finish(
    checkpoints: Path, step: int, state: dict[str, Any], mesh: Mesh, patience: float
) -> Path:
    """Put the ranks' listings together and rename the folder. Rank 0 calls it.

    Args:
        patience: how long to wait for the other ranks' listings, seconds.

    Raises:
        CheckpointError: a listing does not come, or the pieces leave a gap or overlap.
    """
    temporary = _temporary(checkpoints, step)
    listings = [_listing(temporary, rank) for rank in range(mesh.size)]
    _await(listings, patience, mesh.rank)
    read = [json.loads(listing.read_text()) for listing in listings]
    for found in read:
        if isinstance(found, str):
            raise CheckpointError(found)
    files = {name: Written(**one) for found in read for name, one in found["files"].items()}
    tensors = catalogue.merge(catalogue.from_json(found["tensors"]) for found in read)
    catalogue.check(tensors)
    files[STATE] = manifest.write_synced(temporary / STATE, json.dumps(state, indent=1) + "\n")
    for listing in listings:
        listing.unlink()
    manifest.write(temporary, files, tensors, mesh.size)
    return put_in_place(temporary, path_of(checkpoints, step))


def put_in_place(temporary: Path, final: Path) -> Path:
    """Rename a finished folder; what had its name goes."""
    old = final.with_name(f".{final.name}.old")
    if final.exists():
        remove(old)
        final.rename(old)  # not lost if we die now: `entries` finds it under this name
    temporary.rename(final)
    manifest.sync(final.parent)
    remove(old)
    return final


def remove(path: Path) -> None:
    """Remove a folder, if it is there."""
    if path.exists():
        shutil.rmtree(path)


def _counts(piece: Piece) -> bool:
    """Whether there is anything to write: a rank's part of a small tensor may be empty."""
    return piece.owned and (piece.tensor.numel() > 0 or 0 in piece.shape)


def _temporary(checkpoints: Path, step: int) -> Path:
    return checkpoints / f".{path_of(checkpoints, step).name}.tmp"


def _listing(temporary: Path, rank: int) -> Path:
    return temporary / f"listing-rank-{rank:05d}.json"


def _await(paths: list[Path], patience: float, rank: int) -> None:
    end = time.monotonic() + patience
    while missing := [path for path in paths if not path.exists()]:
        if time.monotonic() > end:
            raise CheckpointError(
                f"{missing[0]}: not seen by rank {rank} within {patience:.0f} s; did a rank die, "
                "or is this not a file system that all ranks share?"
            )
        time.sleep(0.02)
