"""Safetensors files written one tensor after another; the library's own writer wants all at once.

The format is an 8-byte length, a JSON header and the tensors' bytes, so the header can be written
from shapes alone, and the checksum is computed on the way.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megalith.core.errors import CheckpointError

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""The format's names of dtypes."""

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Spec:
    """What a header says of a tensor.

    Attributes:
        dtype: by the format's name.
    """

    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Size of the values."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


@dataclass(frozen=True)
class Written:
    """A file on disk: its size and checksum."""

    bytes: int
    sha256: str


def spec(tensor: Tensor, name: str) -> Spec:
    """The header's entry for ``tensor``.

    Raises:
        CheckpointError: the format has no such dtype.
    """
    if tensor.dtype not in _NAMES:
        raise CheckpointError(f"'{name}' is {tensor.dtype}, which safetensors cannot hold")
    return Spec(_NAMES[tensor.dtype], tuple(tensor.shape))


def write(path: Path, specs: Mapping[str, Spec], read: Callable[[str], Tensor]) -> Written:
    """Write the tensors of ``specs`` and force them to disk.

    Args:
        read: gives a tensor by name, on any device; one is held at a time.
    """
    # Wide values first, as the library does: then each tensor lies where its width divides.
    order = sorted(specs, key=lambda name: (-DTYPES[specs[name].dtype].itemsize, name))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in order:
        start, end = end, end + specs[name].bytes
        entry = {"dtype": specs[name].dtype, "shape": specs[name].shape}
        header[name] = entry | {"data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for block in (len(text).to_bytes(8, "little"), text):
            file.write(block)
            digest.update(block)
        for name in order:
            tensor = read(name).detach()
            assert spec(tensor, name) == specs[name], name
            values = tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().data
            file.write(values)
            digest.update(values)
        file.flush()
        os.fsync(file.fileno())
    return Written(8 + len(text) + end, digest.hexdigest())
