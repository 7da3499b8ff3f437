"""The caching allocator's rules, one by one (CUDACachingAllocator.cpp of torch 2.13)."""

from __future__ import annotations

import random

import pytest

from megalith.plan.allocator import Allocation, replay

KIB, MIB = 1 << 10, 1 << 20


def reserved(*events: tuple[int, int], expandable: bool = False, streams: int = 1) -> int:
    """Pairs of key and size; size 0 is a free. The stream of key k is k % ``streams``."""
    made = (Allocation(key, size, key % streams) for key, size in events)
    return replay(made, expandable=expandable).reserved


@pytest.mark.parametrize(
    ("size", "segment"),
    [
        (1, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 1, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (11 * MIB, 12 * MIB),
    ],
)
def test_a_request_reserves_the_segment_of_its_size(size: int, segment: int) -> None:
    assert reserved((1, size)) == segment


@pytest.mark.parametrize(("size", "pages"), [(1, 2), (MIB + 1, 20), (21 * MIB, 40)])
def test_an_expandable_segment_grows_by_pages(size: int, pages: int) -> None:
    assert reserved((1, size), expandable=True) == pages * MIB


def test_small_requests_share_a_segment() -> None:
    assert reserved(*((key, 512 * KIB) for key in range(4))) == 2 * MIB
    assert reserved(*((key, 512 * KIB) for key in range(5))) == 4 * MIB


def test_allocated_memory_is_rounded_to_512_bytes() -> None:
    assert replay([Allocation(1, 1), Allocation(2, 513)], expandable=False).allocated == 1536


def test_a_freed_block_is_used_again() -> None:
    assert reserved((1, 30 * MIB), (1, 0), (2, 30 * MIB)) == 30 * MIB
    assert reserved((1, 30 * MIB), (1, 0), (2, 20 * MIB), (3, 10 * MIB)) == 30 * MIB


def test_the_best_fit_is_taken() -> None:
    free = [(1, 40 * MIB), (2, 20 * MIB), (1, 0), (2, 0)]
    assert reserved(*free, (3, 20 * MIB), (4, 40 * MIB)) == 60 * MIB


def test_a_rest_of_up_to_a_mebibyte_is_not_split_off() -> None:
    rest = [(1, 12 * MIB), (1, 0), (2, 11 * MIB)]
    assert reserved(*rest, (3, 700 * KIB)) == 14 * MIB  # a small segment of its own
    assert replay((Allocation(*e) for e in rest), expandable=False).allocated == 12 * MIB


def test_neighbours_become_one_block_when_freed() -> None:
    parts = [(1, 30 * MIB), (1, 0), (2, 10 * MIB), (3, 10 * MIB), (4, 10 * MIB)]
    assert reserved(*parts, (3, 0), (2, 0), (4, 0), (5, 30 * MIB)) == 30 * MIB


def test_fragments_do_not_serve_a_larger_request_but_an_expandable_segment_grows() -> None:
    # Two free blocks with a live one between them.
    parts = [(1, 20 * MIB), (2, 20 * MIB), (3, 20 * MIB), (1, 0), (3, 0), (4, 40 * MIB)]
    assert reserved(*parts) == 100 * MIB
    assert reserved(*parts, expandable=True) == 80 * MIB  # the free end, and one page of 20 more


def test_streams_do_not_share_memory() -> None:
    turns = [(2, 30 * MIB), (2, 0), (3, 30 * MIB)]
    assert reserved(*turns) == 30 * MIB
    assert reserved(*turns, streams=2) == 60 * MIB


@pytest.mark.parametrize("expandable", [False, True])
def test_random_programs_never_reserve_less_than_they_use(expandable: bool) -> None:
    draw = random.Random(0)
    alive: dict[int, int] = {}
    events: list[Allocation] = []
    now = most = 0
    for key in range(3000):
        if alive and draw.random() < 0.5:
            gone = draw.choice(list(alive))
            now -= alive.pop(gone)
            events.append(Allocation(gone, 0))
        size = draw.choice([300, 70_000, 900_000, 3_000_000, 17_000_000])
        alive[key] = -(-size // 512) * 512
        now += alive[key]
        most = max(most, now)
        events.append(Allocation(key, size, draw.randrange(2)))
    found = replay(events, expandable=expandable)
    assert most <= found.allocated <= most * 1.05  # blocks that were not split count whole
    assert found.allocated <= found.reserved < 2 * found.allocated
