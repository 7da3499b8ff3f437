"""One process's files out of a checkpoint of many, one tensor in memory at a time."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor

from megalith.checkpoint import catalogue, manifest, tensorfile
from megalith.checkpoint.catalogue import Catalogue, Held, Saved
from megalith.checkpoint.read import Reader
from megalith.checkpoint.store import entries, newest_whole
from megalith.checkpoint.tensorfile import Spec
from megalith.checkpoint.write import STATE, put_in_place, remove
from megalith.core.errors import CheckpointError
from megalith.core.runs import RunFolder


def find(path: Path, step: int | None = None) -> Path:
    """The whole checkpoint that ``path`` is, or that the run in ``path`` has.

    Args:
        step: of the run's checkpoint; left out: the newest whole one.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    if (path / manifest.NAME).exists():
        if step is not None:
            raise CheckpointError(f"{path}: is one checkpoint and has no steps to choose from")
        check(path)
        return path
    run = RunFolder(path)
    if not run.holds_a_run():
        what = "neither a run nor a checkpoint" if path.exists() else "no such folder"
        raise CheckpointError(f"{path}: {what}")
    if step is None:
        newest = newest_whole(run.checkpoints)
        if newest is None:
            raise CheckpointError(f"{path}: holds no whole checkpoint yet")
        return newest.path
    there = {entry.step: entry.path for entry in entries(run.checkpoints)}
    if step not in there:
        kept = ", ".join(map(str, there)) or "none"
        raise CheckpointError(f"{path}: no checkpoint of step {step}; there is: {kept}")
    check(there[step])
    return there[step]


def check(path: Path) -> Catalogue:
    """Every byte is as written, and every element of every tensor is there once.

    Raises:
        CheckpointError: the file that is damaged, or the tensor that is not whole.
    """
    manifest.verify(path)
    tensors = manifest.tensors(path)
    try:
        catalogue.check(tensors)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
    return tensors


def consolidate(path: Path, out: Path) -> None:
    """Write the checkpoint in ``path`` to the folder ``out`` as one process would have saved it.

    Raises:
        CheckpointError: ``out`` is not empty, or ``path`` is damaged.
    """
    with new_folder(out) as folder:
        files: manifest.Files = {}
        tensors: Catalogue = {}
        for part, named in manifest.tensors(path).items():
            specs = {name: saved.spec for name, saved in named.items()}
            with Reader(path, part) as reader:
                files |= write_part(folder, part, specs, reader.tensor)
            tensors[part] = whole_part(part, specs)
        shutil.copyfile(path / STATE, folder / STATE)
        manifest.sync(folder / STATE)
        files[STATE] = manifest.measure(folder / STATE)
        manifest.write(folder, files, tensors, ranks=1)


def write_part(
    folder: Path, part: str, specs: Mapping[str, Spec], read: Callable[[str], Tensor]
) -> manifest.Files:
    """The one file of a part's whole tensors."""
    file = f"{part}.safetensors"
    return {file: tensorfile.write(folder / file, specs, read)}


def whole_part(part: str, specs: Mapping[str, Spec]) -> dict[str, Saved]:
    """The manifest's entries for what :func:`write_part` writes."""
    return {
        name: Saved(spec, (Held(f"{part}.safetensors", (0,) * len(spec.shape), spec.shape),))
        for name, spec in specs.items()
    }


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A folder to write in, which becomes ``out`` when all has gone well.

    Raises:
        CheckpointError: there is something in ``out``, or it cannot be made.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CheckpointError(f"{out}: is there and not empty; name a new folder")
    out = out.absolute()
    temporary = out.with_name(f".{out.name}.tmp")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        remove(temporary)
        temporary.mkdir()
        yield temporary
        put_in_place(temporary, out)
    except OSError as error:
        raise CheckpointError(f"{out}: cannot be written: {error}") from error
    finally:
        remove(temporary)
