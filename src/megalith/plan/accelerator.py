"""A device that computes nothing: tensors on it have shapes, and allocate what a GPU would.

torch lets a Python program register one device type of its own (PrivateUse1). On this one
autograd, FSDP2, device meshes and streams find what they expect, and every tensor is fake, so a
step of any size runs on a laptop. Autocast has CUDA's rules (:mod:`megalith.plan.autocast`),
attention chooses a kernel as the target GPU does (:mod:`megalith.plan.kernels`).

Registration is for the whole process and cannot be undone: only a worker process of the planner
calls :func:`install`.
"""

from __future__ import annotations

import contextlib
import types
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import backend_registration

from megalith.plan import autocast, kernels

NAME = "gpu"
"""What the device type is called inside a trace."""


@dataclass(frozen=True)
class Target:
    """The GPU that is stood in for.

    Attributes:
        capability: NVIDIA's compute capability; for others, that of the nearest relative.
        attention: kernels that may be chosen, in the order of preference.
        memory: bytes.
    """

    capability: tuple[int, int] = (9, 0)
    attention: tuple[str, ...] = ("flash", "efficient", "math")
    memory: int = 80 << 30


class Event:
    """A mark in a stream, always reached."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        return

    def record(self, *args: Any) -> None:
        """Nothing to wait for later."""

    def wait(self, *args: Any) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        """It is always reached."""
        return True

    def elapsed_time(self, other: Event) -> float:
        """Nothing takes time here."""
        return 0.0


class Stream(Event):
    """A queue of work; which one is current decides from which pool memory comes."""

    stream_id = 0

    def __init__(self, device: Any = None, priority: int = 0, **kwargs: Any) -> None:
        super().__init__()

    @property
    def device(self) -> torch.device:
        """The only one."""
        return torch.device(NAME, 0)

    def wait_stream(self, other: Stream) -> None:
        """Nothing to wait for."""

    def wait_event(self, event: Event) -> None:
        """Nothing to wait for."""

    def record_event(self, event: Event | None = None) -> Event:
        """A mark that is reached already."""
        return event or Event()


@dataclass
class Streams:
    """Which stream is current: the default one, unless a context or ``set_stream`` says so."""

    default: Stream = field(default_factory=Stream)
    stack: list[Stream] = field(default_factory=list)

    @property
    def current(self) -> Stream:
        """Where work goes now."""
        return self.stack[-1] if self.stack else self.default

    def pool(self) -> int:
        """Which pool memory comes from now; 0 is the default stream's."""
        current = self.current
        return 0 if current is self.default else id(current)

    @contextlib.contextmanager
    def inside(self, stream: Stream | None) -> Any:
        """Make ``stream`` current; ``None`` changes nothing."""
        if stream is None:
            yield
            return
        self.stack.append(stream)
        try:
            yield
        finally:
            self.stack.pop()


class Runtime:
    """What torch asks of a device type's module (``torch.gpu``)."""

    Stream, Event = Stream, Event

    def __init__(self, target: Target) -> None:
        self.target = target
        self.streams = Streams()

    def is_initialized(self) -> bool:
        """There is nothing to initialise."""
        return True

    def is_available(self) -> bool:
        """No: so that fake mode does not make real constants on it."""
        return False

    def device_count(self) -> int:
        """As many as a node has."""
        return 8

    def current_device(self) -> int:
        """Every rank sees its own as the first."""
        return 0

    def set_device(self, device: Any) -> None:
        """There is only one."""

    def device(self, device: Any) -> Any:
        """There is only one."""
        return contextlib.nullcontext()

    def is_bf16_supported(self, *args: Any) -> bool:
        """From Ampere on."""
        return self.target.capability >= (8, 0)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        """What autocast may compute in."""
        return [torch.bfloat16, torch.float16, torch.float32]

    def get_device_capability(self, device: Any = None) -> tuple[int, int]:
        """The target's."""
        return self.target.capability

    def get_device_properties(self, device: Any = None) -> Any:
        """The target's, as far as anyone asks."""
        major, minor = self.target.capability
        return types.SimpleNamespace(
            total_memory=self.target.memory,
            name="fake",
            multi_processor_count=132,
            major=major,
            minor=minor,
        )

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed(self, seed: int) -> None:
        """Nothing is drawn."""

    def manual_seed_all(self, seed: int) -> None:
        """Nothing is drawn."""

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        """A state to save and restore, as checkpointing does."""
        return torch.empty(16, dtype=torch.uint8)

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        """Nothing is drawn."""

    def default_stream(self, device: Any = None) -> Stream:
        """The stream of all work that names none."""
        return self.streams.default

    def current_stream(self, device: Any = None) -> Stream:
        """Where work goes now."""
        return self.streams.current

    def stream(self, stream: Stream | None) -> Any:
        """A context in which work goes to ``stream``."""
        return self.streams.inside(stream)

    def set_stream(self, stream: Stream) -> None:
        """Send all further work to ``stream``."""
        self.streams.stack[:] = [stream]

    def synchronize(self, device: Any = None) -> None:
        """Nothing to wait for."""

    def empty_cache(self) -> None:
        """Nothing is cached."""

    def memory_allocated(self, device: Any = None) -> int:
        """Counted by the tracker, not here."""
        return 0

    def is_current_stream_capturing(self) -> bool:
        """There are no graphs to capture."""
        return False


class _Hook(backend_registration._DummyPrivateUse1Hook):
    def is_available(self) -> bool:
        return True


def install(target: Target) -> Runtime:
    """Make ``torch.device("gpu")`` known to this process, standing in for ``target``."""
    runtime = Runtime(target)
    backend_registration._setup_privateuseone_for_python_backend(
        NAME, backend_module=runtime, hook=_Hook()
    )
    autocast.install(NAME)
    kernels.install(target.capability, target.attention)
    # Backward in the caller's thread: modes apply there, and operators come in one order.
    torch.autograd.set_multithreading_enabled(False)
    return runtime
