"""Whether a layout computes exactly what one process computes: ``megalith.verify(recipe)``.

The recipe's own step runs on one process and on ranks that are forked here, in float64, from the
same weights over the same ragged batches. Loss, counts, every gradient, the norm before clipping,
weights, optimizer state, averages, evaluation and checkpoints are compared (contracts 1 to 8).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from megalith.core.errors import RecipeError
from megalith.recipe import Recipe
from megalith.recipe.schema import LayoutSection
from megalith.verify import layouts
from megalith.verify.problem import problem
from megalith.verify.proof import EXACT, Proof, Verdict

__all__ = ["EXACT", "Verdict", "verify"]

_ROUNDED = {"fp32": 1e-4, "bf16": 5e-2, "fp16": 5e-2}
"""Largest relative difference of gradients in the recipe's own precision."""


def verify(
    recipe: Recipe,
    *,
    up_to: int | None = None,
    report: Callable[[Verdict], None] = lambda verdict: None,
) -> list[Verdict]:
    """Prove the recipe's own layout, or every layout that it allows.

    A family of ours is made small first: a layout is right or wrong whatever the size. A module of
    the user's runs as it is, on its own data.

    Args:
        up_to: every layout of 2 to this many ranks; left out: the recipe's own, also in the
            precision it trains in.
        report: called with each verdict as soon as it is there.

    Raises:
        RecipeError: the recipe has no layout to prove, or one that is refused.
    """
    found: list[Verdict] = []
    with one_thread():
        for verdict in _verdicts(recipe, up_to):
            report(verdict)
            found.append(verdict)
    return found


def candidates(recipe: Recipe, up_to: int) -> list[LayoutSection]:
    """The layouts that :func:`verify` tries with ``up_to``."""
    small = problem(recipe, 8, 2 * up_to).recipe
    table = LayoutSection(split=recipe.layout.split)
    return layouts.every(small.model_copy(update={"layout": table}), up_to)


def _verdicts(recipe: Recipe, up_to: int | None) -> Iterator[Verdict]:
    if up_to is not None:
        yield from Proof(recipe).of_all(candidates(recipe, up_to))
        return
    if recipe.layout.ranks == 1:
        raise RecipeError(
            "layout: one process, which there is nothing to compare with; name a layout, such as "
            "layout.shard=2, or try all of them with --all 4"
        )
    layouts.refuse(recipe)
    yield Proof(recipe).of(recipe.layout)
    name = recipe.train.precision
    own = Proof(recipe, torch.float32, _ROUNDED[name], precision=name)
    yield own.of(recipe.layout)


@contextmanager
def one_thread() -> Iterator[None]:
    """Ranks are forked: a pool of threads would not survive it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
