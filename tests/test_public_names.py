"""``import megalith`` is quick, and its names are the functions that the command line calls."""

from __future__ import annotations

import subprocess
import sys

import pytest

import megalith


def _python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


def test_importing_the_package_imports_neither_torch_nor_pydantic() -> None:
    done = _python(
        "import sys, megalith\nassert not {'torch', 'pydantic', 'numpy'} & set(sys.modules)\n"
    )
    assert done.returncode == 0, done.stderr


def test_every_public_name_is_there() -> None:
    for name in megalith.__all__:
        assert getattr(megalith, name) is not None
        assert name in dir(megalith)
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = megalith.trian  # type: ignore[attr-defined]


@pytest.mark.parametrize("first", ["", "import megalith.train.report"])
def test_train_is_a_verb_and_a_package_whatever_was_imported_before(first: str) -> None:
    done = _python(
        f"{first}\nimport megalith\n"
        "try: megalith.train(megalith.load(None, 'train.device=tpux'))\n"
        "except megalith.MegalithError as error: print(error)\n"
        "from megalith.train.loop import train\n"
        "import megalith.train.loop as loop\n"
        "assert loop.train is train\n"
        "assert callable(megalith.generate)\n"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("train.device: 'tpux' is no device type")
