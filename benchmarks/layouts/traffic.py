"""Bytes that a rank sends, counted where torch dispatches its collectives.

Every collective of ``torch.distributed`` and every functional one is an operator, and so are the
sends of a pipeline. A collective counts as what a ring sends per rank (Patarasuk and Yuan 2009):

=========================  ===============================
all-reduce                 2 (n - 1) / n of the tensor
all-gather                 (n - 1) / n of the whole result
reduce-scatter             (n - 1) / n of the whole input
all-to-all                 (n - 1) / n of the input
send, broadcast            the tensor
=========================  ===============================
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _resolve_process_group
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_KINDS = {
    "allreduce_": "all-reduce",
    "allreduce_coalesced_": "all-reduce",
    "all_reduce": "all-reduce",
    "all_reduce_": "all-reduce",
    "_allgather_base_": "all-gather",
    "allgather_": "all-gather",
    "all_gather_into_tensor": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "reduce_scatter_tensor": "reduce-scatter",
    "alltoall_base_": "all-to-all",
    "all_to_all_single": "all-to-all",
    "send": "send",
    "broadcast_": "broadcast",
}
_FREE = {"recv_", "wait_tensor", "_wrap_tensor_autograd", "barrier", "check_for_nan"}


@dataclass(frozen=True)
class Sent:
    """One kind of transfer along some axes.

    Attributes:
        axes: those on which the ranks of its group differ, such as ``replicate+context``.
    """

    kind: str
    axes: str


class Traffic(TorchDispatchMode):
    """Inside, every transfer of this rank is counted.

    Args:
        sizes: ranks on each axis of the mesh, from the outside in.

    Attributes:
        bytes: sent by this rank.
        calls: how often.

    Raises:
        ValueError: a collective whose cost is not known.
    """

    def __init__(self, sizes: Mapping[str, int]) -> None:
        super().__init__()
        self.sizes = sizes
        self.bytes: Counter[Sent] = Counter()
        self.calls: Counter[Sent] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it becomes plain tensors and their collectives first
        if func.namespace in ("c10d", "_c10d_functional"):
            self._count(func._opname, args)
        return func(*args, **(kwargs or {}))

    def _count(self, name: str, args: tuple[Any, ...]) -> None:
        if name in _FREE:
            return
        if name not in _KINDS:
            raise ValueError(f"the bytes of {name} are not known")
        kind, ranks = _KINDS[name], dist.get_process_group_ranks(_group(args))
        n, size = len(ranks), _bytes(args[0])
        if name == "all_gather_into_tensor":
            size *= n  # its argument is one rank's part
        if name in ("_reduce_scatter_base_", "alltoall_base_"):
            size = _bytes(args[1])  # after the output
        sent = Sent(kind, self._axes(ranks))
        share = {"all-reduce": 2 * (n - 1) / n, "send": 1.0, "broadcast": 1.0}
        self.bytes[sent] += round(size * share.get(kind, (n - 1) / n))
        self.calls[sent] += 1

    def _axes(self, ranks: list[int]) -> str:
        """The axes on which the ranks differ."""
        found, inner = [], 1
        for axis, size in reversed(list(self.sizes.items())):
            if len({rank // inner % size for rank in ranks}) > 1:
                found.append(axis)
            inner *= size
        return "+".join(reversed(found))


def _group(args: tuple[Any, ...]) -> dist.ProcessGroup:
    for arg in args:
        if isinstance(arg, torch.ScriptObject):
            try:
                return dist.ProcessGroup.unbox(arg)
            except RuntimeError:
                continue  # a reduction, not a group
    name = args[-1]
    return name if isinstance(name, dist.ProcessGroup) else _resolve_process_group(name)


def _bytes(arg: Any) -> int:
    return sum(leaf.nbytes for leaf in tree_leaves(arg) if isinstance(leaf, Tensor))
