"""How long an update takes: operators against a device's rates, collectives against its links.

Every operator takes the longer of its operations and its bytes; the host starts them one by one.
What data parallelism sends runs beside the operators and is hidden by them but for a part of the
shorter of the two; what tensor, context and expert parallelism send is waited for. A pipeline is
played through, pass by pass, in its own timetable's order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from megalith.layout import schedule
from megalith.layout.schedule import Pass
from megalith.plan import links
from megalith.plan.extrapolate import Part
from megalith.plan.machine import Device, Machine
from megalith.plan.worker import Seen
from megalith.recipe.schema import LayoutSection

FUSED = 0.4
"""Share of the bytes of pointwise operators that a compiled step still moves; fitted to half of the
published runs that are compiled (docs/planner-accuracy.md)."""

_DATA = ("replicate", "shard", "expert", "context")
_START = {"gpu": 7e-6, "cpu": 5e-6}
"""Seconds in which the host starts an operator."""


@dataclass(frozen=True)
class StepTime:
    """One update, in seconds.

    Attributes:
        seconds: the estimate; it lies between ``low`` and ``high``.
        compute: operators of the slowest rank.
        collectives: of each axis, by name, whether hidden or not.
        exposed: the part of them that operators do not hide.
        bubble: the slowest rank's wait for the others of its pipeline.
        starts: whether the host cannot start operators as fast as the device runs them.
    """

    seconds: float
    low: float
    high: float
    compute: float
    collectives: dict[str, float] = field(default_factory=dict)
    exposed: float = 0.0
    bubble: float = 0.0
    starts: bool = False


@dataclass
class _Phase:
    """What a rank does in one phase of an update."""

    device: Device
    compute: float = 0.0
    starts: float = 0.0
    data: float = 0.0
    waited: float = 0.0

    @property
    def operators(self) -> float:
        return max(self.compute, self.starts)

    @property
    def exposed(self) -> float:
        """Time that operators do not hide."""
        shorter = min(self.operators, self.data)
        longer = max(0.0, self.data - self.operators)
        return self.waited * self.device.waited + longer + self.device.shown * shorter

    @property
    def seconds(self) -> float:
        return self.operators + self.exposed


def step_time(
    parts: Sequence[tuple[Part, Seen]], layout: LayoutSection, micros: int, machine: Machine
) -> StepTime:
    """An update's time from what its distinct ranks do in it.

    Args:
        parts: in the order of the pipeline.
        micros: micro-batches of the update.
    """
    phases = [_phases(seen, layout, machine) for _, seen in parts]
    busy = [sum(phase.seconds for phase in one.values()) for one in phases]
    slowest = busy.index(max(busy))
    total, bubble = busy[slowest], 0.0
    if layout.pipeline > 1:
        hop = _hop(parts, layout, machine)
        total = pipeline_time(_by_stage(parts, phases, layout, micros), layout, micros, hop)
        total += max(one["update"].seconds for one in phases)
        bubble = max(0.0, total - busy[slowest])
    spread, chosen = machine.device.spread, phases[slowest]
    return StepTime(
        seconds=total,
        low=total * (1 - spread),
        high=total * (1 + spread),
        compute=sum(phase.operators for phase in chosen.values()),
        collectives=_collectives(parts[slowest][1], layout, machine),
        exposed=sum(phase.exposed for phase in chosen.values()),
        bubble=bubble,
        starts=sum(p.starts for p in chosen.values()) > sum(p.compute for p in chosen.values()),
    )


def fused(seen: Seen, left: float = FUSED) -> Seen:
    """What ``torch.compile`` makes of an eager trace: pointwise operators run as few kernels.

    Args:
        left: share of the bytes, and of the operators to start, that is left of those in forward
            and backward that are neither matrix products nor attention.
    """
    computed = {
        name: [value * (1.0 if n == 1 else left) for n, value in enumerate(values)]
        if name.startswith("memory/") and "/update/" not in name
        else list(values)
        for name, values in seen.computed.items()
    }
    return replace(seen, computed=computed)


def compute_time(computed: Mapping[str, Sequence[float]], device: Device) -> dict[str, float]:
    """Seconds of operators by phase: each kind is bound by its operations or by its bytes."""
    found: dict[str, float] = defaultdict(float)
    for name, (_, flops, size) in computed.items():
        kind, phase, dtype = name.split("/")
        by_bytes = size / device.rate("memory", dtype)
        by_flops = flops / device.rate(kind, dtype) if flops else 0.0
        found[phase] += max(by_bytes, by_flops)
    return found


def pipeline_time(
    passes: Sequence[tuple[float, float]], layout: LayoutSection, micros: int, hop: float
) -> float:
    """Seconds from the first pass's start to the last one's end.

    Args:
        passes: forward and backward time of a micro-batch on one stage of each rank.
        hop: seconds from one rank to the next.
    """
    ranks = layout.pipeline
    each = layout.stages if layout.schedule == "interleaved" else 1
    orders = [schedule.order(layout.schedule, r, ranks, each, micros) for r in range(ranks)]
    ended: dict[Pass, float] = {}
    free, after = [0.0] * ranks, [0] * ranks
    total = ranks * each
    while any(after[rank] < len(orders[rank]) for rank in range(ranks)):
        for rank, order in enumerate(orders):
            while after[rank] < len(order):
                work = order[after[rank]]
                needed = _before(work, total)
                if any(one not in ended for one in needed):
                    break
                ready = max((ended[n] + hop * (n.stage != work.stage) for n in needed), default=0.0)
                forward, backward = passes[rank]
                took = forward if work.kind == "forward" else backward
                free[rank] = ended[work] = max(ready, free[rank]) + took
                after[rank] += 1
    return max(free)


def _before(work: Pass, total: int) -> list[Pass]:
    """What a pass waits for."""
    if work.kind == "forward":
        return [Pass("forward", work.stage - 1, work.micro)] if work.stage else []
    own = [Pass("forward", work.stage, work.micro)]
    if work.stage < total - 1:
        own.append(Pass("backward", work.stage + 1, work.micro))
    return own


def _phases(seen: Seen, layout: LayoutSection, machine: Machine) -> dict[str, _Phase]:
    found = {name: _Phase(machine.device) for name in ("forward", "backward", "update")}
    for phase, took in compute_time(seen.computed, machine.device).items():
        found[phase].compute += took
    start = _START[machine.device.kind]
    for name, (operators, _, _) in seen.computed.items():
        found[name.split("/")[1]].starts += operators * start
    for name, (times, size) in seen.sent.items():
        operator, phase, axes = name.split("/")
        if axes == "pipeline":
            continue  # played through
        took = links.seconds(operator, times, size, links.group(axes, layout, machine), machine)
        if overlaps(axes):
            found[phase].data += took
        else:
            found[phase].waited += took
    return found


def overlaps(axes: str) -> bool:
    """Whether traffic over these axes runs beside operators: that of weights and gradients does."""
    chosen = axes.split("+")
    return all(axis in _DATA for axis in chosen) and axes not in ("context", "expert")


def _collectives(seen: Seen, layout: LayoutSection, machine: Machine) -> dict[str, float]:
    found: dict[str, float] = defaultdict(float)
    for name, (times, size) in seen.sent.items():
        operator, _, axes = name.split("/")
        over = links.group(axes, layout, machine)
        took = links.seconds(operator, times, size, over, machine)
        if took:
            found[f"{axes} {operator.strip('_')}"] += took
    return dict(found)


def _hop(parts: Sequence[tuple[Part, Seen]], layout: LayoutSection, machine: Machine) -> float:
    """Seconds that hidden states take from one stage to the next."""
    for _, seen in parts:
        for name, (times, size) in seen.sent.items():
            operator, _, axes = name.split("/")
            if operator == "send" and axes == "pipeline" and times:
                over = links.group(axes, layout, machine)
                return links.seconds(operator, 1, size / times, over, machine)
    return 0.0


def _by_stage(
    parts: Sequence[tuple[Part, Seen]],
    phases: Sequence[dict[str, _Phase]],
    layout: LayoutSection,
    micros: int,
) -> list[tuple[float, float]]:
    """Forward and backward time of a pass on each rank; one not looked at is like those before."""
    passes = micros * (layout.stages if layout.schedule == "interleaved" else 1)
    found: list[tuple[float, float]] = []
    for stage in range(layout.pipeline):
        place = max(n for n, (part, _) in enumerate(parts) if part.stage <= stage)
        one = phases[place]
        found.append((one["forward"].seconds / passes, one["backward"].seconds / passes))
    return found
