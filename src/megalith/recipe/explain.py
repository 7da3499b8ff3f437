"""What a recipe can say: one field, one section, all of it as text, Markdown or JSON Schema."""

from __future__ import annotations

import json
from typing import Any

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from megalith.core.errors import RecipeError, nearest
from megalith.recipe.base import Section
from megalith.recipe.dump import meaning
from megalith.recipe.fields import KIND_FIELDS, Node, either, leaves, nested, section_node
from megalith.recipe.presets import presets
from megalith.recipe.schema import Recipe


def explain(path: str = "") -> str:
    """What stands at ``path``: a field (``train.steps``), a section (``train``) or all sections.

    Raises:
        RecipeError: there is no such field or section; the nearest one is named.
    """
    if not path:
        rows = [(f"[{name}]", field.description or "") for name, field in _sections().items()]
        return "\n".join([*_columns(rows), "", "More: megalith recipe explain SECTION.FIELD"])
    if path in Recipe.model_fields:
        kinds = section_node(path).kinds
        return "\n\n".join(_section(path, kind, model) for kind, model in kinds.items())
    found = [(kind, field) for name, kind, field in leaves() if name == path]
    if not found:
        known = [*Recipe.model_fields, *dict.fromkeys(name for name, _, _ in leaves())]
        same_name = [name for name in known if name.rpartition(".")[2] == path]
        hint = f"; did you mean {either([repr(n) for n in same_name])}?" if same_name else ""
        hint = hint or nearest(path, known) or "; `megalith recipe explain` lists the sections"
        raise RecipeError(f"{path}: no such field{hint}")
    texts: dict[str, str] = {}
    for kind, field in found:
        texts.setdefault(_field(path, kind, field), kind)
    if len(texts) == 1:
        return next(iter(texts))
    return "\n\n".join(f"({kind}) {text}" for text, kind in texts.items())


def schema() -> dict[str, Any]:
    """JSON Schema (2020-12) of a recipe, for editors.

    Put ``#:schema recipe.schema.json`` into a recipe's first line, and taplo (Even Better TOML)
    completes and checks it.
    """
    made = Recipe.model_json_schema()
    made["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    for model in (kind for top in KIND_FIELDS for kind in section_node(top).kinds.values()):
        named = made["$defs"][model.__name__]
        family = model.model_fields.get("family")
        if "preset" in model.model_fields and family is not None:
            names = list(presets(family.default))
            named["properties"]["preset"] = {
                "enum": names,
                "description": named["properties"]["preset"]["description"],
            }
        # Without this a section that leaves its family out fits several kinds at once.
        if family is not None and family.default not in ("decoder", "factory"):
            named["required"] = [*named.get("required", []), "family"]
    for section in made["$defs"].values():
        for field in section.get("properties", {}).values():
            _without_null(field)
    return made


def _without_null(field: dict[str, Any]) -> None:
    """TOML has no null: a field that may be none takes the text ``"none"``, unless it is text."""
    kinds = [kind for kind in field.get("anyOf", []) if kind.get("type") != "null"]
    if len(kinds) < len(field.get("anyOf", [])):
        if all(kind.get("type") != "string" for kind in kinds):
            kinds.append({"const": "none"})
        field["anyOf"] = kinds
    if field.get("default", ...) is None:
        del field["default"]


def markdown() -> str:
    """Every field in tables: the reference in ``docs/recipe.md``."""
    parts = []
    for name, field in _sections().items():
        parts.append(f"## `[{name}]`\n\n{_sentence(field.description or '')}")
        for kind, model in section_node(name).kinds.items():
            heading = f"### {kind}\n\n" if kind else ""
            # The docstring's first paragraph; for the one kind there is it says more than the name.
            parts.append(f"{heading}{_summary(model)}\n\n{_table(name, model)}")
    return "\n\n".join(parts) + "\n"


def _sections() -> dict[str, FieldInfo]:
    return Recipe.model_fields


def _section(path: str, kind: str, model: type[Section]) -> str:
    head = f"[{path}] {kind}: " if kind else f"[{path}] "
    rows = [
        (f"  {name}", default(field), meaning(field)) for name, field in model.model_fields.items()
    ]
    return "\n".join([f"{head}{_summary(model)}", "", *_columns(rows)])


def _field(path: str, kind: str, field: FieldInfo) -> str:
    extra = _extra(field)
    rows = [("  must be", Node.field(field).words)]
    if "unit" in extra:
        rows.append(("  unit", extra["unit"]))
    rows.append(("  default", default(field)))
    if path == "model.preset":
        rows.append(("  names", ", ".join(presets(kind))))
    lines = [f"{path}: {field.description}", *_columns(rows)]
    for model in nested(field).values():
        inner = [(f"  {path}.{n}", default(f), meaning(f)) for n, f in model.model_fields.items()]
        lines += ["", _summary(model), *_columns(inner)]
    return "\n".join(lines)


def default(field: FieldInfo) -> str:
    """A field's default as TOML writes it, or the rule that computes it."""
    extra = _extra(field)
    if "default_rule" in extra:
        return extra["default_rule"]
    if field.default is PydanticUndefined or field.default is ...:
        return "(needed)"
    if field.default is None:
        return "none"
    if isinstance(field.default, Section):
        return "(section)"
    return json.dumps(field.default, ensure_ascii=False)


def _extra(field: FieldInfo) -> dict[str, Any]:
    return field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}


def _summary(model: type[Section]) -> str:
    return " ".join((model.__doc__ or "").strip().partition("\n\n")[0].split())


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def _columns(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    return [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]])
        for row in rows
    ]


def _table(path: str, model: type[Section]) -> str:
    lines = ["| field | must be | default | meaning |", "| --- | --- | --- | --- |"]
    for name, field in model.model_fields.items():
        cells = [f"`{name}`", Node.field(field).words, f"`{default(field)}`", meaning(field)]
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    tables = ["\n".join(lines)]
    for name, field in model.model_fields.items():
        for inner in nested(field).values():
            tables.append(
                f"`{path}.{name}`: {_summary(inner)}\n\n{_table(f'{path}.{name}', inner)}"
            )
    return "\n\n".join(tables)
