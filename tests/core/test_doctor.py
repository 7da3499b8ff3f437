"""The doctor tries things, and a row that fails says what to do."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from megalith.core import doctor

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def rows() -> dict[str, doctor.Row]:
    return {row.what: row for row in doctor.examine()}


def test_what_the_tests_themselves_need_works(rows) -> None:
    for what in ("python", "torch", "cpu", "fused AdamW", "collectives", "cache folder"):
        assert rows[what].works, rows[what]


def test_every_row_has_a_detail_and_every_failure_a_remedy(rows) -> None:
    for row in rows.values():
        assert row.detail, row
        assert "\n" not in row.detail, row
        assert bool(row.remedy) != row.works, row


def test_every_extra_of_the_package_has_a_row(rows) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = set(project["optional-dependencies"]) - {"dev"}
    assert extras == set(doctor.EXTRAS)
    assert extras <= set(rows)


def test_an_extra_that_is_missing_names_the_command() -> None:
    row = doctor._row("x", doctor._imports("no_such_module_here", "a purpose"), "pip install x")
    assert not row.works
    assert row.detail == "'no_such_module_here' is not installed (a purpose)"
    assert row.remedy == "pip install x"


def test_a_check_that_breaks_is_a_row_and_no_traceback() -> None:
    def breaks() -> str:
        raise RuntimeError("two\nlines")

    row = doctor._row("x", breaks, "do this")
    assert (row.works, row.detail, row.remedy) == (False, "RuntimeError: two lines", "do this")


def test_no_compiler_is_noticed(monkeypatch) -> None:
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    row = doctor._row("compiler", doctor._compiler, doctor._compiler_remedy())
    assert not row.works
    assert "no C++ compiler" in row.detail
