"""Ranks for tests: processes of one gloo group, started as a run's ranks are."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megalith.core.launch import start


def on_ranks(count: int, folder: Path, work: Callable[..., Any], *args: Any) -> Any:
    """Run ``work(*args)`` on ``count`` ranks; returns rank 0's value, fails if any rank does.

    Args:
        folder: for what the ranks print.
        work: a function of a module's top level.
    """
    root = str(Path(__file__).parents[1])
    if root not in sys.path:  # a rank imports the test's module by the name that pytest gave it
        sys.path.append(root)
    return start(count, work, args, timeout=60, logs=folder, preload=["megalith.layout.linear"])
