"""Numbers are written as people read them, also where rounding reaches the next unit."""

from __future__ import annotations

import math

import pytest

from megalith.core import units


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (3.21456, "3.215"),
        (3.2, "3.2"),
        (400.0, "400"),
        (0.0123456, "0.01235"),
        (6e-4, "6e-4"),
        (6.25e-5, "6.25e-5"),
        (-1.5, "-1.5"),
        (12345.6, "12,346"),
        (math.inf, "inf"),
        (math.nan, "nan"),
    ],
)
def test_number(value: float, text: str) -> None:
    assert units.number(value) == text


def test_fixed_numbers_keep_their_zeros() -> None:
    values = (3.2, 10, 0.5, 6e-4)
    texts = [units.number(v, 3, fixed=True) for v in values]
    assert texts == ["3.20", "10.0", "0.500", "6.00e-4"]


@pytest.mark.parametrize(
    ("value", "text"),
    [(12, "12"), (1234, "1.23k"), (999_999, "1M"), (13.1e6, "13.1M"), (175e9, "175B")],
)
def test_quantity(value: float, text: str) -> None:
    assert units.quantity(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 B"), (1023, "1023 B"), (2**20 - 1, "1.0 MiB"), (3.4 * 2**30, "3.4 GiB")],
)
def test_size(value: float, text: str) -> None:
    assert units.size(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (0.034, "34 ms"),
        (0.9999, "1.0 s"),
        (5.2, "5.2 s"),
        (59.6, "1m00s"),
        (133, "2m13s"),
        (3599.7, "1h00m"),
        (11_040, "3h04m"),
        (183_600, "2d03h"),
    ],
)
def test_duration(seconds: float, text: str) -> None:
    assert units.duration(seconds) == text


def test_percent() -> None:
    assert units.percent(0.4618) == "46.2 %"
    assert units.percent(0.97043, 4) == "97.04 %"
