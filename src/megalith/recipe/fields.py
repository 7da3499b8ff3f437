"""The recipe's types as a tree: what stands at a path, and how its type reads in words."""

from __future__ import annotations

import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import Tag
from pydantic.fields import FieldInfo

from megalith.recipe.base import IS_REFERENCE, Section
from megalith.recipe.schema import Recipe

KIND_FIELDS = {"model": "family", "data": "source"}
"""The field that decides which kind of section ``[model]`` and ``[data]`` are."""

_LIMITS = ((Gt, "> ", "gt"), (Ge, ">= ", "ge"), (Lt, "< ", "lt"), (Le, "<= ", "le"))


@dataclass(frozen=True)
class Node:
    """A type as it stands in an annotation, with the limits on it."""

    type: Any
    metadata: tuple[Any, ...] = ()

    @staticmethod
    def of(annotation: Any, metadata: tuple[Any, ...] = ()) -> Node:
        if get_origin(annotation) is Annotated:
            inner, *more = get_args(annotation)
            return Node.of(inner, (*metadata, *more))
        return Node(annotation, metadata)

    @staticmethod
    def field(info: FieldInfo) -> Node:
        return Node.of(info.annotation, tuple(info.metadata))

    @property
    def section(self) -> type[Section] | None:
        found = self.type
        return found if isinstance(found, type) and issubclass(found, Section) else None

    @property
    def members(self) -> list[Node]:
        """The parts of a union; a node that is none has itself."""
        if get_origin(self.type) not in (Union, types.UnionType):
            return [self]
        limits = tuple(m for m in self.metadata if isinstance(m, Gt | Ge | Lt | Le))
        return [part for one in get_args(self.type) for part in Node.of(one, limits).members]

    @property
    def kinds(self) -> dict[str, type[Section]]:
        """The sections of a tagged union by tag; of a single section, under ``""``."""
        found = {}
        for member in self.members:
            if member.section:
                tags = [m.tag for m in member.metadata if isinstance(m, Tag)]
                found[tags[0] if tags else ""] = member.section
        return found

    @property
    def choices(self) -> list[str]:
        """The values that are named one by one."""
        return [
            str(value)
            for member in self.members
            if get_origin(member.type) is Literal
            for value in get_args(member.type)
        ]

    @property
    def words(self) -> str:
        """What a value must be: ``a whole number > 0``, ``'a', 'b' or 'c'``."""
        words = [word for member in self.members for word in _alternatives(member)]
        return either(list(dict.fromkeys(words)))


def section_node(name: str) -> Node:
    """The node of a top-level section."""
    return Node.field(Recipe.model_fields[name])


def kind_choices(section: str) -> list[str]:
    """Every value of the field that decides the kind of ``section``."""
    name = KIND_FIELDS[section]
    kinds = section_node(section).kinds.values()
    return [c for kind in kinds for c in Node.field(kind.model_fields[name]).choices]


def leaves() -> Iterator[tuple[str, str, FieldInfo]]:
    """Every field as ``(dotted path, kind of its section, field)``; nested sections included."""
    for section in Recipe.model_fields:
        for kind, model in section_node(section).kinds.items():
            yield from _inside(section, kind, model)


def _inside(path: str, kind: str, model: type[Section]) -> Iterator[tuple[str, str, FieldInfo]]:
    for name, info in model.model_fields.items():
        yield f"{path}.{name}", kind, info
        for inner in nested(info).values():
            yield from _inside(f"{path}.{name}", kind, inner)


def nested(info: FieldInfo) -> dict[str, type[Section]]:
    """The sections inside a field: its own, or those its list holds."""
    node = Node.field(info)
    return node.kinds or (Node.of(get_args(node.type)[0]).kinds if _is_list(node) else {})


def _is_list(node: Node) -> bool:
    return get_origin(node.type) is list


def _alternatives(node: Node) -> list[str]:
    plain = {bool: ["true", "false"], str: ["text"], type(None): ["none"]}
    if node.choices:
        return [f"'{choice}'" for choice in node.choices]
    if IS_REFERENCE in node.metadata:
        return ["'package.module:name'"]
    if node.section:
        return ["a section"]
    if node.type in (int, float):
        return [("a whole number" if node.type is int else "a number") + _limits(node)]
    origin = get_origin(node.type)
    if origin is list:
        return [f"a list of {_plural(Node.of(get_args(node.type)[0]))}"]
    if origin is tuple:
        parts = get_args(node.type)
        return [f"a list of {len(parts)} {_plural(Node.of(parts[0]))}"]
    return ["a table"] if origin is dict else plain[node.type]


def _limits(node: Node) -> str:
    found = [
        f"{sign}{getattr(limit, name):g}"
        for limit in node.metadata
        for kind, sign, name in _LIMITS
        if isinstance(limit, kind)
    ]
    return f" {' and '.join(found)}" if found else ""


def _plural(node: Node) -> str:
    names = {int: "whole numbers", float: "numbers", str: "text"}
    if node.section:
        return "sections"
    return names[node.type] + _limits(node)


def either(words: list[str]) -> str:
    """``a, b or c``."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"
