"""Values between the processes of one run, as bytes through a pipe.

Torch would send a tensor as a file descriptor, which is void once its sender has ended; here a
tensor goes by value. Nothing of this is ever written to disk or read from it.
"""

from __future__ import annotations

import io
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import Tensor, nn


def pack(value: Any) -> bytes:
    """``value`` as bytes; tensors in it are copied to the host and lose their graph."""
    buffer = io.BytesIO()
    pickler = ForkingPickler(buffer)
    pickler.dispatch_table[Tensor] = _reduce
    pickler.dispatch_table[nn.Parameter] = _reduce
    pickler.dump(value)
    return buffer.getvalue()


def unpack(data: bytes) -> Any:
    """The value that :func:`pack` was given. Only for bytes from a process of this run."""
    return ForkingPickler.loads(data)  # pyright: ignore[reportAttributeAccessIssue]


def _reduce(tensor: Tensor) -> tuple[Any, tuple[bytes, torch.dtype, tuple[int, ...]]]:
    whole = tensor.detach().to("cpu").contiguous().reshape(-1)
    return _rebuild, (whole.view(torch.uint8).numpy().tobytes(), tensor.dtype, tuple(tensor.shape))


def _rebuild(data: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)
