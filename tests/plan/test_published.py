"""Published runs on real GPUs, predicted: their own loops, traced by the planner's tracker."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
GIB = 2**30


@pytest.fixture(scope="module")
def published() -> Any:
    """The benchmark's package: its rows and its loops."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        yield importlib.import_module("planner_published.rows")
    finally:
        sys.path.remove(str(BENCHMARKS))


def _rows(published: Any, source: str) -> list[Any]:
    return [row for row in published.read() if row.source.startswith(source)]


def _seen(published: Any, rows: list[Any]) -> list[Any]:
    loop = importlib.import_module("planner_published.loop")
    return loop.see([published.program(row) for row in rows])


def test_every_row_is_described_or_refused_for_a_reason(published: Any) -> None:
    rows = published.read()

    assert len(rows) == 357
    for row in rows:
        kinds = (published.refusal(row), published.program(row), published.described(row))
        assert sum(bool(kind) for kind in kinds) == 1, row


def test_the_described_models_have_the_published_number_of_weights(published: Any) -> None:
    for row in _rows(published, "KempnerForge"):
        shape = published.program(row).shape
        size = shape.width // shape.heads
        narrow = shape.kv_heads * size
        block = 2 * shape.width * (shape.width + narrow + 1) + 3 * shape.width * shape.hidden
        total = shape.layers * block + (2 * shape.vocab + 1) * shape.width

        billions = float(row.model.split()[-1].removesuffix("B"))
        assert total / 1e9 == pytest.approx(billions, rel=2e-3)


@pytest.mark.slow
def test_fsdp_with_accumulation_allocates_what_was_measured_within_2_percent(
    published: Any,
) -> None:
    rows = [
        row
        for row in _rows(published, "KempnerForge")
        if (row.shard, row.tensor, row.gpus) in ((4, 1, 4), (8, 1, 8), (2, 2, 4))
    ]

    assert len(rows) == 3
    for row, seen in zip(rows, _seen(published, rows), strict=True):
        assert seen.memory["allocated"] / GIB == pytest.approx(row.memory, rel=0.02), row.layout


@pytest.mark.slow
def test_selective_checkpointing_reserves_what_was_measured_within_5_percent(
    published: Any,
) -> None:
    rows = [
        row
        for row in _rows(published, "torchtitan 2024-12")
        if not row.compiled and row.gpus == 128
    ]

    (row,) = rows
    (seen,) = _seen(published, rows)
    assert seen.memory["reserved_expandable"] / GIB == pytest.approx(row.memory, rel=0.05)
