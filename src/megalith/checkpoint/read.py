"""Reading a checkpoint: from the files of any layout, exactly the slices that are wanted."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megalith.checkpoint import manifest
from megalith.checkpoint.catalogue import Saved, overlap
from megalith.checkpoint.tensorfile import DTYPES
from megalith.core.errors import CheckpointError
from megalith.layout.pieces import Piece, whole

_MAPPED = 32 * 2**20
"""Bytes read until the files are let go: what was read from a mapped file stays resident."""


class Reader:
    """The tensors of one part of a checkpoint.

    Attributes:
        saved: by name, what can be read.

    Raises:
        CheckpointError: there is no such checkpoint, or it has no such part.
    """

    def __init__(self, path: Path, part: str) -> None:
        found = manifest.tensors(path)
        if part not in found:
            raise CheckpointError(f"{path}: holds no '{part}' tensors")
        self.path = path
        self.saved: dict[str, Saved] = found[part]
        self._files = Files(path)

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *error: object) -> None:
        self._files.close()

    def tensor(self, name: str, device: torch.device | str = "cpu") -> Tensor:
        """A whole tensor."""
        made = self.empty(name, self.saved[name].spec.shape, device)
        self.copy(name, whole(made))
        return made

    def empty(
        self, name: str, shape: tuple[int, ...], device: torch.device | str = "cpu"
    ) -> Tensor:
        """A place for a part of a tensor, in its dtype."""
        return torch.empty(shape, dtype=DTYPES[self.saved[name].spec.dtype], device=device)

    @torch.no_grad()
    def copy(self, name: str, piece: Piece) -> None:
        """Copy what is saved into ``piece.tensor``, in place.

        Raises:
            CheckpointError: a file is damaged, or they do not hold all of it.
        """
        wanted = (piece.start, tuple(piece.tensor.shape))
        copied = 0
        for held in self.saved[name].held:
            shared = overlap((held.start, held.shape), wanted)
            if shared is None:
                continue
            start, shape = shared
            values = self._files.read(held.file, name, _slices(start, shape, held.start))
            piece.tensor[_slices(start, shape, piece.start)].copy_(values)
            copied += math.prod(shape)
        if copied != piece.tensor.numel():
            raise CheckpointError(f"{self.path}: '{name}' is not whole in the files")


class Files:
    """Safetensors files of one folder, opened when needed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[str, Any] = {}
        self._stack = ExitStack()
        self._read = 0

    def read(self, file: str, name: str, slices: tuple[slice, ...]) -> Tensor:
        """A box of a tensor, in memory of the file's map.

        Raises:
            CheckpointError: the file is missing, damaged, or has no such tensor.
        """
        if self._read > _MAPPED:
            self.close()
        try:
            if file not in self._open:
                opened = safe_open(self._folder / file, "pt")
                self._open[file] = self._stack.enter_context(opened)
            opened = self._open[file]
            values = opened.get_slice(name)[slices] if slices else opened.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{self._folder}: '{file}' is damaged: {error}") from error
        self._read += values.nbytes
        return values

    def close(self) -> None:
        """Let go of all files."""
        self._stack.close()
        self._open, self._read = {}, 0


def load_into(
    path: Path,
    part: str,
    wanted: Mapping[str, Piece],
    *,
    names: Collection[str] | None = None,
) -> None:
    """Copy into each piece's tensor, in place, what ``path`` holds of it under any layout.

    Only the slices that overlap are read. Values are converted to the tensor's dtype.

    Args:
        names: of all tensors of the whole model, of which ``wanted`` may be a part.

    Raises:
        CheckpointError: a tensor is not in the checkpoint, has another shape there, or is there
            and not in ``names``.
    """
    with Reader(path, part) as reader:
        foreign = sorted(reader.saved.keys() - set(names)) if names is not None else []
        for name in [*sorted(wanted.keys() - reader.saved.keys()), *foreign]:
            where = "the model" if name in reader.saved else "the checkpoint"
            raise CheckpointError(f"{path}: '{name}' is missing in {where}; another recipe's?")
        for name, piece in wanted.items():
            saved = reader.saved[name].spec.shape
            if saved != tuple(piece.shape):
                raise CheckpointError(
                    f"{path}: '{name}' has shape {list(saved)}, the model's is {list(piece.shape)}"
                )
        for name, piece in wanted.items():
            reader.copy(name, piece)


def load(path: Path, part: str, device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """The whole tensors of one part, under whatever layout they were saved.

    Raises:
        CheckpointError: the checkpoint has no such part.
    """
    with Reader(path, part) as reader:
        return {name: reader.tensor(name, device) for name in reader.saved}


def holds(path: Path, part: str) -> bool:
    """Whether the checkpoint has a part, such as ``ema``.

    Raises:
        CheckpointError: it is not a whole checkpoint.
    """
    return part in manifest.tensors(path)


def _slices(
    start: tuple[int, ...], shape: tuple[int, ...], origin: tuple[int, ...]
) -> tuple[slice, ...]:
    """A box of the whole tensor as an index into a part that begins at ``origin``."""
    return tuple(
        slice(first - zero, first - zero + length)
        for first, length, zero in zip(start, shape, origin, strict=True)
    )
