"""Only one process does a piece of work that several start at once."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

try:
    import fcntl
except ModuleNotFoundError:  # Windows: work may be done twice, and the first rename wins
    fcntl = None


@contextmanager
def exclusive(path: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """Hold the lock on the file ``path``, which is made if missing, and stays.

    The lock is the system's, not the file's presence: it goes when its owner does, in any way.

    Args:
        path: of the lock file; its folder exists.
        waiting: called once if another process holds the lock.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        if fcntl is not None:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                waiting()
                fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        if fcntl is not None:  # closing is not enough where a child was forked meanwhile
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)
