"""From a recipe back to TOML: what a run folder keeps, and what ``megalith recipe show`` prints."""

from __future__ import annotations

from typing import Any

import tomli_w

from megalith.recipe.base import Section
from megalith.recipe.fields import nested
from megalith.recipe.presets import presets
from megalith.recipe.schema import Recipe


def dump(recipe: Recipe, *, comments: bool = False) -> str:
    """The resolved recipe as TOML text; reading it gives an equal recipe.

    A field that is none is left out where leaving it out means none, else written as ``"none"``.

    Args:
        comments: put each field's meaning and unit above it.
    """
    values = {name: _plain(getattr(recipe, name)) for name in Recipe.model_fields}
    if not comments:
        return tomli_w.dumps(values)
    return "\n\n".join(_commented(name, getattr(recipe, name)) for name in values) + "\n"


def meaning(field: Any) -> str:
    """A field's description with its unit in brackets."""
    unit = (field.json_schema_extra or {}).get("unit")
    return f"{field.description} [{unit}]" if unit else field.description


def _plain(section: Section) -> dict[str, Any]:
    values: dict[str, Any] = {}
    preset = _preset(section)
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, Section):
            values[name] = _plain(value)
        elif isinstance(value, list) and nested(field):
            values[name] = [_plain(one) for one in value]
        elif value is not None:
            values[name] = list(value) if isinstance(value, tuple) else value
        elif preset.get(name, field.default) is not None:
            values[name] = "none"
    return values


def _preset(section: Section) -> dict[str, Any]:
    name, family = getattr(section, "preset", None), getattr(section, "family", "")
    return presets(family)[name] if name else {}


def _commented(name: str, section: Section) -> str:
    lines, fields = [f"[{name}]"], type(section).model_fields
    for line in tomli_w.dumps(_plain(section)).splitlines():
        if line.startswith("["):
            # tomli_w wrote this section alone: its tables move below its name.
            mark = "[[" if line.startswith("[[") else "["
            head = line.removeprefix(mark)
            inner = type(section).model_fields[head.partition("]")[0].partition(".")[0]]
            fields = next((model.model_fields for model in nested(inner).values()), {})
            lines.append(f"{mark}{name}.{head}")
            continue
        field = fields.get(line.partition(" = ")[0])
        lines += [f"# {meaning(field)}", line] if field else [line]
    return "\n".join(lines)
