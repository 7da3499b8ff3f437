"""From TOML and dotted overrides to a checked :class:`Recipe`."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from megalith.core.errors import RecipeError, nearest
from megalith.recipe.schema import Recipe

_TAGS = {"decoder", "resnet", "text", "images", "factory"}


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
        try:
            text = Path(path).read_text(encoding="utf-8")
        except OSError as error:
            raise RecipeError(f"{path}: cannot read the recipe ({error.strerror})") from error
        try:
            values = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise RecipeError(f"{path}: not TOML: {error}") from error
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
        raise RecipeError(_one_line(error)) from error


def _apply(values: dict[str, Any], override: str) -> None:
    path, equals, text = override.partition("=")
    if not equals or not path.strip():
        raise RecipeError(f"'{override}': an override has the form section.field=value")
    *parents, leaf = path.strip().split(".")
    target = values
    for name in parents:
        target = target.setdefault(name, {})
        if not isinstance(target, dict):
            raise RecipeError(f"{path}: '{name}' is a value, not a section")
    target[leaf] = _value(text.strip())


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return None if text in ("none", "None", "null") else text


def _one_line(error: ValidationError) -> str:
    # A default that depends on a field that failed is not an error of its own.
    found = [e for e in error.errors() if e["type"] != "default_factory_not_called"]
    first = _message(found[0])
    return first if len(found) == 1 else f"{first} (and {len(found) - 1} more)"


def _message(error: Any) -> str:
    path = [str(p) for i, p in enumerate(error["loc"]) if not (i == 1 and p in _TAGS)]
    text = error["msg"].removeprefix("Value error, ")
    if error["type"] == "extra_forbidden":
        known = _names_at(path[:-1], error["loc"])
        return f"{'.'.join(path)}: no such field{nearest(path[-1], known)}"
    if error["type"] == "missing":
        return f"{'.'.join(path)}: is needed"
    if error["type"] == "union_tag_invalid":
        given, valid = error["ctx"]["tag"], error["ctx"]["expected_tags"]
        return f"{path[0]}.family: '{given}' is not one of {valid}{nearest(given, _TAGS)}"
    if error["type"] == "value_error" and "|" in text:
        field, _, text = text.partition("|")
        return f"{'.'.join([*path, field])}: {text}"
    if error["type"] == "literal_error":
        expected = error["ctx"]["expected"]
        names = [name.strip(" '") for name in expected.replace(" or ", ",").split(",")]
        return f"{'.'.join(path)}: must be {expected}{nearest(str(error['input']), names)}"
    given = "" if isinstance(error["input"], dict) else f", not {error['input']!r}"
    return f"{'.'.join(path)}: {text[0].lower()}{text[1:]}{given}"


def _names_at(path: list[str], loc: tuple[Any, ...]) -> list[str]:
    """The valid names inside the section at ``path``."""
    found: list[type[BaseModel]] = [Recipe]
    for depth, name in enumerate(path):
        found = [
            section
            for model in found
            if name in model.model_fields
            for section in _sections(model.model_fields[name].annotation)
        ]
        if depth == 0 and len(found) > 1:  # a union: keep the kind the error was found in
            found = [s for s in found if _tag_of(s) == loc[1]] or found
    return [field for model in found for field in model.model_fields]


def _tag_of(section: type[BaseModel]) -> str:
    return {
        "DecoderConfig": "decoder",
        "ResNetConfig": "resnet",
        "TextData": "text",
        "ImageData": "images",
    }.get(section.__name__, "factory")


def _sections(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [section for part in get_args(annotation) for section in _sections(part)]
