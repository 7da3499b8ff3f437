"""The order of a pipeline's work: which rank runs which micro-batch of which stage, and when.

GPipe (Huang et al. 2019) runs all forward passes, then all backward passes. 1F1B (Narayanan et al.
2019, PipeDream-Flush) alternates once the pipeline is full, so that a stage keeps the activations
of at most as many micro-batches as there are stages. Interleaved 1F1B (Narayanan et al. 2021,
section 2.2) gives each rank several stages, which makes the bubble smaller by their number.

A timetable is made for all ranks at once, tick by tick: in a tick each rank runs at most one pass
whose input has arrived, and what it made travels at the end of the tick. So both sides of every
transfer know its place in the order, and no two can wait for each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["forward", "backward"]


@dataclass(frozen=True)
class Pass:
    """One micro-batch through one stage, forward or backward."""

    kind: Kind
    stage: int
    micro: int


@dataclass(frozen=True)
class Tick:
    """What one rank does in one tick: a pass, then transfers, all at once.

    Attributes:
        sends: for each, the pass whose result travels, and the rank it goes to.
        receives: for each, the pass whose result arrives, and the rank it comes from.
    """

    work: Pass | None
    sends: tuple[tuple[Pass, int], ...]
    receives: tuple[tuple[Pass, int], ...]


def timetable(orders: list[list[Pass]], stages: int) -> list[list[Tick]]:
    """The ticks of every rank.

    Args:
        orders: each rank's passes in its order; stage ``s`` belongs to rank ``s % ranks``.
        stages: of the whole pipeline.

    Raises:
        ValueError: the orders wait for each other.
    """
    ranks = len(orders)
    ticks: list[list[Tick]] = [[] for _ in range(ranks)]
    next_up = [0] * ranks
    done: set[Pass] = set()
    while any(next_up[rank] < len(orders[rank]) for rank in range(ranks)):
        now: list[Pass | None] = []
        for rank, order in enumerate(orders):
            ready = next_up[rank] < len(order) and _needed(order[next_up[rank]], stages) <= done
            now.append(order[next_up[rank]] if ready else None)
            next_up[rank] += ready
        if not any(now):
            raise ValueError("the orders of the ranks wait for each other")
        transfers = [
            (work, rank, target % ranks)
            for rank, work in enumerate(now)
            if work is not None and (target := _target(work, stages)) is not None
        ]
        for rank in range(ranks):
            ticks[rank].append(
                Tick(
                    now[rank],
                    tuple((w, to) for w, of, to in transfers if of == rank and to != rank),
                    tuple((w, of) for w, of, to in transfers if to == rank and of != rank),
                )
            )
        done |= {work for work in now if work is not None}
    return ticks


def order(schedule: str, rank: int, ranks: int, stages: int, micros: int) -> list[Pass]:
    """The passes of one rank, in the order of ``schedule``.

    Args:
        schedule: ``gpipe``, ``1f1b`` or ``interleaved``; ``forward`` runs forward passes only.
        stages: on each rank; more than one only with ``interleaved``.
        micros: micro-batches; with ``interleaved`` a multiple of ``ranks``.
    """
    if schedule == "forward":
        chunks = range(rank, ranks * stages, ranks)
        return [Pass("forward", stage, micro) for micro in range(micros) for stage in chunks]
    forwards = [_nth("forward", n, rank, ranks, stages) for n in range(micros * stages)]
    backwards = [_nth("backward", n, rank, ranks, stages) for n in range(micros * stages)]
    if schedule == "gpipe":
        return forwards + backwards
    ahead = ranks - rank - 1
    if schedule == "interleaved":
        ahead = 2 * ahead + (stages - 1) * ranks
    ahead = min(ahead, len(forwards))
    steady = [one for pair in zip(forwards[ahead:], backwards, strict=False) for one in pair]
    return forwards[:ahead] + steady + backwards[len(forwards) - ahead :]


def _nth(kind: Kind, n: int, rank: int, ranks: int, stages: int) -> Pass:
    """The ``n``-th forward or backward pass: as many micro-batches as ranks, stage by stage."""
    if stages == 1:
        return Pass(kind, rank, n)
    group, within = divmod(n, ranks * stages)
    chunk, micro = divmod(within, ranks)
    chunk = chunk if kind == "forward" else stages - 1 - chunk
    return Pass(kind, chunk * ranks + rank, group * ranks + micro)


def _needed(work: Pass, stages: int) -> set[Pass]:
    """What must have been run before."""
    if work.kind == "forward":
        return {Pass("forward", work.stage - 1, work.micro)} if work.stage else set()
    needed = {Pass("forward", work.stage, work.micro)}
    if work.stage < stages - 1:
        needed.add(Pass("backward", work.stage + 1, work.micro))
    return needed


def _target(work: Pass, stages: int) -> int | None:
    """The stage that takes the result."""
    if work.kind == "forward":
        return work.stage + 1 if work.stage < stages - 1 else None
    return work.stage - 1 if work.stage else None
