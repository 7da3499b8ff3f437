"""One rank of a large job, alone in its process: groups of any size that send nothing."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed._mesh_layout import _MeshLayout
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.testing._internal.distributed.fake_pg import FakeStore

from megalith.layout import tensor as tensor_layout

_MESH = (
    "__init__",
    "__getitem__",
    "_concatenate",
    "_flatten",
    "_unflatten",
    "mesh",
    "get_coordinate",
    "_create_sub_mesh",
    "size",
)


def join(ranks: int, rank: int, device: str) -> None:
    """Be rank ``rank`` of ``ranks``; for a worker process of the planner, once."""
    for name in _MESH:
        if name in DeviceMesh.__dict__:
            _really(DeviceMesh, name)
    _really(_MeshLayout, "remap_to_tensor")
    # DTensor asks for shapes by running operators on whole tensors, which no rank ever has: in a
    # mode of its own, so that they are not taken for the step's.
    _really(ShardingPropagator, "_propagate_tensor_meta_non_cached")
    _fsdp_param._chunk_with_empty = _chunks  # pyright: ignore
    tensor_layout.drawn = _unfaked(
        tensor_layout.drawn
    )  # a number of the host's, of which no shape is made
    backend = "fake" if device == "cpu" else f"cpu:fake,{device}:fake"
    dist.init_process_group(backend, rank=rank, world_size=ranks, store=FakeStore())


def _really(kind: type, name: str) -> None:
    """Let a method work on real tensors: a mesh's table of ranks is data, not a shape."""
    found = kind.__dict__[name]
    if isinstance(found, property):
        setattr(kind, name, property(_unfaked(found.fget)))
    elif isinstance(found, staticmethod | classmethod):
        setattr(kind, name, type(found)(_unfaked(found.__func__)))
    else:
        setattr(kind, name, _unfaked(found))


def _unfaked(function: Any) -> Any:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with unset_fake_temporarily():
            return function(*args, **kwargs)

    return run


class _Chunks:
    """A parameter's parts, made when they are asked for: of a thousand ranks, one needs its own."""

    def __init__(self, tensor: Tensor, count: int, dim: int) -> None:
        self._tensor, self._count, self._dim = tensor, count, dim

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Tensor:
        size = self._tensor.size(self._dim)
        each = -(-size // self._count)
        first, end = min(index * each, size), min((index + 1) * each, size)
        if first == end:
            return self._tensor.new_empty(0)
        return self._tensor.narrow(self._dim, first, end - first)

    def __iter__(self) -> Iterator[Tensor]:
        return (self[index] for index in range(self._count))


def _chunks(tensor: Tensor, num_chunks: int, dim: int) -> Any:
    return _Chunks(tensor, num_chunks, dim)


_aten = torch.ops.aten
_IN_PLACE = (_aten._fused_sgd_.default, _aten._fused_sgd_.tensor_lr)
"""Operators that make no tensor, which torch 2.13 knows of real tensors only."""


class _Mode(torch._subclasses.FakeTensorMode):
    """There is one for all tensors of a trace.

    A tensor knows its mode. Copying a module would copy the mode too, and tensors of another mode
    are converted at every use: their views would be memory of their own.
    """

    def __deepcopy__(self, memo: Any) -> _Mode:
        return self

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _aten._local_scalar_dense.default and args[0].is_floating_point():
            return 1.0  # an optimizer reads a norm on the host; no size depends on it
        if func is _aten._local_scalar_dense.default and args[0].dtype == torch.bool:
            return False  # a check of numbers that are not there: nothing is wrong with them
        if func in _IN_PLACE:
            return None
        if func is _aten._pin_memory.default:
            func, kwargs = _aten.clone.default, None  # where the host's memory lies is no matter
        return super().dispatch(func, types, args, kwargs)


def fake_mode() -> torch._subclasses.FakeTensorMode:
    """The mode in which a step is traced."""
    return _Mode(allow_non_fake_inputs=True)
