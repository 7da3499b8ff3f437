"""A trace as a few numbers that can be stored, sent and extrapolated."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict

from megalith.layout.mesh import AXES
from megalith.plan import memory
from megalith.plan.accelerator import Target
from megalith.plan.trace import Job, Trace, trace
from megalith.plan.worker import Asked, Seen
from megalith.recipe.schema import LayoutSection

POINTS = 64
"""Of a curve."""


def summary(asked: Asked) -> Seen:
    """Trace what is asked for in this process, and sum it up.

    Raises:
        MegalithError: the recipe is refused.
    """
    target = Target(*asked.target) if asked.target is not None else None
    job = Job(asked.recipe, asked.facts, asked.sample, asked.rank, target)
    return of_trace(trace(job), target, asked.recipe.layout)


def of_trace(found: Trace, target: Target | None, layout: LayoutSection) -> Seen:
    """The numbers of a trace."""
    read = memory.read(found.record, target)
    return Seen(
        memory={
            "allocated": read.allocated,
            "reserved": read.reserved,
            "reserved_expandable": read.reserved_expandable,
        },
        kinds={name: float(size) for name, size in read.kinds.items()},
        most={name: float(size) for name, size in read.most.items()},
        moment={
            "phase": read.moment.phase,
            "module": read.moment.module,
            "operator": read.moment.operator,
        },
        candidates={
            name: {kind: float(size) for kind, size in kinds.items() if size}
            for name, kinds in read.candidates.items()
        },
        largest=[asdict(one) for one in read.largest],
        computed={
            f"{of.kind}/{of.phase}/{of.dtype}": [much.operators, much.flops, much.bytes]
            for of, much in found.record.computed.items()
        },
        sent=_sent(found, layout),
        parameters=found.parameters,
        operators=found.record.operators,
        curve={name: _resampled(values) for name, values in read.curve.kinds.items()},
    )


def axes(ranks: Sequence[int], layout: LayoutSection) -> str:
    """Which axes of the layout a group's ranks differ on: ``shard+context``.

    ``ends``: the first and last stage of a pipeline; ``world``: all ranks of several axes and more.
    """
    if not ranks:
        return "ends"  # the only group that is no row or block of the mesh
    found: set[str] = set()
    for rank in ranks:
        rest = rank - ranks[0]
        for axis in reversed(AXES):
            rest, place = divmod(rest, getattr(layout, axis))
            if place:
                found.add(axis)
    if len(found) > 1 and {"pipeline", "tensor"} & found:
        return "world"
    return "+".join(axis for axis in AXES if axis in found)


def _sent(found: Trace, layout: LayoutSection) -> dict[str, list[float]]:
    sent: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for one in found.record.sent:
        over = axes(found.groups.get(one.group, ()), layout)
        entry = sent[f"{one.name}/{one.phase}/{over}"]
        entry[0] += 1
        entry[1] += one.bytes
    return dict(sent)


def _resampled(values: list[int]) -> list[float]:
    """:data:`POINTS` of them, so that curves of several traces can be compared."""
    last = len(values) - 1
    return [float(values[round(place * last / (POINTS - 1))]) for place in range(POINTS)]
