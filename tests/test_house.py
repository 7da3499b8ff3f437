"""The house as the design draws it: floors, device names, file sizes, nothing half done."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "megalith"
FILES = sorted(SOURCE.rglob("*.py"))
FLOORS = [
    {"recipe", "core"},
    {"models", "data"},
    {"tasks"},
    {"layout", "optim"},
    {"step", "checkpoint", "generate"},
    {"train", "plan", "verify", "profile"},
    {"shrink", "ship", "tune", "hub"},
    {"cli"},
]
FLOOR = {name: number for number, names in enumerate(FLOORS) for name in names}
LONGEST = 420

each_file = pytest.mark.parametrize(
    "path", FILES, ids=[str(path.relative_to(SOURCE)) for path in FILES]
)


def _room(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def _imports(tree: ast.AST) -> Iterator[str]:
    """Every module of the project that a file imports, at its top or inside a function."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            module = node.module or ""
            if module == "megalith":
                yield from (f"megalith.{alias.name}" for alias in node.names)
            elif module.startswith("megalith."):
                yield module
        elif isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name.startswith("megalith."))


def test_every_room_has_a_floor() -> None:
    assert {_room(path) for path in FILES} - {"__init__"} <= set(FLOOR)


@each_file
def test_imports_run_downward_or_stay_on_their_floor(path: Path) -> None:
    room = _room(path)
    if room == "__init__":  # the public names, fetched when first used
        return
    for module in _imports(ast.parse(path.read_text())):
        target = module.split(".")[1]
        upward = FLOOR.get(target, 0) > FLOOR[room]
        assert not upward, f"{room} (floor {FLOOR[room]}) imports {module} (floor {FLOOR[target]})"


@each_file
def test_only_the_catalogue_of_devices_names_a_device_type(path: Path) -> None:
    if path == SOURCE / "core" / "devices.py":
        return
    literal = re.compile(r"""["']cuda\b|\.cuda\(|torch\.cuda\.""")
    found = [line for line in path.read_text().splitlines() if literal.search(line)]
    assert not found


@each_file
def test_a_file_is_one_thing(path: Path) -> None:
    assert path.read_text().count("\n") <= LONGEST


@each_file
def test_nothing_is_half_done_or_hidden(path: Path) -> None:
    text = path.read_text()
    assert not re.search(r"\b(TODO|FIXME|XXX)\b", text)
    assert "torch.load(" not in text
    assert "import pickle" not in text
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ExceptHandler):
            only = node.body[0] if len(node.body) == 1 else None
            assert not isinstance(only, ast.Pass), f"line {node.lineno}: an error is swallowed"
        if isinstance(node, ast.Raise):
            assert "NotImplementedError" not in ast.dump(node), f"line {node.lineno}: a stub"


@each_file
def test_a_file_says_what_it_is(path: Path) -> None:
    assert not path.read_text().strip() or ast.get_docstring(ast.parse(path.read_text()))
