"""One virtual environment per peer, made once and reused: peers pin versions that exclude others.

An environment is named by its requirements, so a changed pin makes a new one.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path

_DONE = "installed.json"


class NotInstalled(Exception):
    """An environment could not be made; the message is the reason in one line."""


def environment(folder: Path, name: str, requirements: Sequence[str]) -> Path:
    """The Python of the environment that holds ``requirements``; installs it the first time.

    Args:
        folder: where environments live.
        name: of the environment, a part of its folder's name.
        requirements: arguments of ``pip install``.

    Raises:
        NotInstalled: pip refused.
    """
    digest = hashlib.sha256(json.dumps(list(requirements)).encode()).hexdigest()[:8]
    place = folder / f"{name}-{digest}"
    python = place / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    if (place / _DONE).exists():
        return python
    print(f"installing {name}: {' '.join(requirements)}", file=sys.stderr, flush=True)
    venv.EnvBuilder(with_pip=True, clear=True).create(place)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    done = subprocess.run([*pip, *requirements], capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise NotInstalled((lines or done.stderr.splitlines() or ["pip failed"])[-1])
    (place / _DONE).write_text(json.dumps({"requirements": list(requirements)}) + "\n")
    return python
