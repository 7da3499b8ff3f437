"""From TOML and dotted overrides to a checked :class:`Recipe`."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megalith.core.errors import RecipeError, nearest
from megalith.recipe.messages import one_line
from megalith.recipe.schema import Recipe


def load(path: str | Path | None = None, *overrides: str) -> Recipe:
    """Read a recipe and apply overrides such as ``"train.steps=200"``.

    Args:
        path: a TOML file; ``None`` starts from the defaults.
        overrides: ``section.field=value``, the value in TOML's notation (quotes may be left out).

    Raises:
        RecipeError: in one line, the field's path and what is wrong with it.
    """
    values: dict[str, Any] = {}
    if path is not None:
        values = _read(Path(path))
    for override in overrides:
        _apply(values, override)
    return parse(values)


def parse(values: dict[str, Any]) -> Recipe:
    """A recipe from nested dicts.

    Raises:
        RecipeError: see :func:`load`.
    """
    try:
        return Recipe.model_validate(values)
    except ValidationError as error:
        raise RecipeError(one_line(error)) from error


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        if "=" in path.name:
            raise RecipeError(f"{path}: the recipe's file comes before any override") from error
        beside = [str(one) for one in path.parent.glob("*.toml")]
        raise RecipeError(f"{path}: no such recipe{nearest(str(path), beside)}") from error
    except OSError as error:
        raise RecipeError(f"{path}: cannot read the recipe ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path}: is not a text file in UTF-8") from error
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise RecipeError(f"{path}: not TOML: {error}") from error


def _apply(values: dict[str, Any], override: str) -> None:
    path, equals, text = override.partition("=")
    *parents, leaf = path.strip().split(".")
    if not equals or not all([*parents, leaf]):
        raise RecipeError(f"'{override}': an override has the form section.field=value")
    target = values
    for depth, name in enumerate(parents, 1):
        target = target.setdefault(name, {})
        if not isinstance(target, dict):
            above = ".".join(parents[:depth])
            raise RecipeError(f"{path.strip()}: '{above}' is a value, not a section")
    target[leaf] = _value(text.strip())


def _value(text: str) -> Any:
    try:
        read = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return None if text in ("none", "None", "null") else text
    # Text with a line break could smuggle in further keys: then all of it is the value.
    return read["value"] if len(read) == 1 else text
