"""Memory of each rank by ZeRO stage, on four ranks, beside what the stage promises.

    python benchmarks/layout_memory.py           # the table, kept in benchmarks/results

Bytes of live tensors, not of the process: after every operation the storages that are still
referenced are added up. The promise for float32 and AdamW: 4 bytes of weights, 4 of gradients and
8 of optimizer state per parameter, of which stage 1 cuts the state, 2 the gradients too, and 3
the weights too (Rajbhandari et al. 2020, ZeRO, figure 1). FSDP2 keeps the rank's own part of the
weights beside the whole ones in stages 1 and 2: 4 / n bytes more.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from layouts import problem
from layouts.problem import Size
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megalith.core import environment
from megalith.core.launch import start
from megalith.layout.pieces import local
from megalith.layout.units import named_parameters

RANKS = 4
SIZE = Size(layers=8, width=512, sequence=64, micro_batch=1, micros=2 * RANKS)
LAYOUTS = {
    "replicate 4": ["layout.replicate=4"],
    "shard 4 (zero 1)": ["layout.shard=4", "layout.zero=1"],
    "shard 4 (zero 2)": ["layout.shard=4", "layout.zero=2"],
    "shard 4 (zero 3)": ["layout.shard=4", "layout.zero=3"],
}
_CUT = {"replicate 4": 0, "shard 4 (zero 1)": 1, "shard 4 (zero 2)": 2, "shard 4 (zero 3)": 3}


class Live(TorchDispatchMode):
    """Inside, the bytes of the tensor storages that operations use and that still live.

    Attributes:
        now: after the last operation.
        peak: the most of them.
    """

    def __init__(self, known: Sequence[Tensor] = ()) -> None:
        super().__init__()
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.now = self.peak = 0
        self._see(list(known))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it becomes plain tensors first
        result = func(*args, **(kwargs or {}))
        self._see([*tree_leaves(args), *tree_leaves(result)])
        self.now = self.bytes()
        self.peak = max(self.peak, self.now)
        return result

    def bytes(self) -> int:
        """Of all storages that live now; FSDP2 empties some without giving them up."""
        living = [reference() for reference in self._storages.values()]
        return sum(storage.nbytes() for storage in living if storage is not None)

    def _see(self, values: Sequence[Any]) -> None:
        for value in values:
            if isinstance(value, Tensor) and not isinstance(value, DTensor):
                storage = value.untyped_storage()
                if id(storage) not in self._storages:
                    forget = self._forget(id(storage))
                    self._storages[id(storage)] = weakref.ref(storage, forget)

    def _forget(self, key: int) -> Any:
        return lambda _: self._storages.pop(key, None)


def measure(layout: Sequence[str]) -> dict[str, int]:
    """Run on every rank: bytes on rank 0 in the second update."""
    built = problem.build(SIZE, layout)
    parameters = dict(named_parameters(built.model))
    found: dict[str, int] = {}
    for number in range(2):  # optimizer state and buffers are there after the first
        state = list(built.optimizers.state_tensors().values())
        live = Live([local(t) for t in [*parameters.values(), *state]])
        at_rest = live.bytes()
        batches = problem.mine(built, problem.update(SIZE, number))
        with live:
            measured = built.backward(batches)
            grads = [local(p.grad) for p in parameters.values() if p.grad is not None]
            found = {
                "parameters": sum(p.numel() for p in parameters.values()),
                "weights": sum(local(p).nbytes for p in parameters.values()),
                "gradients": sum(grad.nbytes for grad in grads),
                "state": sum(local(t).nbytes for t in state),
                "at_rest": at_rest,
                "in_backward": live.peak,
            }
            built.update(measured)
        found["peak"] = live.peak
    dist.barrier()
    return found


def promise(parameters: int, stage: int) -> float:
    """Bytes of weights, gradients and optimizer state at a stage; 0 is no ZeRO."""
    weights, grads, state = (1 / RANKS if stage >= n else 1 for n in (3, 2, 1))
    own = 1 / RANKS if stage in (1, 2) else 0
    return parameters * (4 * (weights + own) + 4 * grads + 8 * state)


def main() -> None:
    """Measure every stage and keep the result."""
    rows = []
    for name, layout in LAYOUTS.items():
        row = {"layout": name, **start(RANKS, measure, (layout,), timeout=300, fork=True)}
        row["promise"] = promise(row["parameters"], _CUT[name])
        rows.append(row)
        told = {
            key: f"{row[key] / 2**20:.1f}" for key in row if key not in ("layout", "parameters")
        }
        print(name, told, flush=True)
    folder = Path(__file__).parent / "results"
    result = {"machine": environment.describe(), "size": asdict(SIZE), "rows": rows}
    (folder / "layout_memory.json").write_text(json.dumps(result, indent=1, default=str) + "\n")


if __name__ == "__main__":
    main()
