"""Curves for the report: from numbers by step to SVG paths, ticks and a read-out.

A plot is a square of 1000 by 1000 that the page stretches to any size (strokes keep their width),
with its labels beside it as ordinary text, so that they keep their size on a phone. Everything is
computed here; the page's script only moves the read-out.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from megalith.core import units

SIZE = 1000
POINTS = 600
"""Largest number of points drawn for a line, whatever the number of steps."""

Form = Literal["loss", "number", "quantity", "percent", "size"]
Style = Literal["line", "faint", "dots", "best"]
Tick = tuple[float, str]


def show(value: float, form: Form) -> str:
    """``value`` as the read-out says it."""
    shown: dict[Form, Callable[[float], str]] = {
        "loss": lambda v: units.number(v, fixed=True),
        "number": units.number,
        "quantity": units.quantity,
        "percent": lambda v: units.percent(v, 4),
        "size": units.size,
    }
    return shown[form](value)


@dataclass(frozen=True)
class Line:
    """Values by step.

    Attributes:
        label: its name in the legend.
        steps: updates done, rising.
        values: one for each step; NaN leaves a gap.
        colour: ``c1`` to ``c4``, the page's palette.
        style: a line, a faint line, a line with a dot at each value, or one marked point.
    """

    label: str
    steps: np.ndarray
    values: np.ndarray
    colour: str = "c1"
    style: Style = "line"


@dataclass(frozen=True)
class View:
    """One drawing of a chart, with a linear or logarithmic axis."""

    scale: Literal["linear", "log"]
    ticks: list[Tick]
    paths: list[str]
    heights: list[list[float | None]]


@dataclass(frozen=True)
class Chart:
    """What the page needs to draw one chart.

    Attributes:
        lines: the lines that hold at least one number, thinned.
        views: the linear one first.
        summary: the curves in words.
        marks: positions from left and names of events.
    """

    title: str
    form: Form
    lines: list[Line]
    views: list[View]
    steps: list[Tick]
    end: int
    summary: str
    marks: list[Tick] = field(default_factory=list)

    def last(self, index: int) -> str:
        """The newest number of a line, formatted."""
        values = self.lines[index].values
        return show(float(values[np.isfinite(values)][-1]), self.form)

    def readout(self) -> dict[str, Any]:
        """Steps, heights and texts of every line, for the page's script."""
        return {
            "end": self.end,
            "lines": [
                {
                    "step": line.steps.tolist(),
                    "text": [show(v, self.form) if math.isfinite(v) else None for v in line.values],
                    **{view.scale: view.heights[i] for view in self.views},
                }
                for i, line in enumerate(self.lines)
            ],
        }


def chart(
    title: str,
    lines: Sequence[Line],
    *,
    end: int,
    form: Form = "number",
    log: bool = False,
    from_zero: bool = False,
    marks: Sequence[tuple[int, str]] = (),
) -> Chart | None:
    """Draw ``lines`` from step 0 to ``end``; ``None`` when they hold no finite number.

    Args:
        log: offer a logarithmic view too, where all values are positive.
        from_zero: the axis starts at zero.
        marks: steps of events, with their names.
    """
    thinned = [thin(line) for line in lines if np.isfinite(line.values).any()]
    if not thinned:
        return None
    every = np.concatenate([line.values for line in thinned])
    every = every[np.isfinite(every)]
    views = [_view("linear", thinned, _linear_range(every, from_zero), end, form)]
    if log and every.min() > 0:
        views.append(_view("log", thinned, _log_range(every), end, form))
    end = max(end, 1)
    return Chart(
        title=title,
        form=form,
        lines=thinned,
        views=views,
        steps=[(s / end * SIZE, units.quantity(s)) for s in ticks(0, end, 4) if s % 1 == 0],
        end=end,
        summary=_summary(title, thinned, form),
        marks=[(step / end * SIZE, name) for step, name in marks if step <= end],
    )


def thin(line: Line, limit: int = POINTS) -> Line:
    """``line`` with at most ``limit`` points: the least and the largest of each stretch.

    So a spike of a single step stays visible among a million.
    """
    count = len(line.values)
    if count <= limit:
        return line
    kept = {0, count - 1}
    for part in np.array_split(np.arange(count), limit // 2 - 1):
        finite = part[np.isfinite(line.values[part])]
        if len(finite):
            of = line.values[finite]
            kept |= {int(finite[of.argmin()]), int(finite[of.argmax()])}
        else:
            kept.add(int(part[0]))
    index = np.array(sorted(kept))
    return Line(line.label, line.steps[index], line.values[index], line.colour, line.style)


def smooth(values: np.ndarray, window: int) -> np.ndarray:
    """The mean over ``window`` values centred at each; fewer at the ends, NaN left out."""
    finite = np.isfinite(values)
    total = np.concatenate([[0.0], np.cumsum(np.where(finite, values, 0.0))])
    count = np.concatenate([[0], np.cumsum(finite)])
    index = np.arange(len(values))
    low = np.maximum(index - window // 2, 0)
    high = np.minimum(index + window // 2 + 1, len(values))
    number = count[high] - count[low]
    return np.where(number > 0, (total[high] - total[low]) / np.maximum(number, 1), np.nan)


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """At most about ``count`` round numbers (1, 2 or 5 times a power of ten) in ``[low, high]``."""
    rough = (high - low) / (count + 0.5)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [i * step for i in range(first, last + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    fine = [m * 10.0**p for p in powers for m in (1, 2, 5) if low <= m * 10.0**p <= high]
    if len(fine) < 3:  # less than a decade: round steps, at their logarithmic places
        return [t for t in ticks(low, high, 4) if t > 0]
    if len(fine) <= 7:
        return fine
    decades = [10.0**p for p in powers if low <= 10.0**p <= high]
    return decades[:: math.ceil(len(decades) / 7)]


def _linear_range(values: np.ndarray, from_zero: bool) -> tuple[float, float]:
    low, high = float(values.min()), float(values.max())
    if from_zero and low >= 0:
        return 0.0, high * 1.06 or 1.0
    margin = (high - low) * 0.05 or abs(high) * 0.05 or 1.0
    return low - margin, high + margin


def _log_range(values: np.ndarray) -> tuple[float, float]:
    low, high = float(values.min()), float(values.max())
    margin = (high / low) ** 0.05 if high > low else 1.05
    return low / margin, high * margin


def dots(path: str) -> str:
    """A path's points as strokes of no length, which round caps make dots."""
    return re.sub(r"[ML]([^MLh]+)(?:h0)?", r"M\1h0", path)


def _view(
    scale: Literal["linear", "log"],
    lines: Sequence[Line],
    span: tuple[float, float],
    end: int,
    form: Form,
) -> View:
    low, high = span
    place: Callable[[Any], Any] = np.log10 if scale == "log" else np.asarray
    bottom, top = float(place(low)), float(place(high))

    def height(values: Any) -> Any:
        return np.round((top - place(values)) / (top - bottom) * SIZE, 1)

    heights = [height(line.values) for line in lines]
    marks = _log_ticks(low, high) if scale == "log" else _round_values(low, high, form)
    return View(
        scale=scale,
        ticks=[(float(height(v)), text) for v, text in _named(marks, scale, form)],
        paths=[
            _path(np.round(line.steps / max(end, 1) * SIZE, 1), h)
            for line, h in zip(lines, heights, strict=True)
        ],
        heights=[[h if math.isfinite(h) else None for h in array.tolist()] for array in heights],
    )


def _round_values(low: float, high: float, form: Form) -> list[float]:
    if form != "size":
        return ticks(low, high)
    unit = 1024.0 ** max(0, math.floor(math.log(max(high, 1), 1024)))
    return [t * unit for t in ticks(low / unit, high / unit)]


def _named(values: list[float], scale: str, form: Form) -> Iterator[Tick]:
    if form in ("percent", "size"):
        yield from ((v, show(v, form)) for v in values)
        return
    top = max(map(abs, values), default=0)
    if top >= 1e4:
        yield from ((v, units.quantity(v)) for v in values)
        return
    gap = min((b - a for a, b in itertools.pairwise(values)), default=1.0)
    power = math.floor(math.log10(top * (1 + 1e-9))) if top else 0
    unit, suffix = (10.0**power, f"e{power}") if power < -2 else (1.0, "")
    # As many decimals as the step between ticks needs, the same for all.
    digits = next((d for d in range(9) if math.isclose(round(gap / unit, d), gap / unit)), 9)
    for value in values:
        if scale == "log":
            yield value, units.number(value, 3)
        else:
            yield value, f"{value / unit:.{digits}f}{suffix}" if value else "0"


def _path(x: np.ndarray, y: np.ndarray) -> str:
    """SVG path data; a number alone between gaps becomes a stroke of no length, a round dot."""
    parts: list[str] = []
    drawing = False
    for i in range(len(x)):
        if not math.isfinite(y[i]):
            drawing = False
            continue
        parts.append(f"{'L' if drawing else 'M'}{x[i]:g} {y[i]:g}")
        if not drawing and (i + 1 == len(x) or not math.isfinite(y[i + 1])):
            parts.append("h0")
        drawing = True
    return "".join(parts)


def _summary(title: str, lines: Sequence[Line], form: Form) -> str:
    said = []
    for line in lines:
        finite = np.isfinite(line.values)
        steps, values = line.steps[finite], line.values[finite]
        text = f"{line.label} {show(float(values[0]), form)} at step {steps[0]}"
        if len(values) > 1:
            text += f", {show(float(values[-1]), form)} at step {steps[-1]}"
        said.append(text)
    return f"{title} by step: {'; '.join(said)}"
