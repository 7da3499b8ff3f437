"""Pipeline parallelism: each rank holds some of the layers, and hidden states travel.

The micro-batches of an update are what flows through the pipeline. Shapes may differ from one to
the next; any task and model works that can say what the model is called with.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megalith.layout import schedule
from megalith.layout.mesh import Mesh
from megalith.layout.schedule import Pass

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_HEADER = 8  # numbers: dtype, dimensions, sizes
Shape = tuple[tuple[int, ...], torch.dtype]


@dataclass
class Pipeline:
    """One rank's part of a pipeline.

    Attributes:
        stages: this rank's, by their number in the whole pipeline.
        total: stages of the whole pipeline.
        kind: the schedule.
        sent: shape and dtype of the hidden states of each kind of micro-batch, once known.
        received: likewise.
    """

    mesh: Mesh
    stages: dict[int, nn.Module]
    total: int
    kind: str
    device: torch.device
    sent: dict[tuple[Any, ...], Shape] = field(default_factory=dict, repr=False)
    received: dict[tuple[Any, ...], Shape] = field(default_factory=dict, repr=False)

    def run(
        self,
        micros: int,
        forward: Callable[[int, int, Tensor | None], Tensor],
        before_backward: Callable[[int, bool], None] | None,
        shape_key: Callable[[int], tuple[Any, ...]],
    ) -> None:
        """Run all micro-batches through this rank's stages.

        Args:
            micros: number of micro-batches.
            forward: ``f(stage, micro, received)``, what the stage makes: hidden states, or on the
                last one the scalar that backward starts from.
            before_backward: ``f(stage, last)``, called before each backward pass; ``None``: forward
                passes only.
            shape_key: equal for two micro-batches whose hidden states have one shape.
        """
        with_backward = before_backward is not None
        ranks, rank = self.mesh.sizes["pipeline"], self.mesh.place["pipeline"]
        each = self.total // ranks
        kind = self.kind if with_backward else "forward"
        orders = [schedule.order(kind, r, ranks, each, micros) for r in range(ranks)]
        inputs: dict[Pass, Tensor] = {}  # what a pass takes from the stage before or after
        made: dict[tuple[int, int], tuple[Tensor | None, Tensor]] = {}
        arriving: dict[Pass, dist.Work] = {}
        sending: list[tuple[dist.Work, Tensor]] = []
        for tick in schedule.timetable(orders, self.total)[rank]:
            result = None
            if (work := tick.work) is not None:
                if work in arriving:
                    arriving.pop(work).wait()
                given = inputs.pop(work, None)
                if work.kind == "forward":
                    result = self._forward(work, given, forward, made, keep=with_backward)
                else:
                    assert before_backward is not None
                    before_backward(work.stage, work.micro == micros - 1)
                    result = _backward(made.pop((work.stage, work.micro)), given)
                follower = _follower(work, self.total)
                if follower is not None and follower.stage in self.stages:
                    assert result is not None
                    inputs[follower] = result.detach()
            _wait(sending)  # since the last tick: what was sent is needed no longer
            sending = []
            for follower, tensor, handle in self._transfer(tick, result, shape_key):
                if follower is None:
                    sending.append((handle, tensor))
                else:
                    inputs[follower], arriving[follower] = tensor, handle
        _wait(sending)

    def _forward(
        self,
        work: Pass,
        given: Tensor | None,
        forward: Callable[[int, int, Tensor | None], Tensor],
        made: dict[tuple[int, int], tuple[Tensor | None, Tensor]],
        *,
        keep: bool,
    ) -> Tensor:
        if given is not None and keep:
            given.requires_grad_()
        result = forward(work.stage, work.micro, given)
        if keep:
            made[work.stage, work.micro] = (given, result)
        return result

    def _transfer(
        self,
        tick: schedule.Tick,
        result: Tensor | None,
        shape_key: Callable[[int], tuple[Any, ...]],
    ) -> list[tuple[Pass | None, Tensor, dist.Work]]:
        """Start a tick's sends and receives; of each, the pass that waits for it, if it is here."""
        self._exchange_shapes(tick, result, shape_key)
        operations, whose = [], []
        for _, to in tick.sends:
            assert result is not None
            tensor = result.detach().contiguous()
            operations.append(self._operation(dist.isend, tensor, to))
            whose.append((None, tensor))
        for work, source in tick.receives:
            # A gradient has the shape of the hidden states that went the other way.
            known = self.received if work.kind == "forward" else self.sent
            shape, dtype = known[shape_key(work.micro)]
            tensor = torch.empty(shape, dtype=dtype, device=self.device)
            operations.append(self._operation(dist.irecv, tensor, source))
            whose.append((_follower(work, self.total), tensor))
        handles = dist.batch_isend_irecv(operations) if operations else []
        if len(handles) < len(operations):  # one handle for all, on backends that join them
            handles = handles * len(operations)
        return [(f, t, h) for (f, t), h in zip(whose, handles, strict=True)]

    def _exchange_shapes(
        self,
        tick: schedule.Tick,
        result: Tensor | None,
        shape_key: Callable[[int], tuple[Any, ...]],
    ) -> None:
        """Tell the shape of hidden states, once for each kind of micro-batch."""
        operations, headers = [], {}
        for work, to in tick.sends:
            key = shape_key(work.micro)
            if work.kind == "forward" and key not in self.sent:
                assert result is not None
                self.sent[key] = (tuple(result.shape), result.dtype)
                numbers = [_DTYPES.index(result.dtype), result.ndim, *result.shape]
                numbers += [0] * (_HEADER - len(numbers))
                header = torch.tensor(numbers, device=self.device)
                operations.append(self._operation(dist.isend, header, to))
        for work, source in tick.receives:
            key = shape_key(work.micro)
            if work.kind == "forward" and key not in self.received:
                headers[key] = torch.zeros(_HEADER, dtype=torch.int64, device=self.device)
                operations.append(self._operation(dist.irecv, headers[key], source))
        for handle in dist.batch_isend_irecv(operations) if operations else []:
            handle.wait()
        for key, header in headers.items():
            dtype, ndim, *shape = header.tolist()
            self.received[key] = (tuple(shape[:ndim]), _DTYPES[dtype])

    def _operation(self, kind: Any, tensor: Tensor, rank: int) -> dist.P2POp:
        group = self.mesh.group("pipeline")
        assert group is not None
        return dist.P2POp(kind, tensor, dist.get_global_rank(group, rank), group)


def _wait(sending: list[tuple[dist.Work, Tensor]]) -> None:
    for handle, _ in sending:
        handle.wait()


def _backward(made: tuple[Tensor | None, Tensor], grad: Tensor | None) -> Tensor | None:
    """Backward through one pass; the gradient of what it had received."""
    given, result = made
    if result.requires_grad:
        torch.autograd.backward(result, grad)
    if given is None:
        return None
    return given.grad if given.grad is not None else torch.zeros_like(given)


def _follower(work: Pass, stages: int) -> Pass | None:
    """The pass that takes a pass's result."""
    step = 1 if work.kind == "forward" else -1
    stage = work.stage + step
    return Pass(work.kind, stage, work.micro) if 0 <= stage < stages else None


@contextmanager
def receiving(model: nn.Module, received: Tensor | None) -> Iterator[None]:
    """Inside, ``model`` starts from hidden states of the stage before, whoever calls it.

    They are its argument ``hidden`` if it has one; else they replace its first argument, which the
    parts that are left out pass on.
    """
    if received is None:
        yield
        return
    takes_hidden = "hidden" in inspect.signature(model.forward).parameters

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if takes_hidden:
            return args, {**kwargs, "hidden": received}
        return (received, *args[1:]), kwargs

    hook = model.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()
