"""Stop requests: finish the update, save, leave."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass
class StopRequest:
    """Which signal asked for the end, if any."""

    received: signal.Signals | None = None


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Inside, the first SIGINT or SIGTERM is only noted; a second SIGINT interrupts at once."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request  # only the main thread may install handlers
        return

    def note(number: int, frame: FrameType | None) -> None:
        if request.received is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        request.received = signal.Signals(number)

    before = {number: signal.signal(number, note) for number in _SIGNALS}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
