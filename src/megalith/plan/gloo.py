"""What gloo takes for itself while a collective runs on the host.

Torch's ``ProcessGroupGloo`` has two collectives that copy (``ProcessGroupGloo.cpp``, torch 2.13):

- an all-gather receives into one flat buffer of the result's size and copies from it into the
  result (``AsyncAllgatherWork::allgather``: ``newLikeFlat``);
- a reduce-scatter is an all-reduce of a copy of its input, of which a rank keeps its part
  (``reduce_scatter_tensor_coalesced``: ``clone``).

A sum, an exchange and what is sent to one rank work in place. The copy ends with the collective,
and the step waits for each of those two where it starts it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from megalith.plan.tracker import Tracker

_c10d, _functional = torch.ops.c10d, torch.ops._c10d_functional
_GATHERS = (_c10d._allgather_base_.default, _functional.all_gather_into_tensor.default)
_SCATTERS = (_c10d._reduce_scatter_base_.default, _functional.reduce_scatter_tensor.default)


class Copies(TorchDispatchMode):
    """Lets ``tracker`` see gloo's copies; entered after it."""

    def __init__(self, tracker: Tracker) -> None:
        super().__init__()
        self._tracker = tracker

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if any(kind is DTensor for kind in types):
            return NotImplemented
        result = function(*args, **(kwargs or {}))
        copied = _copied(function, args, result)
        if copied is not None:
            with self._tracker.inside(role="communication"):
                torch.empty_like(copied)
        return result


def _copied(function: Any, args: Any, result: Any) -> Tensor | None:
    """What gloo makes a copy of."""
    if function in _GATHERS:
        return args[0] if function.namespace == "c10d" else result
    if function in _SCATTERS:
        return args[1] if function.namespace == "c10d" else args[0]
    return None
