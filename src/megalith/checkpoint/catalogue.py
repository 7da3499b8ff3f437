"""Which tensors a checkpoint holds, and which file has which box of each."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from megalith.checkpoint.tensorfile import Spec
from megalith.core.errors import CheckpointError

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Where a part begins in the whole tensor, and its shape."""


@dataclass(frozen=True)
class Held:
    """One box of a tensor and the file that has it, under the tensor's name."""

    file: str
    start: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Saved:
    """A whole tensor and where its parts lie."""

    spec: Spec
    held: tuple[Held, ...]


Catalogue = dict[str, dict[str, Saved]]
"""The tensors of each part (``model``, ``optimizer``, ``ema``) by name."""


def overlap(one: Box, other: Box) -> Box | None:
    """What two boxes share, or ``None``."""
    start = tuple(map(max, one[0], other[0]))
    ends = [
        min(a + m, b + n) for a, m, b, n in zip(one[0], one[1], other[0], other[1], strict=True)
    ]
    shape = tuple(end - first for first, end in zip(start, ends, strict=True))
    return (start, shape) if all(length > 0 for length in shape) else None


def check(catalogue: Catalogue) -> None:
    """Every element of every tensor is in exactly one file.

    Raises:
        CheckpointError: one is missing, or in two files; the tensor and the files are named.
    """
    for part, tensors in catalogue.items():
        for name, saved in tensors.items():
            _check_tiling(f"{part} '{name}'", saved)


def _check_tiling(what: str, saved: Saved) -> None:
    whole = saved.spec.shape
    for held in saved.held:
        sides = zip(held.start, held.shape, whole, strict=True)
        inside = len(held.start) == len(whole) and all(
            a >= 0 and n >= 0 and a + n <= size for a, n, size in sides
        )
        if not inside:
            raise CheckpointError(f"{what}: {held.file} holds a part outside of {list(whole)}")
    for one, other in _clashes(saved.held):
        raise CheckpointError(f"{what}: {one.file} and {other.file} both hold some elements")
    missing = math.prod(whole) - sum(math.prod(held.shape) for held in saved.held)
    if missing:
        raise CheckpointError(f"{what}: {missing} of {math.prod(whole)} elements are in no file")


def _clashes(held: Iterable[Held]) -> Iterator[tuple[Held, Held]]:
    """Pairs that overlap. Sweeps along the most divided dimension, so few are compared."""
    parts = [one for one in held if math.prod(one.shape)]
    if len(parts) < 2:
        return
    dims = range(len(parts[0].start))
    along = max(dims, key=lambda dim: len({one.start[dim] for one in parts}), default=None)
    if along is None:
        yield parts[0], parts[1]  # two scalars
        return
    open_: list[Held] = []
    for one in sorted(parts, key=lambda one: one.start[along]):
        open_ = [o for o in open_ if o.start[along] + o.shape[along] > one.start[along]]
        for other in open_:
            if overlap((one.start, one.shape), (other.start, other.shape)):
                yield other, one
        open_.append(one)


def merge(catalogues: Iterable[Catalogue]) -> Catalogue:
    """What several ranks hold, together.

    Raises:
        CheckpointError: they disagree on a tensor's shape or dtype.
    """
    merged: Catalogue = {}
    for catalogue in catalogues:
        for part, tensors in catalogue.items():
            found = merged.setdefault(part, {})
            for name, saved in tensors.items():
                known = found.setdefault(name, Saved(saved.spec, ()))
                if known.spec != saved.spec:
                    raise CheckpointError(
                        f"{part} '{name}': {saved.held[0].file} says {saved.spec}, "
                        f"{known.held[0].file} {known.spec}"
                    )
                found[name] = Saved(known.spec, known.held + saved.held)
    return merged


def to_json(catalogue: Catalogue) -> dict[str, Any]:
    """For a manifest or a listing."""
    return {
        part: {
            name: {
                "dtype": saved.spec.dtype,
                "shape": list(saved.spec.shape),
                "held": [[one.file, list(one.start), list(one.shape)] for one in saved.held],
            }
            for name, saved in tensors.items()
        }
        for part, tensors in catalogue.items()
    }


def from_json(content: Mapping[str, Any]) -> Catalogue:
    """What :func:`to_json` made."""
    return {
        part: {
            name: Saved(
                Spec(entry["dtype"], tuple(entry["shape"])),
                tuple(Held(f, tuple(start), tuple(shape)) for f, start, shape in entry["held"]),
            )
            for name, entry in tensors.items()
        }
        for part, tensors in content.items()
    }


def of_files(folder: Path, files: Iterable[str]) -> Catalogue:
    """Of format 1, where ``model.safetensors`` holds the whole tensors of ``model``.

    Raises:
        CheckpointError: a file is missing or no safetensors file.
    """
    found: Catalogue = {}
    for file in files:
        if not file.endswith(".safetensors"):
            continue
        part = found.setdefault(file.removesuffix(".safetensors"), {})
        try:
            with safe_open(folder / file, "pt") as opened:
                for name in opened.keys():  # noqa: SIM118 (not a dict)
                    entry = opened.get_slice(name)
                    shape = tuple(entry.get_shape())
                    held = Held(file, (0,) * len(shape), shape)
                    part[name] = Saved(Spec(entry.get_dtype(), shape), (held,))
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{folder}: '{file}' is missing or damaged: {error}") from error
    return found
