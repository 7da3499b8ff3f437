"""The ground of every section of a recipe."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Annotated, Any, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from megalith.core.imports import is_reference


class Section(BaseModel):
    """A part of a recipe: typed, immutable, and closed to unknown names."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=False, allow_inf_nan=False
    )

    @model_validator(mode="before")
    @classmethod
    def _plain_values(cls, data: Any) -> Any:
        """Read ``"none"`` as nothing, since TOML has no word for it, and the other way where it is
        a choice; refuse true as a number.
        """
        if not isinstance(data, dict):
            return data
        read = dict(data)
        for name, value in data.items():
            field = cls.model_fields.get(name)
            kinds = get_args(field.annotation) or (field.annotation,) if field else ()
            if value == "none" and type(None) in kinds and str not in kinds:
                read[name] = None
            if value is None and "none" in kinds:
                read[name] = "none"
            if isinstance(value, bool) and bool not in kinds and {int, float} & set(kinds):
                raise ValueError(f"{name}|must be a number, not {str(value).lower()}")
        return read


def option(default: Any, description: str, *, unit: str | None = None, **limits: Any) -> Any:
    """A field with its meaning and unit; ``limits`` are pydantic's (``gt``, ``ge``, ``lt`` ...)."""
    return Field(default, description=description, json_schema_extra=_extra(unit=unit), **limits)


def derived(
    rule: Callable[[dict[str, Any]], Any],
    words: str,
    description: str,
    *,
    unit: str | None = None,
    **limits: Any,
) -> Any:
    """A field whose default is computed from the fields above it; ``words`` say how."""
    return Field(
        default_factory=rule,
        description=description,
        json_schema_extra=_extra(unit=unit, default_rule=words),
        **limits,
    )


def _extra(**given: str | None) -> dict[str, Any]:
    return {name: value for name, value in given.items() if value is not None}


def _reference(text: str) -> str:
    if not is_reference(text):
        raise ValueError(f"'{text}' is not of the form 'package.module:name'")
    return text


def _arguments(values: dict[str, Any]) -> dict[str, Any]:
    for name, value in values.items():
        if not _in_toml(value):
            shown = "none" if value is None else type(value).__name__
            raise ValueError(f"{name}|{shown} cannot be written in a recipe; leave it out")
    return values


def _in_toml(value: Any) -> bool:
    if isinstance(value, list):
        return all(_in_toml(one) for one in value)
    if isinstance(value, dict):
        return all(isinstance(key, str) and _in_toml(one) for key, one in value.items())
    return isinstance(value, str | int | float | bool | datetime.date | datetime.time)


IS_REFERENCE = AfterValidator(_reference)

Reference = Annotated[
    str,
    IS_REFERENCE,
    Field(json_schema_extra={"pattern": r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$"}),
]
"""The text ``package.module:name`` of an object of the user's own."""

Arguments = Annotated[dict[str, Any], AfterValidator(_arguments)]
"""Keyword arguments for an object of the user's own: whatever TOML can hold."""
