"""The IDX format of MNIST and its relatives, checked as it is read.

A file is a big-endian header (two zero bytes, a type code, the number of dimensions, then each
dimension as 32 bits) and the values. Source: LeCun, Cortes and Burges, "The MNIST database".
"""

from __future__ import annotations

import gzip
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from megalith.core.errors import DataError

_UNSIGNED_BYTE = 0x08
_DIMENSIONS = {"images": 3, "labels": 1}


@dataclass(frozen=True)
class Labelled:
    """Images with a class each.

    Attributes:
        images: uint8 ``[n, height, width]``.
        labels: integers ``[n]``, from 0.
    """

    images: np.ndarray
    labels: np.ndarray


def read_labelled(folder: Path, part: Literal["train", "t10k"]) -> Labelled:
    """The images and labels of ``part`` under MNIST's file names, plain or gzipped.

    Raises:
        DataError: a file is missing or damaged, or there are not as many labels as images.
    """
    arrays: dict[str, np.ndarray] = {}
    for kind in ("images", "labels"):
        file = find(folder, part, kind)
        if file is None:
            raise DataError(f"'{folder}': no '{_names(part, kind)[0]}', plain or with .gz")
        arrays[kind] = read_idx(file, _DIMENSIONS[kind])
    images, labels = arrays["images"], arrays["labels"]
    if len(images) != len(labels):
        raise DataError(f"'{folder}': {part} has {len(images)} images but {len(labels)} labels")
    if not images.size:
        raise DataError(f"'{folder}': {part} has no images")
    return Labelled(images, labels)


def find(folder: Path, part: str, kind: Literal["images", "labels"] | str) -> Path | None:
    """The file of ``part`` (``train`` or ``t10k``) with ``kind``, or ``None``."""
    for name in _names(part, kind):
        for file in (folder / name, folder / f"{name}.gz"):
            if file.is_file():
                return file
    return None


def read_idx(file: Path, dimensions: int) -> np.ndarray:
    """The unsigned bytes in ``file``, gzipped if its name ends in ``.gz``.

    Args:
        dimensions: how many the file must have.

    Raises:
        DataError: the file cannot be read, or is not such an array.
    """
    try:
        data = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"'{file}': cannot be read ({error})") from error
    wanted = bytes([0, 0, _UNSIGNED_BYTE, dimensions])
    if data[:4] != wanted:
        raise DataError(
            f"'{file}': starts with {data[:4].hex() or 'nothing'}, not {wanted.hex()} "
            f"(IDX, bytes, {dimensions} dimension{'s' if dimensions > 1 else ''})"
        )
    start = 4 + 4 * dimensions
    if len(data) < start:
        raise DataError(f"'{file}': ends inside its header")
    shape = tuple(int(n) for n in np.frombuffer(data, ">u4", dimensions, 4))
    expected = start + int(np.prod(shape, dtype=np.int64))
    if len(data) != expected:
        raise DataError(
            f"'{file}': has {len(data):,} bytes, its header ({' x '.join(map(str, shape))}) "
            f"asks for {expected:,}"
        )
    return np.frombuffer(data, np.uint8, offset=start).reshape(shape).copy()


def _names(part: str, kind: str) -> tuple[str, str]:
    dimensions = _DIMENSIONS[kind]
    return f"{part}-{kind}-idx{dimensions}-ubyte", f"{part}-{kind}.idx{dimensions}-ubyte"
