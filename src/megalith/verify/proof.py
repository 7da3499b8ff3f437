"""The proof of a layout: everything that it computes, beside what one process computes.

A layout is tried four times: gradients with plain SGD and no clipping (clipping and Adam hide
constant factors), updates with the recipe's own optimizer and clipping, and one update more from a
checkpoint that one process saved; one process goes on from the layout's checkpoint in turn.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from megalith.core import imports, launch
from megalith.core.diagnose import RankFailed
from megalith.core.errors import MegalithError, RecipeError
from megalith.recipe import Recipe
from megalith.recipe.families import FactoryModel
from megalith.recipe.schema import LayoutSection
from megalith.verify import layouts, trial
from megalith.verify.compare import Difference, compare, errors, worst
from megalith.verify.problem import Problem, keeps_statistics, needs_layers, problem
from megalith.verify.trial import Outcome, Trial

EXACT = 1e-11
"""Of float64: right layouts come to 1e-13, mistakes to 1e-2 (measured)."""

_STEPS = 5  # of the schedule, of which three are run
_CLIP = 0.05  # a limit that every gradient here exceeds
_BATCH = 8  # layouts of one number of ranks that share their ranks' start


@dataclass(frozen=True)
class Verdict:
    """What came out for one layout.

    Attributes:
        error: the largest relative difference of all that was compared.
        differences: what differs by more than the tolerance, the worst of each kind first.
        axes: the fewest axes of the layout that bring a difference in.
        failure: the error that ended the trial, if one did.
    """

    layout: LayoutSection
    error: float
    differences: list[Difference]
    seconds: float
    micros: int = 1
    precision: str = "float64"
    axes: tuple[str, ...] = ()
    failure: str | None = None

    @property
    def right(self) -> bool:
        """Whether the layout computes what one process does."""
        return not self.differences and self.failure is None

    def lines(self) -> list[str]:
        """Every difference in words, or the failure; none if the layout is right."""
        failed = [] if self.failure is None else [self.failure]
        return [*failed, *(d.line(self.layout, self.micros, self.axes) for d in self.differences)]


@dataclass
class Proof:
    """Proofs of a recipe's layouts; what one process computes is kept for the next layout.

    Args:
        dtype: of weights and optimizer state: float64, or float32 beside ``precision``.
        tolerance: largest relative difference that is right.
        precision: of matmuls; if given, only loss and gradients are compared: Adam makes large
            differences of small ones.
    """

    recipe: Recipe
    dtype: torch.dtype = torch.float64
    tolerance: float = EXACT
    precision: str | None = None
    _right: dict[tuple[Any, ...], _Right] = field(default_factory=dict, repr=False)

    def of_all(self, wanted: Sequence[LayoutSection]) -> Iterator[Verdict]:
        """A verdict on each layout; those of one size share the start of their ranks.

        A module of the user's refuses some only when it is cut; those are left out.
        """
        by_size: dict[int, list[LayoutSection]] = {}
        for layout in wanted:
            by_size.setdefault(layout.ranks, []).append(layout)
        for same in by_size.values():
            for first in range(0, len(same), _BATCH):
                yield from self._together(same[first : first + _BATCH])

    def of(self, layout: LayoutSection) -> Verdict:
        """The verdict on one layout, with the axes that bring a fault in.

        Raises:
            RecipeError: the layout is refused.
        """
        start = time.perf_counter()
        try:
            verdict = self._on_ranks([layout])[0]
        except RecipeError:
            raise
        except (MegalithError, RankFailed) as error:
            took = time.perf_counter() - start
            verdict = Verdict(layout, float("inf"), [], took, failure=str(error))
        return verdict if verdict.right else replace(verdict, axes=self._axes(layout))

    def prepare(self, layout: LayoutSection) -> None:
        """Compute now what one process computes for ``layout``; later proofs use it as it is."""
        self._one_process(layout)

    def _together(self, same: Sequence[LayoutSection]) -> Iterator[Verdict]:
        try:
            verdicts = self._on_ranks(same)
        except (MegalithError, RankFailed):
            # One of them failed, and its ranks with it: each by itself, to see which.
            yield from (verdict for one in same if (verdict := self._of_allowed(one)))
            return
        for verdict in verdicts:
            yield verdict if verdict.right else self.of(verdict.layout)

    def _of_allowed(self, layout: LayoutSection) -> Verdict | None:
        try:
            return self.of(layout)
        except RecipeError as error:
            if isinstance(self.recipe.model, FactoryModel):
                return None
            axes = layouts.spread_axes(layout)  # `layouts.allows` has said otherwise
            return Verdict(layout, float("inf"), [], 0.0, axes=axes, failure=str(error))

    def _on_ranks(self, same: Sequence[LayoutSection]) -> list[Verdict]:
        with tempfile.TemporaryDirectory(prefix="megalith-verify-") as folder:
            jobs = []
            for number, layout in enumerate(same):
                right = self._one_process(layout)
                jobs.append((layout, right, Path(folder) / str(number)))
            found = launch.start(
                same[0].ranks,
                _judge_all,
                (jobs, self),
                fork=True,
                timeout=120,
            )
            if self.precision is not None:
                return found
            return [
                self._go_on(verdict, *job[1:]) for verdict, job in zip(found, jobs, strict=True)
            ]

    def _go_on(self, verdict: Verdict, right: _Right, folder: Path) -> Verdict:
        """One process from the layout's checkpoint: what it computes must be the same."""
        again = trial.run(replace(right.last, load=folder / "saved", save=None))
        differences = compare(right.after, again, self.tolerance)
        error = max(verdict.error, worst(errors(right.after, again)))
        renamed = [
            replace(d, name=f"{d.name} (after loading the layout's checkpoint in one process)")
            for d in differences
        ]
        return replace(verdict, error=error, differences=[*verdict.differences, *renamed])

    def _axes(self, layout: LayoutSection) -> tuple[str, ...]:
        """The fewest axes that are wrong together."""
        for part in layouts.parts(layout):
            if not layouts.allows(self.recipe, part):
                continue
            try:
                right = self._on_ranks([part])[0].right
            except RecipeError:
                continue
            except (MegalithError, RankFailed):
                right = False
            if not right:
                return layouts.spread_axes(part)
        return layouts.spread_axes(layout)

    def _one_process(self, layout: LayoutSection) -> _Right:
        """What one process computes, for layouts with this number of micro-batches and blocks."""
        micros = _micros(layout)
        merged = layout.data_ranks if layout.synchronised_norms else 1
        key = (micros, needs_layers(layout), merged)
        if key not in self._right:
            self._right[key] = _right(
                problem(self.recipe, micros, needs_layers(layout)),
                self.dtype,
                merged,
                self.precision,
            )
        return self._right[key]


@dataclass
class _Right:
    """What one process computes.

    Attributes:
        problem: with one micro-batch per rank and turn.
        gradients: plain SGD, no clipping.
        updates: the recipe's optimizer, clipped.
        after: one update more, from the checkpoint in ``folder``.
        last: the trial of that update.
    """

    problem: Problem
    gradients: Outcome
    updates: Outcome
    after: Outcome
    last: Trial
    folder: Any


def _right(given: Problem, dtype: torch.dtype, merged: int, precision: str | None) -> _Right:
    plain, own = _recipes(given.recipe, precision)
    folder = tempfile.TemporaryDirectory(prefix="megalith-verify-")
    saved = Path(folder.name) / "saved"
    updates = [_merge(update, merged) for update in given.updates]
    first, last = updates[:-1], updates[-1:]
    common = (given.evaluation, given.facts, dtype)
    gradients = trial.run(Trial(plain, first, *common))
    clipped = trial.run(Trial(own, first, *common, save=saved))
    going_on = Trial(own, last, *common, load=saved)
    return _Right(given, gradients, clipped, trial.run(going_on), going_on, folder)


def _recipes(recipe: Recipe, precision: str | None) -> tuple[Recipe, Recipe]:
    """Plain SGD without clipping, and the recipe's own optimizer with clipping."""
    train = recipe.train.model_copy(
        update={"precision": precision or "fp32", "compile": False, "steps": _STEPS}
    )
    sgd = {"name": "sgd", "factory": None, "args": {}, "momentum": 0.0, "groups": []}
    plain = {
        "train": train.model_copy(update={"clip": None}),
        "optim": recipe.optim.model_copy(
            update={**sgd, "lr": 0.1, "schedule": "constant", "warmup": 0}
        ),
    }
    # A rate that falls with each update: a schedule that counts ranks or micro-batches shows.
    falling: dict[str, object] = {"warmup": 0}
    if not imports.is_reference(recipe.optim.schedule):
        falling["schedule"] = "cosine"
    own = {
        "train": train.model_copy(update={"clip": _CLIP}),
        "optim": recipe.optim.model_copy(update=falling),
    }
    return recipe.model_copy(update=plain), recipe.model_copy(update=own)


def _merge(update: trial.Update, ranks: int) -> trial.Update:
    """Micro-batches that ``ranks`` ranks have at the same time, as one."""
    if ranks == 1:
        return update
    return [
        {
            name: torch.cat([batch[name] for batch in update[first : first + ranks]])
            for name in update[0]
        }
        for first in range(0, len(update), ranks)
    ]


def _micros(layout: LayoutSection) -> int:
    """Micro-batches of an update over all ranks: at least two on each, and four in all."""
    least = layout.data_ranks * max(2, layout.pipeline)
    return max(4, least)


def _judge_all(jobs: Sequence[tuple[LayoutSection, _Right, Path]], proof: Proof) -> list[Verdict]:
    """On every rank: try each layout; the main rank compares."""
    return [_judge(layout, right, folder, proof) for layout, right, folder in jobs]


def _judge(layout: LayoutSection, right: _Right, folder: Path, proof: Proof) -> Verdict:
    start = time.perf_counter()
    given = right.problem
    plain, own = (
        one.model_copy(update={"layout": layout}) for one in _recipes(given.recipe, proof.precision)
    )
    common = (given.evaluation, given.facts, proof.dtype)
    first, last = given.updates[:-1], given.updates[-1:]
    pairs = [(right.gradients, trial.run(Trial(plain, first, *common)))]
    if proof.precision is None:
        saved = Trial(own, first, *common, save=folder / "saved")
        pairs.append((right.updates, trial.run(saved)))
        pairs.append((right.after, trial.run(Trial(own, last, *common, load=right.last.load))))
    else:
        pairs = [(_only_gradients(a), _only_gradients(b)) for a, b in pairs]
    if keeps_statistics(given.recipe) and not layout.synchronised_norms:
        pairs = [(_without_statistics(a), _without_statistics(b)) for a, b in pairs]
    found = [difference for pair in pairs for difference in errors(*pair)]
    return Verdict(
        layout,
        worst(found),
        [d for d in found if not d.within(proof.tolerance)],
        time.perf_counter() - start,
        micros=_micros(layout) // layout.data_ranks,
        precision=proof.precision or "float64",
    )


def _only_gradients(outcome: Outcome) -> Outcome:
    numbers = {name: v for name, v in outcome.numbers.items() if name.endswith("of update 1")}
    return Outcome(numbers, {"gradient": outcome.tensors.get("gradient", {})}, outcome.narrow)


def _without_statistics(outcome: Outcome) -> Outcome:
    """Without running means and variances, and without evaluation, which uses them."""
    kept = {
        name: t
        for name, t in outcome.tensors.get("parameter", {}).items()
        if not name.endswith(("running_mean", "running_var", "num_batches_tracked"))
    }
    numbers = {n: v for n, v in outcome.numbers.items() if "evaluation" not in n}
    return Outcome(numbers, {**outcome.tensors, "parameter": kept}, outcome.narrow)
