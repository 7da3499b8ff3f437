"""Named sets of a family's values: ``models/<family>/presets.toml``."""

from __future__ import annotations

import tomllib
from importlib import resources
from typing import Any

from megalith.core.errors import nearest


def presets(family: str) -> dict[str, dict[str, Any]]:
    """Every preset of ``family``, by name."""
    file = resources.files("megalith") / "models" / family / "presets.toml"
    return tomllib.loads(file.read_text(encoding="utf-8"))


def with_preset(family: str, section: Any) -> Any:
    """``section`` with the values of the preset that it names under its own."""
    if not isinstance(section, dict) or not isinstance(section.get("preset"), str):
        return section
    known = presets(family)
    name = section["preset"]
    if name not in known:
        hint = nearest(name, known) or f", which are {', '.join(known)}"
        raise ValueError(f"preset|'{name}' is none of {family}'s presets{hint}")
    return {**known[name], **section}
