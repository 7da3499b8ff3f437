"""Every layout of two to eight ranks that the demo's recipe allows: each axis, pair and triple."""

from __future__ import annotations

from pathlib import Path

import pytest

import megalith
from megalith.layout.mesh import AXES
from megalith.recipe.schema import LayoutSection

RECIPE = Path(__file__).parents[2] / "recipes" / "gpt-stdlib.toml"


def spread(layout: LayoutSection) -> frozenset[str]:
    return frozenset(axis for axis in AXES if getattr(layout, axis) > 1)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_layout_of_up_to_eight_ranks_is_one_process() -> None:
    verdicts = megalith.verify(megalith.load(RECIPE), up_to=8)
    wrong = {verdict.layout: verdict.lines() for verdict in verdicts if not verdict.right}
    assert not wrong
    found = {spread(verdict.layout) for verdict in verdicts}
    axes = {"pipeline", "replicate", "shard", "context", "tensor"}
    assert {frozenset({axis}) for axis in axes} <= found
    pairs = {frozenset({one, other}) for one in axes for other in axes if one != other}
    assert pairs <= found
    assert sum(len(some) == 3 for some in found) >= 4
    assert {verdict.layout.ranks for verdict in verdicts} == set(range(2, 9))
