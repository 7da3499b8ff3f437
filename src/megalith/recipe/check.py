"""What can be refused before any work, beyond what the schema knows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from megalith.core import imports
from megalith.core.errors import RecipeError
from megalith.recipe.base import IS_REFERENCE, Section
from megalith.recipe.families import DecoderConfig, ResNetConfig
from megalith.recipe.fields import Node
from megalith.recipe.schema import ImageData, Recipe, TextData


def check(recipe: Recipe) -> None:
    """Refuse a recipe whose names, paths, device or combination of parts cannot work here.

    Data files are the data's own to check (``megalith.data.prepare.check_sources``).

    Raises:
        RecipeError: in one line, the field's path and what is wrong.
    """
    _parts_fit(recipe)
    for field, reference in _references(recipe):
        if not callable(imports.resolve(reference, field)):
            raise RecipeError(f"{field}: '{reference}' is neither a function nor a class")
    path = getattr(recipe.model, "path", None)
    if path is not None and not Path(path).exists():
        raise RecipeError(f"model.path: '{path}' does not exist")
    _device_fits(recipe)


def _parts_fit(recipe: Recipe) -> None:
    """Model, data and task must be about the same thing, where all three are our own."""
    model, data, task = recipe.model, recipe.data, recipe.task
    text, images = isinstance(data, TextData), isinstance(data, ImageData)
    if task.factory is None and text and task.name != "language":
        raise RecipeError(
            f"task.name: '{task.name}' needs images, not data.source '{data.source}'; "
            "the task for text is 'language'"
        )
    if task.factory is None and images and task.name != "classify":
        raise RecipeError(
            f"task.name: '{task.name}' needs text, not data.source '{data.source}'; "
            "the task for images is 'classify'"
        )
    if isinstance(model, DecoderConfig) and images:
        raise RecipeError(
            f"model.family: 'decoder' reads text, not data.source '{data.source}'; "
            "the family for images is 'resnet'"
        )
    if isinstance(model, ResNetConfig) and text:
        raise RecipeError(
            f"model.family: 'resnet' reads images, not data.source '{data.source}'; "
            "the family for text is 'decoder'"
        )


def _references(section: Section, path: str = "") -> Iterator[tuple[str, str]]:
    """Every ``package.module:name`` with the path of its field."""
    for name, info in type(section).model_fields.items():
        value, here = getattr(section, name), f"{path}.{name}" if path else name
        if isinstance(value, Section):
            yield from _references(value, here)
        elif isinstance(value, str) and imports.is_reference(value):
            members = Node.field(info).members
            if any(IS_REFERENCE in member.metadata for member in members):
                yield here, value


def _device_fits(recipe: Recipe) -> None:
    from megalith.core import devices  # imports torch, which takes seconds

    device = devices.pick(recipe.train.device)
    if not devices.supports(device, recipe.train.precision):
        working = [p for p in devices.DTYPES if devices.supports(device, p)]
        raise RecipeError(
            f"train.precision: '{recipe.train.precision}' does not run on {device}; "
            f"{' and '.join(working)} do{'es' if len(working) == 1 else ''}"
        )
