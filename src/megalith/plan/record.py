"""What was seen of a step: its memory, its operators and its collectives."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Allocated:
    """One piece of memory, from its first byte to its end.

    Attributes:
        bytes: as asked for, not rounded.
        born: place of its allocation in the order of all events.
        died: place of its end; ``None``: it outlives the trace.
        stream: which stream's pool it came from.
        phase: when it was born: ``forward``, ``backward``, ``update`` or ``setup``.
        end: the phase in which it died.
        role: what it turned out to be; empty: neither weight, gradient nor state.
        sent: a collective read or wrote it.
        operator: that made it.
        module: path of the module that was running.
        shape: of the first tensor in it.
    """

    bytes: int
    born: int
    stream: int
    phase: str
    role: str
    operator: str
    module: str
    shape: tuple[int, ...]
    dtype: str
    sent: bool = False
    died: int | None = None
    end: str = ""


@dataclass(frozen=True)
class Computed:
    """What the operators of one kind, phase and dtype add up to.

    Attributes:
        kind: ``matmul``, ``attention`` or ``memory`` (bound by bandwidth).
    """

    kind: str
    phase: str
    dtype: str


@dataclass
class Amount:
    """Operators, floating-point operations, and bytes read and written."""

    operators: int = 0
    flops: int = 0
    bytes: int = 0


@dataclass(frozen=True)
class Sent:
    """One collective: its name, the bytes of the whole, its group's name, and its phase."""

    name: str
    bytes: int
    group: str
    phase: str


@dataclass
class Record:
    """Everything that a tracker saw.

    Attributes:
        memory: what was alive at ``start`` or came after it.
        before: what had ended by then.
        start: place of the last event that is not looked at.
        events: place of the last event.
        phases: where each stretch of a phase begins: place of the event before it, and its name.
    """

    memory: list[Allocated] = field(default_factory=list)
    before: list[Allocated] = field(default_factory=list)
    start: int = 0
    events: int = 0
    phases: list[tuple[int, str]] = field(default_factory=lambda: [(0, "setup")])
    computed: dict[Computed, Amount] = field(default_factory=dict)
    sent: list[Sent] = field(default_factory=list)
    operators: int = 0
