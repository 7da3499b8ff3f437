"""Each layout sends the least that it must: collectives are counted and compared with closed forms.

An extra collective, or one over more ranks or in a wider dtype, turns a layout's line red.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from megalith.layout import collectives, data

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
ALLOWED = 1.005  # scalars, such as the count of tokens, and flags of DDP


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("layout_bytes")


def _ratios(driver: Any, ranks: int, layouts: Mapping[str, Sequence[str]]) -> dict[str, float]:
    """Counted over least and known. Ranks are forked, so they have what a test has planted."""
    size = driver.Size(4, 32, 4, vocab=64, sequence=32, micro_batch=2, micros=4)
    torch.set_num_threads(1)
    rows = driver.measure(size, ranks, layouts, fork=True)
    return {r["layout"]: r["bytes"] / (r["least_bytes"] + r["known_above"]) for r in rows}


ON_FOUR = ("replicate 4", "shard 4 (zero 3)", "tensor 4", "context 4 (gather)", "pipeline 4 (1f1b)")


def test_two_ranks_send_what_they_must(driver: Any) -> None:
    ratios = _ratios(driver, 2, driver.alone(2))
    assert len(ratios) == 11
    assert {name: r for name, r in ratios.items() if not 0.999 < r < ALLOWED} == {}


@pytest.mark.slow
def test_four_ranks_and_pairs_of_axes_send_what_they_must(driver: Any) -> None:
    layouts = {name: driver.alone(4)[name] for name in ON_FOUR}
    ratios = _ratios(driver, 4, {**layouts, **driver.JOINED})
    assert len(ratios) == 15
    assert {name: r for name, r in ratios.items() if not 0.999 < r < ALLOWED} == {}


@pytest.mark.parametrize("plant", ["gathered twice", "reduced at once", "summed wider"])
def test_an_extra_collective_is_seen(
    driver: Any, monkeypatch: pytest.MonkeyPatch, plant: str
) -> None:
    if plant == "gathered twice":
        gather = collectives.gather_now

        def twice(*args: Any) -> Any:
            gather(*args)
            return gather(*args)

        monkeypatch.setattr(collectives, "gather_now", twice)
        red = {"tensor 2", "context 2 (gather)"}
    elif plant == "reduced at once":  # in every micro-batch, not in the last
        for kind in (data.Sharded, data.Replicas):
            always = _always(kind.before_backward)
            monkeypatch.setattr(kind, "before_backward", always)
        red = {"shard 2 (zero 1)", "shard 2 (zero 2)", "replicate 2"}
    else:
        total = collectives.sum_now
        monkeypatch.setattr(
            collectives, "sum_now", lambda x, group: total(x.double(), group).to(x.dtype)
        )
        red = {"tensor 2 (no sequence)"}
    layouts = {name: driver.alone(2)[name] for name in red}
    assert all(ratio > 1.05 for ratio in _ratios(driver, 2, layouts).values())


def _always(inner: Any) -> Any:
    return lambda self, last: inner(self, True)
