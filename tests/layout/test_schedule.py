"""A pipeline's order of work: complete, free of deadlock, and the published figures."""

from __future__ import annotations

import itertools

import pytest

from megalith.layout.schedule import Pass, order, timetable


def orders(kind: str, ranks: int, stages: int, micros: int) -> list[list[Pass]]:
    return [order(kind, rank, ranks, stages, micros) for rank in range(ranks)]


def many() -> list[tuple[str, int, int, int]]:
    plain = itertools.product(("gpipe", "1f1b", "forward"), (1, 2, 3, 4, 7), (1,), (1, 2, 3, 5, 8))
    rounds = itertools.product(("interleaved",), (2, 3, 4), (2, 3), (1, 2, 4))
    nested = [(kind, ranks, stages, ranks * n) for kind, ranks, stages, n in rounds]
    forward = itertools.product(("forward",), (2, 4), (2, 3), (1, 3, 5))
    return [*plain, *nested, *forward]


def alive(passes: list[Pass]) -> int:
    """Most activations that are kept at once."""
    kept = list(itertools.accumulate(1 if p.kind == "forward" else -1 for p in passes))
    return max(kept)


@pytest.mark.parametrize(("kind", "ranks", "stages", "micros"), many())
def test_every_pass_runs_once_and_what_is_sent_is_received(
    kind: str, ranks: int, stages: int, micros: int
) -> None:
    total = ranks * stages
    ticks = timetable(orders(kind, ranks, stages, micros), total)
    assert len({len(mine) for mine in ticks}) == 1, "all ranks live through the same ticks"
    kinds = ("forward",) if kind == "forward" else ("forward", "backward")
    wanted = itertools.product(kinds, range(total), range(micros))
    ran = [(rank, tick.work) for rank, mine in enumerate(ticks) for tick in mine if tick.work]
    assert sorted((w.kind, w.stage, w.micro) for _, w in ran) == sorted(wanted)
    assert all(work.stage % ranks == rank for rank, work in ran)
    done: set[Pass] = set()
    for now in zip(*ticks, strict=True):
        for tick in now:
            if (work := tick.work) is not None:
                assert needed(work, total) <= done, f"{work} runs before its input is there"
        sent = [(w, rank, to) for rank, tick in enumerate(now) for w, to in tick.sends]
        received = [(w, of, rank) for rank, tick in enumerate(now) for w, of in tick.receives]
        assert sorted(map(str, sent)) == sorted(map(str, received))
        done |= {tick.work for tick in now if tick.work}


def needed(work: Pass, total: int) -> set[Pass]:
    if work.kind == "forward":
        return {Pass("forward", s, work.micro) for s in range(work.stage)}
    later = {Pass("backward", s, work.micro) for s in range(work.stage + 1, total)}
    return later | {Pass("forward", s, work.micro) for s in range(total)}


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("micros", [1, 2, 5, 16])
def test_1f1b_keeps_no_more_micro_batches_than_there_are_stages_left(
    ranks: int, micros: int
) -> None:
    for rank, passes in enumerate(orders("1f1b", ranks, 1, micros)):
        assert alive(passes) == min(ranks - rank, micros)
    for passes in orders("gpipe", ranks, 1, micros):
        assert alive(passes) == micros


def test_1f1b_is_no_longer_than_gpipe_and_interleaving_makes_the_bubble_smaller() -> None:
    ranks, micros = 4, 8
    took = {
        kind: len(timetable(orders(kind, ranks, 1, micros), ranks)[0]) for kind in ("gpipe", "1f1b")
    }
    # Narayanan et al. 2021, section 2.2: micros passes each way and a bubble of ranks - 1 each way.
    assert took["gpipe"] == took["1f1b"] == 2 * (micros + ranks - 1)
    nested = len(timetable(orders("interleaved", ranks, 2, micros), 2 * ranks)[0])
    # A tick is half as long: the bubble is halved.
    assert nested / 2 - 2 * micros <= (took["1f1b"] - 2 * micros) / 2 + 0.5


def words(passes: list[Pass]) -> str:
    return " ".join(f"{'F' if p.kind == 'forward' else 'B'}{p.stage}.{p.micro}" for p in passes)


def test_interleaved_order_of_two_ranks_with_two_stages_each() -> None:
    """As Narayanan et al. 2021, figure 4, draw it, for 2 devices and 4 micro-batches."""
    first, second = orders("interleaved", 2, 2, 4)
    assert words(first) == (
        "F0.0 F0.1 F2.0 F2.1 F0.2 B2.0 F0.3 B2.1 F2.2 B0.0 F2.3 B0.1 B2.2 B2.3 B0.2 B0.3"
    )
    assert words(second) == (
        "F1.0 F1.1 F3.0 B3.0 F3.1 B3.1 F1.2 B1.0 F1.3 B1.1 F3.2 B3.2 F3.3 B3.3 B1.2 B1.3"
    )


def test_orders_that_wait_for_each_other_are_found() -> None:
    first = [Pass("backward", 0, 0), Pass("forward", 0, 0)]
    second = [Pass("forward", 1, 0), Pass("backward", 1, 0)]
    with pytest.raises(ValueError, match="wait for each other"):
        timetable([first, second], 2)
