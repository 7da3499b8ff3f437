"""Torch's caching allocator, replayed: what a process reserves, not only what it uses.

A step's allocations and frees go through the rules of ``CUDACachingAllocator.cpp`` (torch 2.13):
sizes are rounded to 512 bytes; requests up to 1 MiB and larger ones have pools of their own, per
stream; a free block is taken by best fit, split, and joined with its neighbours when freed. What is
not found is reserved: in segments, or, with ``expandable_segments``, at the end of a growing one.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from dataclasses import dataclass, field

_MIB = 1 << 20
_ROUND = 512
_SMALL = _MIB  # the largest request of the small pool
_SMALL_SEGMENT = 2 * _MIB
_LARGE_SEGMENT = 20 * _MIB
_LARGE_REQUEST = 10 * _MIB  # from here on a segment is the request, rounded
_ROUND_SEGMENT = 2 * _MIB


@dataclass(frozen=True)
class Allocation:
    """One event: ``size`` bytes are taken under ``key`` on a stream; 0 bytes: it is freed."""

    key: int
    size: int
    stream: int = 0


@dataclass(frozen=True)
class Reserved:
    """The peaks of a replay, bytes."""

    allocated: int
    reserved: int


@dataclass(frozen=True, order=True)
class _Block:
    """A piece of memory; free ones are sorted by size, then address."""

    size: int
    address: int
    segment: int


@dataclass
class _Pool:
    small: bool
    free: list[_Block] = field(default_factory=list)
    by_start: dict[tuple[int, int], _Block] = field(default_factory=dict)
    by_end: dict[tuple[int, int], _Block] = field(default_factory=dict)
    segments: int = 0
    grown: int = 0

    def best_fit(self, size: int) -> _Block | None:
        """The smallest free block of at least ``size``, taken out."""
        place = bisect.bisect_left(self.free, _Block(size, -1, -1))
        return self._take(self.free[place]) if place < len(self.free) else None

    def tail(self) -> _Block | None:
        """The free block at the end of the growing segment, taken out."""
        block = self.by_end.get((0, self.grown))
        return None if block is None else self._take(block)

    def put(self, block: _Block) -> None:
        """Make a block free, joined with free neighbours."""
        size, address, segment = block.size, block.address, block.segment
        before = self.by_end.get((segment, address))
        if before is not None:
            self._take(before)
            size, address = size + before.size, before.address
        after = self.by_start.get((segment, address + size))
        if after is not None:
            self._take(after)
            size += after.size
        joined = _Block(size, address, segment)
        self.by_start[segment, address] = self.by_end[segment, address + size] = joined
        bisect.insort(self.free, joined)

    def _take(self, block: _Block) -> _Block:
        self.free.pop(bisect.bisect_left(self.free, block))
        del self.by_start[block.segment, block.address]
        del self.by_end[block.segment, block.address + block.size]
        return block


def replay(events: Iterable[Allocation], *, expandable: bool) -> Reserved:
    """The peaks of allocated and reserved memory over ``events``."""
    pools: dict[tuple[bool, int], _Pool] = {}
    live: dict[int, tuple[_Pool, _Block]] = {}
    allocated = reserved = peak = 0
    for event in events:
        if event.size == 0:
            pool, block = live.pop(event.key)
            allocated -= block.size
            pool.put(block)
            continue
        size = -(-event.size // _ROUND) * _ROUND
        small = size <= _SMALL
        pool = pools.setdefault((small, event.stream), _Pool(small))
        block = pool.best_fit(size)
        if block is None:
            block, new = _reserve(pool, size, expandable)
            reserved += new
        rest = block.size - size
        if rest >= _ROUND if small else rest > _SMALL:
            pool.put(_Block(rest, block.address + size, block.segment))
            block = _Block(size, block.address, block.segment)
        live[event.key] = (pool, block)
        allocated += block.size
        peak = max(peak, allocated)
    return Reserved(peak, reserved)


def _reserve(pool: _Pool, size: int, expandable: bool) -> tuple[_Block, int]:
    """A block of at least ``size`` bytes from the driver, and how many bytes that took."""
    if expandable:
        page = _SMALL_SEGMENT if pool.small else _LARGE_SEGMENT
        tail = pool.tail()
        have, address = (tail.size, tail.address) if tail else (0, pool.grown)
        new = -(-(size - have) // page) * page
        pool.grown += new
        return _Block(have + new, address, 0), new
    if pool.small:
        new = _SMALL_SEGMENT
    elif size < _LARGE_REQUEST:
        new = _LARGE_SEGMENT
    else:
        new = -(-size // _ROUND_SEGMENT) * _ROUND_SEGMENT
    pool.segments += 1
    return _Block(new, 0, pool.segments), new
