"""Steps on forked ranks beside one process: what tests of layouts share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from megalith.core.launch import start
from megalith.recipe import Recipe, parse
from megalith.recipe.schema import LayoutSection
from megalith.verify import one_thread, trial
from megalith.verify.compare import Difference, compare
from megalith.verify.problem import Problem, problem
from megalith.verify.trial import Outcome, Trial


def forked(count: int, work: Callable[..., Any], *args: Any) -> Any:
    """``work(*args)`` on ranks forked from this very process; rank 0's value."""
    with one_thread():
        return start(count, work, args, fork=True, timeout=120)


def small(
    micros: int = 4, change: dict[str, Any] | None = None, **sections: dict[str, Any]
) -> Problem:
    """A decoder (or another family) of two blocks with ``micros`` ragged micro-batches.

    Args:
        change: fields of the model that differ from verify's small model.
        sections: of the recipe.
    """
    recipe = parse({"data": {"source": "stdlib", "sequence": 48}, **sections})
    made = problem(recipe, micros, 2)
    fields = {**made.recipe.model.model_dump(exclude_unset=False), **(change or {})}
    changed = type(made.recipe.model).model_validate(fields)
    train = made.recipe.train.model_copy(update={"ema": recipe.train.ema})
    small = made.recipe.model_copy(update={"model": changed, "train": train})
    return Problem(small, made.facts, made.updates, made.evaluation)


def outcome(
    given: Problem,
    layout: LayoutSection | None = None,
    dtype: torch.dtype = torch.float64,
    updates: int = 2,
) -> Outcome:
    """What a layout's ranks, or this process, make of a problem."""
    recipe: Recipe = given.recipe
    if layout is not None:
        recipe = recipe.model_copy(update={"layout": layout})
    return trial.run(Trial(recipe, given.updates[:updates], given.evaluation, given.facts, dtype))


def outcomes(given: Problem, layouts: list[LayoutSection], **options: Any) -> list[Outcome]:
    """One after the other, on the same ranks."""
    return [outcome(given, layout, **options) for layout in layouts]


def differences(
    given: Problem,
    layouts: Iterable[dict[str, Any]],
    tolerance: float = 1e-11,
    ignore: Callable[[Difference], bool] = lambda difference: False,
    **options: Any,
) -> dict[str, list[Difference]]:
    """What differs from one process, by layout; empty where nothing does.

    Args:
        layouts: fields of each; those of one number of ranks share their start.
        ignore: differences that are meant to be.
    """
    with one_thread():
        right = outcome(given, **options)
    by_size: dict[int, list[tuple[str, LayoutSection]]] = {}
    for fields in layouts:
        section = LayoutSection(**fields)
        by_size.setdefault(section.ranks, []).append((str(fields), section))
    wrong: dict[str, list[Difference]] = {}
    for ranks, same in by_size.items():
        found = forked(ranks, _outcomes, given, [section for _, section in same], options)
        for (name, _), other in zip(same, found, strict=True):
            different = [d for d in compare(right, other, tolerance) if not ignore(d)]
            if different:
                wrong[name] = different
    return wrong


def _outcomes(
    given: Problem, layouts: list[LayoutSection], options: dict[str, Any]
) -> list[Outcome]:
    return outcomes(given, layouts, **options)


def l2(model: nn.Module) -> Tensor:
    """A regularizer, ``task.regularizer = "trials:l2"``."""
    return 0.01 * torch.stack([p.square().sum() for p in model.parameters()]).sum()


def squared(outputs: Tensor, targets: Tensor) -> Tensor:
    """A loss of a user's over logits ``[tokens, vocab]``: the Brier score of valid targets."""
    valid = targets != -100
    chances = outputs.softmax(-1)[valid]
    return (chances - functional.one_hot(targets[valid], outputs.shape[-1])).square().sum()


ALONE: dict[str, list[dict[str, Any]]] = {
    "replicate": [{"replicate": 2}, {"replicate": 2, "engine": "ddp"}],
    "shard": [{"shard": 2, "zero": zero} for zero in (1, 2, 3)],
    "tensor": [{"tensor": 2}, {"tensor": 2, "sequence_parallel": False}],
    "context": [{"context": 2}, {"context": 2, "exchange": "all-to-all"}],
    "pipeline": [{"pipeline": 2}, {"pipeline": 2, "schedule": "gpipe"}],
}
"""Each axis alone, on two ranks."""


def alone(*axes: str) -> list[dict[str, Any]]:
    """The layouts of these axes alone; of all of them if none is named."""
    return [layout for axis in axes or ALONE for layout in ALONE[axis]]
