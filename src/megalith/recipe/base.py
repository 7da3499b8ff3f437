"""The ground of every section of a recipe."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from megalith.core.imports import is_reference


class Section(BaseModel):
    """A part of a recipe: typed, immutable, and closed to unknown names."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=False)


def option(default: Any, description: str, *, unit: str | None = None, **limits: Any) -> Any:
    """A field with its meaning and unit; ``limits`` are pydantic's (``gt``, ``ge``, ``lt`` ...)."""
    text = f"{description} [{unit}]" if unit else description
    return Field(default, description=text, **limits)


def _reference(text: str) -> str:
    if not is_reference(text):
        raise ValueError(f"'{text}' is not of the form 'package.module:name'")
    return text


Reference = Annotated[str, AfterValidator(_reference)]
"""The text ``package.module:name`` of an object of the user's own."""
