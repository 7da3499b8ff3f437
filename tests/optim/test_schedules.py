"""Schedules are pure functions of the update."""

from __future__ import annotations

import itertools
import math

import pytest

from megalith import optim
from megalith.recipe import parse


def factors(steps: int, **fields):
    schedule = optim.build_schedule(
        parse({"optim": fields, "train": {"steps": steps}}).optim, steps
    )
    return [schedule(update) for update in range(steps)]


def test_warmup_rises_linearly_to_one_and_never_starts_at_zero():
    found = factors(10, schedule="constant", warmup=4)
    assert found == [0.25, 0.5, 0.75, 1, 1, 1, 1, 1, 1, 1]


@pytest.mark.parametrize("name", ["linear", "cosine", "wsd"])
def test_falls_from_one_to_final(name: str):
    found = factors(101, schedule=name, warmup=10, final=0.1)
    assert found[10] == 1
    assert found[-1] == pytest.approx(0.1)
    assert all(a >= b for a, b in itertools.pairwise(found[10:]))


def test_shapes():
    linear = factors(101, schedule="linear", final=0.0)
    assert linear[25] == pytest.approx(0.75)
    cosine = factors(101, schedule="cosine", final=0.2)
    assert cosine[30] == pytest.approx(0.2 + 0.8 * (1 + math.cos(math.pi * 0.3)) / 2)
    wsd = factors(101, schedule="wsd", decay=0.2, final=0.0)
    assert wsd[79] == 1
    assert wsd[90] == pytest.approx(0.5)


def test_a_schedule_of_the_users_own():
    found = factors(4, schedule="toy_schedule:halves")
    assert found == [1, 0.5, 0.25, 0.125]
