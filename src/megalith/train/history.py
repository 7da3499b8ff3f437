"""A run as its folder tells it, finished or not."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np

from megalith.core.runs import RunFolder
from megalith.train.metrics import read_lines, read_metrics

Entry = dict[str, Any]
Values = tuple[np.ndarray, np.ndarray]
"""Steps (int64) and what was measured there (float64, NaN where it was not finite)."""


@dataclass(frozen=True)
class History:
    """What a run folder holds, read with patience: every part may be missing or unfinished."""

    folder: RunFolder
    recipe_text: str = ""
    recipe: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    train: list[Entry] = field(default_factory=list)
    validation: list[Entry] = field(default_factory=list)
    events: list[Entry] = field(default_factory=list)
    samples: list[Entry] = field(default_factory=list)

    @cached_property
    def step(self) -> int:
        """Updates done, as far as the metrics tell."""
        return max((e["step"] for e in [*self.train, *self.validation, *self.events]), default=0)

    @property
    def best(self) -> Entry | None:
        """The validation line with the lowest loss, the first of equals."""
        known = [e for e in self.validation if is_number(e.get("loss"))]
        return min(known, key=lambda e: e["loss"], default=None)

    @cached_property
    def item(self) -> str:
        """What throughput counts, such as tokens or images."""
        rates = (name for e in self.train for name in e if name.endswith("_per_s"))
        return next(rates, "items_per_s").removesuffix("_per_s")

    def setting(self, path: str, default: Any = None) -> Any:
        """A field of the recipe, such as ``train.steps``."""
        value: Any = self.recipe
        for name in path.split("."):
            value = value.get(name) if isinstance(value, dict) else None
        return default if value is None else value

    def total(self, name: str) -> float:
        """The sum of a train line's field over the run."""
        return float(np.nansum(column(self.train, name)[1]))


def read_history(folder: RunFolder | Path) -> History:
    """Read what there is of a run."""
    run = folder if isinstance(folder, RunFolder) else RunFolder(Path(folder))
    recipe_text = _text(run.recipe)
    try:
        recipe = tomllib.loads(recipe_text)
    except tomllib.TOMLDecodeError:
        recipe = {}
    try:
        environment = json.loads(_text(run.environment))
    except ValueError:
        environment = {}
    entries = sorted(read_metrics(run), key=lambda e: e["step"])
    return History(
        folder=run,
        recipe_text=recipe_text,
        recipe=recipe,
        environment=environment if isinstance(environment, dict) else {},
        train=[e for e in entries if e["kind"] == "train"],
        validation=[e for e in entries if e["kind"] == "validation"],
        events=[e for e in entries if e["kind"] == "event"],
        samples=[s for s in read_lines(run.samples) if isinstance(s.get("text"), str)],
    )


def is_number(value: Any) -> TypeGuard[float]:
    """Whether a value from a file is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def column(entries: Sequence[Entry], name: str) -> Values:
    """Steps (int64) and values (float64, NaN for null) of the entries that have a field."""
    having = [e for e in entries if name in e]
    steps = np.array([e["step"] for e in having], dtype=np.int64)
    try:
        values = np.array([e[name] for e in having], dtype=float)  # null becomes NaN
    except (TypeError, ValueError):  # other things than numbers stand there
        numbers = [e[name] if is_number(e[name]) else math.nan for e in having]
        values = np.array(numbers, dtype=float)
    return steps, np.where(np.isfinite(values), values, math.nan)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return ""
