"""A device's constants from runs on it: which share of its peak rates their updates reached.

Each run tells one number, the time of an update. Three factors are looked for: of the operators
that compute, of those that move memory, and of the links. They minimise the squared logarithm of
predicted over measured time, with a small price on leaving the values they have: with few runs
what a run cannot tell apart stays in proportion.
"""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from megalith.core.errors import PlanError
from megalith.core.runs import RunFolder
from megalith.plan import estimate
from megalith.plan.machine import HERE, Device, Machine, key_of, parse
from megalith.plan.worker import Pool
from megalith.recipe import Recipe, load

_PRICE = 0.002
"""Of leaving the constants, against a run's squared error: enough to decide what no run does."""

_LEAST, _MOST = 0.02, 1.0
_ROUNDS = 30


@dataclass(frozen=True)
class Told:
    """A run's recipe, and the seconds of an update: the median of its lines of metrics."""

    name: str
    recipe: Recipe
    seconds: float


@dataclass(frozen=True)
class Fit:
    """Seconds of an update of one run: measured, and predicted before and after."""

    name: str
    measured: float
    before: float
    after: float


@dataclass(frozen=True)
class Calibration:
    """What runs say about a device."""

    before: Device
    device: Device
    fits: list[Fit]

    def as_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        return {
            "device": self.device.key,
            "share": dict(self.device.share),
            "link_share": self.device.link_share,
            "share_before": dict(self.before.share),
            "link_share_before": self.before.link_share,
            "runs": [vars(fit) for fit in self.fits],
        }


def calibrate(
    folders: Sequence[Path],
    on: str | None = None,
    *,
    pool: Pool | None = None,
    say: Callable[[str], None] = lambda what: None,
) -> Calibration:
    """Fit the constants of the device that runs were made on.

    Args:
        folders: run folders, all of one kind of device.
        on: the device as in ``megalith plan --on``; left out: what the runs' environment says.

    Raises:
        PlanError: a run has no update that was timed, or its device is not known.
        RecipeError: a run's recipe is refused.
    """
    pool = pool or Pool()
    runs = [told(folder) for folder in folders]
    names = {on or device_of(folder) for folder in folders}
    if len(names) > 1:
        raise PlanError(f"--calibrate: the runs are of several devices: {', '.join(sorted(names))}")
    (name,) = names
    bare = parse(name, runs[0].recipe.train.precision)
    predictors = []
    for run in runs:
        say(f"tracing {run.name}")
        predictors.append(_predictor(run, replace(bare, count=run.recipe.layout.ranks), pool, say))
    measured = np.log([run.seconds for run in runs])

    def errors(factors: np.ndarray) -> np.ndarray:
        device = changed(bare.device, np.exp(factors))
        return np.log([predict(device) for predict in predictors]) - measured

    factors = _least(errors)
    device = changed(bare.device, np.exp(factors))
    fits = [
        Fit(run.name, run.seconds, predict(bare.device), predict(device))
        for run, predict in zip(runs, predictors, strict=True)
    ]
    return Calibration(bare.device, device, fits)


def told(folder: Path) -> Told:
    """What a run folder says of itself.

    Raises:
        PlanError: it has no recipe or no update that was timed.
    """
    run = RunFolder(folder)
    if not run.recipe.exists():
        raise PlanError(f"--calibrate: {folder} is no run folder: it has no {run.recipe.name}")
    lines = [json.loads(line) for line in _lines(run.metrics)]
    rows = [line for line in lines if line.get("kind") == "train" and "seconds_compute" in line]
    # The first line holds warming up.
    pairs = itertools.pairwise(rows)
    times = [
        b["seconds_compute"] / (b["step"] - a["step"]) for a, b in pairs if b["step"] > a["step"]
    ]
    if not times:
        raise PlanError(f"--calibrate: {folder} has fewer than two lines of metrics with times")
    return Told(str(folder), load(run.recipe), statistics.median(times))


def device_of(folder: Path) -> str:
    """The machine that a run was made on, as ``--on`` names it.

    Raises:
        PlanError: the catalogue does not know the device.
    """
    file = RunFolder(folder).environment
    found = json.loads(file.read_text("utf-8")) if file.exists() else {}
    if found.get("device", "cpu").startswith("cpu"):
        return HERE
    name = str(found.get("device_name", ""))
    key = key_of(name)
    if key is None:
        raise PlanError(
            f"--calibrate: '{name}' of {folder} is not in the catalogue; say it by --on"
        )
    return key


def changed(device: Device, factors: Sequence[float] | np.ndarray) -> Device:
    """A device with its shares times the factors of computing, memory and links."""
    computing, memory, links = (float(one) for one in factors)
    times = {"matmul": computing, "attention": computing, "memory": memory}
    return replace(
        device,
        share={name: _within(value * times[name]) for name, value in device.share.items()},
        link_share=_within(device.link_share * links),
    )


def _within(share: float) -> float:
    return min(_MOST, max(_LEAST, share))


def _lines(file: Path) -> list[str]:
    return file.read_text("utf-8").splitlines() if file.exists() else []


def _predictor(
    run: Told, machine: Machine, pool: Pool, say: Callable[[str], None]
) -> Callable[[Device], float]:
    """Seconds of an update of the run's recipe, by the device's constants; traced once."""
    asked = estimate.question(run.recipe, machine)
    machine, _ = estimate.seated(asked.recipe, machine)
    looks = estimate.traces(asked, pool, full=False, ends_only=False, say=say)
    own = machine.device

    def predict(device: Device) -> float:
        # Ranks that share a processor have their part of its rates, and the same shares of them.
        used = replace(own, share=device.share, link_share=device.link_share)
        return estimate.time_of(asked.recipe, replace(machine, device=used), looks).seconds

    return predict


def _least(errors: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """Levenberg-Marquardt for the three logarithms, starting from no change."""
    at, damp = np.zeros(3), 1e-3

    def cost(factors: np.ndarray) -> float:
        return float((errors(factors) ** 2).sum() + _PRICE * (factors**2).sum())

    for _ in range(_ROUNDS):
        here, step = errors(at), 1e-4
        slope = np.stack([(errors(at + step * e) - here) / step for e in np.eye(3)], 1)
        normal = slope.T @ slope + (_PRICE + damp) * np.eye(3)
        move = np.linalg.solve(normal, slope.T @ here + _PRICE * at)
        if cost(at - move) < cost(at):
            at, damp = at - move, damp / 3
        else:
            damp *= 4
        if np.abs(move).max() < 1e-5:
            break
    return at
