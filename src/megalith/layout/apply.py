"""The one place where a model is wrapped, in the one order: checkpointing, then compilation."""

from __future__ import annotations

from torch import nn

from megalith.core.errors import RecipeError
from megalith.layout import checkpointing, compile
from megalith.layout.units import units
from megalith.recipe.schema import TrainSection


def apply(model: nn.Module, section: TrainSection) -> None:
    """Wrap the units of ``model`` in place as the recipe says.

    Raises:
        RecipeError: the model has no repeated parts to work on.
    """
    if section.checkpointing == "none" and not section.compile:
        return
    parts = units(model)
    if not parts:
        field = "checkpointing" if section.checkpointing != "none" else "compile"
        raise RecipeError(
            f"train.{field}: works on repeated parts, and this model names none; give it an "
            "attribute 'units' with patterns of module names"
        )
    checkpointing.apply(parts, section.checkpointing)
    if section.compile:
        compile.apply(parts)
