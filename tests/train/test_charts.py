"""Curves keep what matters when they are thinned, and axes carry round numbers."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest

from megalith.train import charts
from megalith.train.charts import Line


def line(values: list[float] | np.ndarray, **more: str) -> Line:
    array = np.asarray(values, dtype=float)
    return Line("loss", np.arange(1, len(array) + 1), array, **more)  # type: ignore[arg-type]


def points(path: str) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in re.findall(r"[ML]([-\d.e]+) ([-\d.e]+)", path)]


def test_a_spike_among_a_million_steps_stays() -> None:
    values = np.random.default_rng(0).normal(2, 0.1, 1_000_000)
    values[123_456], values[765_432] = 50.0, -50.0
    thin = charts.thin(line(values))
    assert len(thin.values) <= charts.POINTS
    assert {50.0, -50.0} <= set(thin.values)
    assert (thin.steps[0], thin.steps[-1]) == (1, 1_000_000)
    assert (np.diff(thin.steps) > 0).all()
    assert (values[thin.steps - 1] == thin.values).all()


def test_few_points_are_left_alone() -> None:
    few = line([1.0, math.nan, 2.0])
    assert charts.thin(few) is few


def test_a_long_gap_stays_a_gap_when_thinned() -> None:
    values = np.ones(10_000)
    values[4000:6000] = math.nan
    assert np.isnan(charts.thin(line(values)).values).any()


def test_smoothing_is_the_mean_of_the_window() -> None:
    values = np.random.default_rng(0).normal(size=50)
    values[[0, 7, 8]] = math.nan
    slow = [np.nanmean(values[max(0, i - 2) : i + 3]) for i in range(50)]
    np.testing.assert_allclose(charts.smooth(values, 5), slow)
    assert np.isnan(charts.smooth(np.full(9, math.nan), 5)).all()


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 400, [0, 100, 200, 300, 400]),
        (1.9, 8.6, [2, 4, 6, 8]),
        (0, 6.2e-4, [0, 2e-4, 4e-4, 6e-4]),
        (-0.3, 0.3, [-0.2, 0, 0.2]),
    ],
)
def test_ticks_are_round(low: float, high: float, expected: list[float]) -> None:
    assert charts.ticks(low, high) == pytest.approx(expected)


@pytest.mark.parametrize("low", [-1e7, -3.7, 0.0, 1e-9, 2.2, 9.99, 12345.0])
@pytest.mark.parametrize("span", [1e-6, 3e-4, 0.7, 12.0, 8e8])
def test_there_are_always_a_few_ticks_inside_the_range(low: float, span: float) -> None:
    found = charts.ticks(low, low + span)
    assert 2 <= len(found) <= 6
    assert all(low - span * 1e-6 <= t <= low + span * 1.000001 for t in found)


def test_a_path_goes_through_every_value_and_stops_at_gaps() -> None:
    drawn = charts.chart("Loss", [line([4.0, 3.0, math.nan, 2.0])], end=4)
    assert drawn is not None
    (path,) = drawn.views[0].paths
    assert path.count("M") == 2
    assert path.endswith("h0")  # the value alone after the gap is a dot
    xs, ys = zip(*points(path), strict=True)
    assert xs == (250, 500, 1000)
    # From 2 to 4 with a margin of 5 %: 1.9 at the bottom, 4.1 at the top.
    np.testing.assert_allclose(ys, [(4.1 - v) / 2.2 * 1000 for v in (4, 3, 2)], atol=0.06)


def test_the_log_view_is_offered_only_for_positive_numbers() -> None:
    drawn = charts.chart("Loss", [line([100.0, 10.0, 1.0])], end=3, log=True)
    assert drawn is not None
    assert [view.scale for view in drawn.views] == ["linear", "log"]
    heights = [y for _, y in points(drawn.views[1].paths[0])]
    assert heights[1] == pytest.approx((heights[0] + heights[2]) / 2, abs=0.1)
    assert {"1", "10", "100"} <= {text for _, text in drawn.views[1].ticks}
    other = charts.chart("Loss", [line([1.0, 0.0])], end=2, log=True)
    assert other is not None
    assert [view.scale for view in other.views] == ["linear"]


@pytest.mark.parametrize(
    ("values", "form", "texts"),
    [
        ([0, 6.1e-4], "number", ["0", "2e-4", "4e-4", "6e-4"]),
        ([0, 2e-3], "number", ["0", "0.5e-3", "1.0e-3", "1.5e-3", "2.0e-3"]),
        ([0, 12_300], "quantity", ["0", "5k", "10k"]),
        ([0, 0.46], "percent", ["0 %", "10 %", "20 %", "30 %", "40 %"]),
        ([0, 3.4 * 2**30], "size", ["0 B", "1.0 GiB", "2.0 GiB", "3.0 GiB"]),
        ([0, 2.4], "number", ["0", "0.5", "1.0", "1.5", "2.0", "2.5"]),
    ],
)
def test_ticks_are_named_alike(values: list[float], form: charts.Form, texts: list[str]) -> None:
    drawn = charts.chart("x", [line(values)], end=2, form=form, from_zero=True)
    assert drawn is not None
    assert [text for _, text in drawn.views[0].ticks] == texts


@pytest.mark.parametrize("values", [[2.0], [2.0, 2.0], [0.0, 0.0], [1e-30, 1e30], [-5.0, -5.0]])
@pytest.mark.parametrize("from_zero", [False, True])
def test_odd_curves_are_drawn_too(values: list[float], from_zero: bool) -> None:
    drawn = charts.chart("x", [line(values)], end=len(values), log=True, from_zero=from_zero)
    assert drawn is not None
    for view in drawn.views:
        assert all(-1 <= y <= 1001 for _, y in points(view.paths[0]))
        assert view.ticks


def test_nothing_to_draw_is_no_chart() -> None:
    assert charts.chart("x", [line([]), line([math.nan])], end=1) is None


def test_the_summary_says_the_curve_in_words() -> None:
    drawn = charts.chart("Loss", [line([4.0, 3.0])], end=2, form="loss")
    assert drawn is not None
    assert drawn.summary == "Loss by step: loss 4.000 at step 1, 3.000 at step 2"
