"""What is wrong with a recipe, in one line: the field's path, what it must be, what is nearest."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, get_args, get_origin

from pydantic import ValidationError

from megalith.core.errors import nearest
from megalith.recipe.base import IS_REFERENCE, Section
from megalith.recipe.fields import KIND_FIELDS, Node, either, kind_choices, leaves, section_node
from megalith.recipe.schema import Recipe


def one_line(error: ValidationError) -> str:
    """The first problem, and how many further fields have one."""
    # A default that depends on a field that failed is not an error of its own.
    found = [e for e in error.errors() if e["type"] != "default_factory_not_called"]
    # A misspelt name makes the right one missing: the misspelling is the problem.
    misspelt = {e["loc"][:-1] for e in found if e["type"] == "extra_forbidden"}
    problems: dict[str, str] = {}
    for e in found:
        if e["type"] != "missing" or e["loc"][:-1] not in misspelt:
            path, text = _problem(e)
            problems.setdefault(path, text)
    path, text = next(iter(problems.items()))
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    # A name in quotes can hold a line break in TOML; the message stays one line all the same.
    return " ".join(f"{path}: {text}{more}".split())


@dataclass
class _Place:
    """Where an error is: its path as the user writes it, and what is expected there."""

    path: str = ""
    node: Node | None = None
    section: type[Section] | None = Recipe
    kind: str = ""
    last: str = ""

    def step(self, part: str | int) -> _Place:
        if isinstance(part, int):
            element = get_args(self.node.type)[0] if self.node else None
            node = Node.of(element) if element else None
            return _Place(f"{self.path}[{part}]", node, node and node.section, self.kind)
        if self.section is None and self.node is not None and len(self.node.members) > 1:
            kinds = self.node.kinds  # the label of one branch of a union is no part of the path
            return _Place(self.path, self.node, kinds.get(part), part if kinds else self.kind)
        path = f"{self.path}.{part}" if self.path else part
        field = self.section.model_fields.get(part) if self.section else None
        node = Node.field(field) if field else None
        return _Place(path, node, node and node.section, self.kind, part)


def _problem(error: Any) -> tuple[str, str]:
    places = [_Place()]
    for part in error["loc"]:
        places.append(places[-1].step(part))
    place, given, kind = places[-1], error["input"], error["type"]
    if kind == "extra_forbidden":
        return place.path, _unknown(place, places[-2])
    if kind == "missing" and isinstance(error["loc"][-1], int):
        place = places[-2]  # too few values in a list of fixed length
    elif kind == "missing":
        return place.path, f"is missing; it must be {place.node.words if place.node else 'given'}"
    if kind.startswith("union_tag"):
        field = KIND_FIELDS[place.path]
        return f"{place.path}.{field}", _choice(kind_choices(place.path), error["ctx"].get("tag"))
    if kind == "value_error" and not (place.node and IS_REFERENCE in place.node.metadata):
        field, bar, text = error["msg"].removeprefix("Value error, ").partition("|")
        if bar:
            return f"{place.path}.{field}" if place.path else field, text
    for section, field in KIND_FIELDS.items():
        if place.path == f"{section}.{field}":
            return place.path, _choice(kind_choices(section), given)
    return place.path, _wrong(place.node, given) if place.node else error["msg"]


def _choice(valid: list[str], given: Any) -> str:
    return f"must be {either([repr(one) for one in valid])}{nearest(str(given), valid)}"


def _wrong(node: Node, given: Any) -> str:
    if node.choices and isinstance(given, str):
        return f"must be {node.words}{nearest(given, node.choices)}"
    hint = ""
    if get_origin(node.type) is list and isinstance(given, str):
        hint = f"; did you mean {json.dumps([given])}?"
    return f"must be {node.words}, not {_shown(given)}{hint}"


def _shown(value: Any) -> str:
    if isinstance(value, dict | Section):
        return "a section"
    if value is None or isinstance(value, bool):
        return str(value).lower()
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:56]} ..."


def _unknown(place: _Place, parent: _Place) -> str:
    name, section = place.last, parent.section
    if not parent.path:
        return f"no such section{_elsewhere(name, '') or _near(name, list(Recipe.model_fields))}"
    top = parent.path.partition(".")[0]
    if top == parent.path and top in KIND_FIELDS:
        owners = [k for k, s in section_node(top).kinds.items() if name in s.model_fields]
        if owners:
            return f"no such field for {parent.kind} {top}; it belongs to {either(owners)}"
    hint = _elsewhere(name, top)
    names = list(section.model_fields) if section else []
    return f"no such field{hint or _near(name, names, top)}"


def _elsewhere(name: str, section: str) -> str:
    """The other sections' fields that have exactly this name, if that is one or two."""
    found = [path for path, _, _ in leaves() if path.split(".")[1:] == [name]]
    others = list(dict.fromkeys(path for path in found if not path.startswith(f"{section}.")))
    if not 1 <= len(others) <= 2:
        return ""
    return f"; did you mean {either([repr(path) for path in others])}?"


def _near(name: str, valid: list[str], section: str = "") -> str:
    command = f"megalith recipe explain {section}".strip()
    return nearest(name, valid) or f"; `{command}` lists them"
