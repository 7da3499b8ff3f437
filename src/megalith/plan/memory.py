"""A rank's memory over one update: its peak, what fills it, and where it happens.

What a tensor was is told in hindsight. One that ended as a gradient was one from birth; one that
forward made and that outlived forward was kept for backward; the rest came and went.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from megalith.plan.accelerator import Target
from megalith.plan.allocator import Allocation, replay
from megalith.plan.record import Allocated, Record

KINDS: tuple[str, ...] = (
    "weights",
    "casts",
    "gathered",
    "gradients",
    "optimizer",
    "average",
    "buffers",
    "activations",
    "loss",
    "communication",
    "temporaries",
    "input",
)
"""What memory is for. ``casts``: weights in autocast's dtype; ``gathered``: whole weights of ZeRO;
``activations``: kept for backward; ``loss``: logits and what is made of them; ``temporaries``: all
that one stretch of forward, backward or update makes and drops."""

_NUMBER = re.compile(r"\d+")
_GPU_ROUND, _CPU_ROUND = 512, 64
_LARGEST, _POINTS = 20, 300
_COLLECTIVES = (
    "all_gather_into_tensor",
    "all_reduce",
    "reduce_scatter_tensor",
    "all_to_all_single",
    "broadcast",
)
_LOSSES = (
    "_log_softmax",
    "_log_softmax_backward_data",
    "nll_loss_forward",
    "nll_loss_backward",
    "nll_loss2d_forward",
    "nll_loss2d_backward",
    "binary_cross_entropy_with_logits",
)


@dataclass(frozen=True)
class Moment:
    """When memory was fullest: as the ``operator`` of ``module`` took its result's memory.

    Attributes:
        event: place in the order of all allocations and frees.
    """

    event: int
    phase: str
    module: str
    operator: str


@dataclass(frozen=True)
class Alive:
    """A tensor that was alive at the peak; the operator and the module are those that made it."""

    bytes: int
    kind: str
    shape: tuple[int, ...]
    dtype: str
    operator: str
    module: str


@dataclass(frozen=True)
class Curve:
    """Bytes by kind over the update; every list has one value per point.

    Attributes:
        events: place of each point in the order of all allocations and frees.
    """

    events: list[int]
    phases: list[str]
    kinds: dict[str, list[int]]


@dataclass(frozen=True)
class Memory:
    """One rank's memory over an update that is not its first; bytes.

    Attributes:
        allocated: the peak, each piece rounded as the device's allocator rounds it.
        reserved: what the caching allocator has taken by then; on the CPU the same as allocated.
        reserved_expandable: the same with ``expandable_segments``.
        kinds: what the peak consists of; the values add up to ``allocated``.
        most: the most that each kind takes at any time.
        largest: the largest pieces at the peak, largest first.
        candidates: by phase, module, operator and shape, the kinds at the moment when all together
            were the most; which of them is the peak depends on depth. Of numbered modules the
            first, the last and those between count apart.
    """

    allocated: int
    reserved: int
    reserved_expandable: int
    moment: Moment
    kinds: dict[str, int]
    most: dict[str, int]
    largest: list[Alive]
    curve: Curve
    candidates: dict[str, dict[str, int]]


def read(record: Record, target: Target | None) -> Memory:
    """The memory of the update that ``record`` tells of.

    Args:
        target: the GPU that was stood in for; ``None``: the CPU.
    """
    unit = _CPU_ROUND if target is None else _GPU_ROUND
    pieces = [
        (entry, kind(entry, record), -(-entry.bytes // unit) * unit)
        for entry in record.memory
        if entry.bytes
    ]
    peak, event, most, levels = _walk(pieces, record)
    alive = [piece for piece in pieces if _is_alive(piece[0], event)]
    alive.sort(key=lambda piece: -piece[2])
    kinds = dict.fromkeys(KINDS, 0)
    for _, name, size in alive:
        kinds[name] += size
    reserved = expandable = peak
    if target is not None:
        events = list(_events([*record.before, *record.memory]))
        reserved = replay(events, expandable=False).reserved
        expandable = replay(events, expandable=True).reserved
    return Memory(
        allocated=peak,
        reserved=reserved,
        reserved_expandable=expandable,
        moment=_moment(record, event),
        kinds=kinds,
        most=most,
        largest=[
            Alive(size, name, entry.shape, entry.dtype, entry.operator, entry.module)
            for entry, name, size in alive[:_LARGEST]
        ],
        curve=_curve(levels, record),
        candidates=_candidates(pieces, levels),
    )


def kind(entry: Allocated, record: Record) -> str:
    """Which of :data:`KINDS` a piece of memory was."""
    if entry.role:
        return entry.role
    outlived = entry.died is None or _stretch(record, entry.born) != _stretch(record, entry.died)
    kept = outlived and entry.phase == "forward"
    collective = entry.sent or entry.operator in _COLLECTIVES
    if entry.stream or (collective and not kept):
        return "communication"
    if entry.operator in _LOSSES:
        return "loss"
    return "activations" if kept else "temporaries"


def _stretch(record: Record, event: int) -> int:
    """Which stretch of a phase an event belongs to."""
    return bisect.bisect_left(record.phases, (event, ""))


def _is_alive(entry: Allocated, event: int) -> bool:
    return entry.born <= event and (entry.died is None or entry.died > event)


def _walk(
    pieces: Iterable[tuple[Allocated, str, int]], record: Record
) -> tuple[int, int, dict[str, int], list[tuple[int, dict[str, int]]]]:
    """Peak, its event, the most of each kind, and the levels after every change."""
    changes: list[tuple[int, str, int]] = []
    now = dict.fromkeys(KINDS, 0)
    for entry, name, size in pieces:
        if entry.born <= record.start:
            now[name] += size
        else:
            changes.append((entry.born, name, size))
        if entry.died is not None:
            changes.append((entry.died, name, -size))
    changes.sort(key=lambda change: change[0])
    total = peak = sum(now.values())
    event, most, levels = record.start, dict(now), [(record.start, dict(now))]
    for place, name, size in changes:
        total += size
        now[name] += size
        most[name] = max(most[name], now[name])
        levels.append((place, dict(now)))
        if total > peak:
            peak, event = total, place
    return peak, event, most, levels


def _candidates(
    pieces: Iterable[tuple[Allocated, str, int]], levels: list[tuple[int, dict[str, int]]]
) -> dict[str, dict[str, int]]:
    born = {entry.born: entry for entry, _, _ in pieces}
    numbers = [int(n[0]) for entry in born.values() if (n := _NUMBER.search(entry.module))]
    ends = {"0": "first", str(max(numbers, default=0)): "last"}
    found: dict[str, dict[str, int]] = {}
    for event, now in levels:
        entry = born.get(event)
        name = "start|||"
        if entry is not None:
            module = _NUMBER.sub(lambda n: ends.get(n[0], "between"), entry.module)
            # The shape tells the gradient of a weight from that of its input.
            shape = "x".join(map(str, entry.shape))
            name = f"{entry.phase}|{module}|{entry.operator}|{shape}"
        if sum(now.values()) > sum(found.get(name, {"": -1}).values()):
            found[name] = now
    return found


def _moment(record: Record, event: int) -> Moment:
    born = next((one for one in record.memory if one.born == event and one.bytes), None)
    if born is None:  # nothing that the update makes comes above what is there before it
        return Moment(event, _phase(record, event), "", "")
    return Moment(event, born.phase, born.module, born.operator)


def _phase(record: Record, event: int) -> str:
    return record.phases[max(0, _stretch(record, event) - 1)][1]


def _curve(levels: list[tuple[int, dict[str, int]]], record: Record) -> Curve:
    """At most :data:`_POINTS` points: of each group of neighbours the highest one."""
    width = -(-len(levels) // _POINTS)
    chosen = [
        max(levels[first : first + width], key=lambda level: sum(level[1].values()))
        for first in range(0, len(levels), width)
    ]
    return Curve(
        events=[event for event, _ in chosen],
        phases=[_phase(record, event) for event, _ in chosen],
        kinds={name: [now[name] for _, now in chosen] for name in KINDS},
    )


def _events(entries: Iterable[Allocated]) -> Iterator[Allocation]:
    """Allocations and frees in their order, from the very first."""
    found: list[tuple[int, Allocation]] = []
    for key, entry in enumerate(entries):
        if entry.bytes:
            found.append((entry.born, Allocation(key, entry.bytes, entry.stream)))
            if entry.died is not None:
                found.append((entry.died, Allocation(key, 0)))
    found.sort(key=lambda pair: pair[0])
    return (event for _, event in found)
