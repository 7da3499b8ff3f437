"""What the verifier says of two outcomes: what differs, by how much, by which factor."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from megalith.recipe.schema import LayoutSection
from megalith.verify.compare import Difference, compare, errors, worst
from megalith.verify.trial import Outcome

LAYOUT = LayoutSection(pipeline=5, replicate=3, tensor=2)
MICROS = 7  # of a rank: with 3 data ranks, 21 in all; 30 ranks


def outcome(numbers: dict[str, float], **gradients: Tensor) -> Outcome:
    return Outcome(dict(numbers), {"gradient": dict(gradients)})


def gradient(seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(4, 6, dtype=torch.float64, generator=generator)


def said(factor: float, axes: tuple[str, ...] = ()) -> str:
    (found,) = compare(outcome({}, w=gradient()), outcome({}, w=factor * gradient()), 1e-11)
    assert found.factor == pytest.approx(factor)
    return found.line(LAYOUT, MICROS, axes)


@pytest.mark.parametrize(
    ("factor", "meaning"),
    [
        (2, "(x layout.tensor)"),
        (1 / 3, "(/ layout.replicate"),
        (5, "(x layout.pipeline)"),
        (7, "(x the micro-batches of a rank)"),
        (1 / 21, "(/ all micro-batches)"),
        (30, "(x all ranks)"),
        (math.sqrt(2), "(x root of layout.tensor)"),
        (1 / math.sqrt(3), "(/ root of layout.replicate"),
    ],
)
def test_a_factor_is_named_after_what_has_its_size(factor: float, meaning: str) -> None:
    line = said(factor)
    assert line.startswith(f"gradient of 'w' is {factor:.6g} times what it should be")
    assert meaning in line


def test_a_factor_that_nothing_has_is_given_without_a_name() -> None:
    assert said(1.7) == "gradient of 'w' is 1.7 times what it should be"
    assert said(-1) == "gradient of 'w' is -1 times what it should be"


def test_what_several_axes_have_is_named_after_the_guilty_one() -> None:
    layout = LayoutSection(shard=2, tensor=2)
    found = Difference("gradient", "w", 1.0, 2.0)
    assert found.line(layout, 4, ("tensor",)).endswith("(x layout.tensor)")
    assert found.line(layout, 4).endswith("(x layout.shard or layout.tensor)")
    assert found.line(layout, 2, ("tensor",)).endswith(
        "(x layout.tensor or the micro-batches of a rank)"
    )


def test_what_no_factor_explains_is_measured() -> None:
    (found,) = compare(outcome({}, w=gradient()), outcome({}, w=gradient(1)), 1e-11)
    assert found.factor is None
    assert "is off by" in found.line(LAYOUT, MICROS)


def test_one_element_is_enough_and_rounding_is_not() -> None:
    right, other = gradient(), gradient()
    other[2, 3] += 1e-9 * right.abs().max()
    (found,) = compare(outcome({}, w=right), outcome({}, w=other), 1e-11)
    assert found.error == pytest.approx(1e-9, rel=1e-3)
    other[2, 3] = right[2, 3] * (1 + 1e-14)
    assert compare(outcome({}, w=right), outcome({}, w=other), 1e-11) == []


@pytest.mark.parametrize("shape", [(), (4, 5), (24,)])
def test_another_shape_is_a_difference(shape: tuple[int, ...]) -> None:
    (found,) = compare(
        outcome({}, w=gradient()), outcome({}, w=torch.zeros(shape, dtype=torch.float64)), 1e-11
    )
    assert math.isinf(found.error)


def test_what_is_on_one_side_only_is_a_difference_on_both_sides() -> None:
    some, none = outcome({"loss": 1.0}, w=gradient()), outcome({})
    for pair in ((some, none), (none, some)):
        found = compare(*pair, 1e-11)
        assert {d.name for d in found} == {"loss", "w"}
        assert all("missing" in d.line(LAYOUT, MICROS) for d in found)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_a_number_is_never_right(bad: float) -> None:
    broken = gradient()
    broken[0, 0] = bad
    found = compare(outcome({"loss": 1.0}, w=gradient()), outcome({"loss": bad}, w=broken), 1e-11)
    assert [d.name for d in found] == ["loss", "w"]


def test_a_whole_kind_that_one_process_does_not_have_is_a_difference() -> None:
    right, other = Outcome({}, {}), Outcome({}, {"average": {"w": gradient()}})
    assert [d.kind for d in compare(right, other, 1e-11)] == ["average"]


def test_gradients_that_are_zero_but_for_rounding_are_right() -> None:
    right = outcome({}, w=gradient(), zero=1e-18 * gradient(2))
    other = outcome({}, w=gradient(), zero=1e-18 * gradient(3))
    assert compare(right, other, 1e-11) == []


def test_the_worst_of_a_kind_comes_first() -> None:
    right = outcome({}, a=gradient(), b=gradient())
    other = outcome({}, a=gradient() * 1.001, b=gradient() * 3)
    found = errors(right, other)
    assert [d.name for d in found] == ["b", "a"]
    assert worst(found) == pytest.approx(2)


def test_a_loss_that_is_summed_in_float32_may_differ_by_its_rounding_and_no_more() -> None:
    right, close, wrong = Outcome(), Outcome(), Outcome()
    right.note("update 1", {"loss": torch.tensor(1.0), "norm": torch.tensor(1.0).double()})
    for other, size in ((close, 1e-7), (wrong, 1e-3)):
        value = torch.tensor(1 + size, dtype=torch.float64)
        other.note("update 1", {"loss": value, "norm": torch.tensor(1.0).double()})
    assert right.narrow == {"loss of update 1"}
    assert compare(right, close, 1e-11) == []
    assert [d.name for d in compare(right, wrong, 1e-11)] == ["loss of update 1"]
    assert [d.name for d in compare(close, right, 1e-11)] == ["loss of update 1"]
