"""Names of the user's own: found in the working folder, and every fault is one line."""

from __future__ import annotations

import sys

import pytest

import toys
from megalith.core.errors import MissingExtra, RecipeError
from megalith.core.imports import is_reference, optional, resolve


def test_what_a_reference_looks_like() -> None:
    assert is_reference("a:b")
    assert is_reference("a.b.c:D.e")
    for text in ("", "a", "a.b", ":b", "a:", "a b:c", "a:b:c", "1a:b", "a..b:c"):
        assert not is_reference(text), text


def test_the_working_folder_is_searched_and_the_path_stays_as_it_was(tmp_path, monkeypatch) -> None:
    (tmp_path / "here_only.py").write_text("class A:\n    b = 7\n")
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    assert resolve("here_only:A.b", "task.loss") == 7
    assert sys.path == before
    assert resolve("toys:__doc__", "x") == toys.__doc__


def test_every_fault_names_the_field(tmp_path, monkeypatch) -> None:
    (tmp_path / "exits_at_import.py").write_text("import no_such_thing_at_all\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RecipeError, match=r"^f: cannot import .*no module 'no_such_thing_at_all'"):
        resolve("exits_at_import:x", "f")
    with pytest.raises(RecipeError, match=r"^f: 'math' has no 'sqrrt'; did you mean 'sqrt'\?$"):
        resolve("math:sqrrt", "f")
    with pytest.raises(RecipeError, match="not of the form"):
        resolve("math", "f")


def test_a_missing_package_names_the_extra_that_brings_it() -> None:
    with pytest.raises(MissingExtra) as raised:
        optional("no_such_module.part", "energy", "the energy meter")
    expected = "the energy meter needs 'no_such_module': pip install 'megalith[energy]'"
    assert str(raised.value) == expected
    assert optional("math", "x", "y").pi > 3
