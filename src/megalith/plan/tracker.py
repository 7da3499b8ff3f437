"""What a step allocates, frees, computes and sends, operator by operator.

A dispatch mode sees every operator. Each new storage is watched by a weak reference, so that its
end is known to the operator; nothing is inferred from a graph. It works on fake and real tensors.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_iter

from megalith.plan import operators
from megalith.plan.record import Allocated, Amount, Computed, Record, Sent

_COLLECTIVES = ("c10d", "_c10d_functional")
_BETWEEN = ("__torch_dispatch__", "_fn", "inner")
_NOTHING_SENT = ("wait_tensor", "barrier", "monitored_barrier_")


@dataclass
class _Live:
    reference: weakref.ref[Any]
    entry: Allocated


class Tracker(TorchDispatchMode):
    """Fills a :class:`Record` while it is entered.

    Args:
        device: type of the device whose memory counts.
        stream: tells which stream is current.
        module: tells which module is running.
    """

    def __init__(
        self,
        device: str,
        stream: Callable[[], int] = lambda: 0,
        module: Callable[[], str] = lambda: "",
    ) -> None:
        super().__init__()
        self.record = Record()
        self.phase = "setup"
        self.role = ""
        self._device, self._stream, self._module = device, stream, module
        self._live: dict[int, _Live] = {}
        self._joined: tuple[_Live | None, _Live | None] = (None, None)
        self._outer: Any = None
        self._resize: Any = None

    @contextmanager
    def inside(self, *, phase: str | None = None, role: str | None = None) -> Iterator[None]:
        """Everything born inside belongs to ``phase``, or has ``role``."""
        before = self.phase, self.role
        self._enter(phase or before[0])
        self.role = role if role is not None else before[1]
        try:
            yield
        finally:
            self._enter(before[0])
            self.role = before[1]

    def start_over(self) -> None:
        """Look at what comes from now on, and at what is alive, only."""
        old = self.record
        alive = [entry for entry in old.memory if entry.died is None and entry.bytes]
        ended = [entry for entry in old.memory if entry.died is not None]
        self.record = Record(
            memory=alive,
            before=old.before + ended,
            start=old.events,
            events=old.events,
            phases=[(old.events, self.phase)],
        )

    def name(self, tensor: Tensor | None, role: str) -> None:
        """Say what a tensor is; it holds for its whole life."""
        for storage, part in _storages(tensor):
            if self._counts(part):
                self._see(storage, part, "given").entry.role = role

    def __enter__(self) -> Any:
        self._outer = active_fake_mode()
        self._resize = torch.UntypedStorage.resize_
        tracker = self

        def resize_(storage: Any, size: int) -> Any:
            result = tracker._resize(storage, size)
            tracker._resized(storage)
            return result

        torch.UntypedStorage.resize_ = resize_  # pyright: ignore
        return super().__enter__()

    def __exit__(self, *error: Any) -> Any:
        torch.UntypedStorage.resize_ = self._resize
        self._live.clear()  # what ends later does not end in the trace
        return super().__exit__(*error)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(kind is DTensor for kind in types):
            return NotImplemented
        if function is torch.ops.prim.device.default:  # by far the most frequent one
            fake = isinstance(args[0], FakeTensor) and not args[0].fake_mode.in_kernel_invocation
            return args[0].fake_device if fake else function(*args, **kwargs)
        if function is torch.ops._c10d_functional.wait_tensor.default and active_fake_mode():
            result = args[0]  # the real one gives its input back, the fake one a copy
        else:
            result = function(*args, **kwargs)
        # DTensor asks for shapes by running operators on whole fake tensors of another mode.
        if active_fake_mode() is self._outer:
            self._ran(function, args, kwargs, result)
        return result

    def _ran(self, function: Any, args: Any, kwargs: Any, result: Any) -> None:
        self.record.operators += 1
        operator = function._schema.name.rpartition("::")[2]
        for storage, part in _all_storages(result):
            if self._counts(part):
                self._see(storage, part, operator)
        # A view holds its base, so that the engine is not its memory's only user.
        if function is torch.ops.aten.add.Tensor and not args[0]._is_view() and _from_engine():
            self._joined = self._live_of(args[0]), self._live_of(result)
        if function is torch.ops.aten._to_copy.default:
            self._cast(args[0], result)
        if function.namespace in _COLLECTIVES:
            for storage, part in _all_storages((args, result)):
                if self._counts(part):
                    self._see(storage, part, operator).entry.sent = True
            if operator not in _NOTHING_SENT:
                self._send(operator, args, result)
        elif not function.is_view and function not in operators.NO_KERNEL:
            self._compute(function, args, kwargs, result)

    def _cast(self, given: Tensor, result: Tensor) -> None:
        """A weight in another dtype is no activation, and lives as long as autocast keeps it."""
        known, copy = self._live_of(given), self._live_of(result)
        if known and copy and copy is not known and known.entry.role in ("weights", "gathered"):
            copy.entry.role = "casts"

    def _live_of(self, tensor: Any) -> _Live | None:
        return next((self._live.get(id(s)) for s, _ in _storages(tensor)), None)

    def _compute(self, function: Any, args: Any, kwargs: Any, result: Any) -> None:
        tensors = [t for t in tree_iter((args, kwargs)) if isinstance(t, Tensor)]
        ours = next((t for t in tensors if self._counts(t)), None)
        out = [t for t in tree_iter(result) if isinstance(t, Tensor) and self._counts(t)]
        if ours is None and not out:
            return
        kind, flops = operators.cost(function, args, kwargs, result)
        dtype = str((ours if ours is not None else out[0]).dtype).removeprefix("torch.")
        amount = self.record.computed.setdefault(Computed(kind, self.phase, dtype), Amount())
        amount.operators += 1
        amount.flops += flops
        amount.bytes += sum(t.numel() * t.element_size() for t in [*tensors, *out])

    def _send(self, operator: str, args: Any, result: Any) -> None:
        sizes = [
            sum(t.numel() * t.element_size() for t in tree_iter(side) if isinstance(t, Tensor))
            for side in (args, result)
        ]
        self.record.sent.append(Sent(operator, max(sizes), _group(args), self.phase))

    def _counts(self, tensor: Tensor) -> bool:
        # Asking a fake tensor for its device is an operator of its own.
        device = tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device
        return device.type == self._device

    def _see(self, storage: Any, tensor: Tensor, operator: str) -> _Live:
        known = self._live.get(id(storage))
        if known is not None and known.reference() is storage:
            if known.entry.bytes != storage.nbytes():
                self._resized(storage)
                known = self._live[id(storage)]
            return known
        return self._born(storage, tuple(tensor.shape), tensor.dtype, operator)

    def _born(
        self, storage: Any, shape: tuple[int, ...], dtype: torch.dtype | str, operator: str
    ) -> _Live:
        self._joined = None, None
        entry = Allocated(
            bytes=storage.nbytes(),
            born=self._now(),
            stream=self._stream(),
            phase=self.phase,
            role=self.role,
            operator=operator,
            module=self._module(),
            shape=shape,
            dtype=str(dtype).removeprefix("torch."),
        )
        self.record.memory.append(entry)
        key, tracker = id(storage), weakref.ref(self)

        def ended(_: Any) -> None:
            here = tracker()
            if here is not None and here._live.get(key) is live:
                here._ended(live)
                del here._live[key]

        live = _Live(weakref.ref(storage, ended), entry)
        self._live[key] = live
        return live

    def _resized(self, storage: Any) -> None:
        """A storage whose memory was given back, or taken anew, under the same tensor."""
        known = self._live.get(id(storage))
        if known is None or known.reference() is not storage:
            return
        old = known.entry
        if old.bytes == storage.nbytes():
            return
        if storage.nbytes() == 0:
            self._end(old)
        live = self._born(storage, old.shape, old.dtype, "resize_")
        live.entry.role = old.role or "gathered"
        if old.bytes and storage.nbytes():
            self._end(old)  # what was in it has been copied: for a moment both are there

    def _ended(self, live: _Live) -> None:
        old, total = self._joined
        if old is None or live is not old or total is None or old.entry.bytes != total.entry.bytes:
            self._end(live.entry)
            return
        # Autograd adds a gradient to one that nobody else holds in place, but not if it is a fake
        # tensor: the sum is where the first one was.
        total.entry.born, total.entry.operator = live.entry.born, live.entry.operator
        live.entry.bytes = 0

    def _enter(self, phase: str) -> None:
        if phase != self.phase:
            self.phase = phase
            self.record.phases.append((self.record.events, phase))

    def _end(self, entry: Allocated) -> None:
        entry.died, entry.end = self._now(), self.phase

    def _now(self) -> int:
        self.record.events += 1
        return self.record.events


def _from_engine() -> bool:
    """Whether autograd's engine itself calls the operator: no Python stands between them."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_name in _BETWEEN:
        frame = frame.f_back
    return frame is not None and frame.f_code.co_name == "_engine_run_backward"


def _storages(tensor: Any) -> Iterator[tuple[Any, Tensor]]:
    """The storages of a tensor, or of the plain tensors that it is made of."""
    if type(tensor) is not FakeTensor and is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            yield from _storages(getattr(tensor, name))
    elif isinstance(tensor, Tensor):
        yield tensor.untyped_storage(), tensor


def _all_storages(tree: Any) -> Iterator[tuple[Any, Tensor]]:
    for value in [tree] if isinstance(tree, Tensor) else tree_iter(tree):
        yield from _storages(value)


def _group(args: Any) -> str:
    """The name of a collective's group."""
    for value in args:
        if isinstance(value, str) and value not in ("sum", "max", "avg", "min"):
            return value
        if isinstance(value, torch.ScriptObject):
            group = dist.ProcessGroup
            try:
                return group.unbox(value).group_name
            except RuntimeError:
                continue  # another kind of object, such as the reduction
    return ""
