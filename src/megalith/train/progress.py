"""What a run shows while it runs: a live line on a terminal, plain lines in a pipe."""

from __future__ import annotations

import os
import sys
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any, TextIO

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from megalith.core import units
from megalith.core.closing import Closing


def _loss(value: float) -> str:
    return units.number(value, fixed=True)


# What is shown, in order of importance: a narrow terminal cuts the end.
_SHOWN: dict[str, tuple[str, Callable[[float], str]]] = {
    "loss": ("loss", _loss),
    "validation_loss": ("val", _loss),
    "accuracy": ("accuracy", lambda v: units.percent(v, 4)),
    "bits_per_byte": ("bits/byte", units.number),
    "_per_s": ("", units.quantity),  # of tokens, images or samples
    "mfu": ("MFU", units.percent),
    "lr": ("lr", lambda v: units.number(v, 3, fixed=True)),
    "grad_norm": ("norm", lambda v: units.number(v, 3, fixed=True)),
    "peak_memory": ("", units.size),
    "skipped": ("skipped", lambda v: f"{v:.0f}"),
}

_REDRAW = 0.1  # seconds between redraws of the live line, however fast the steps are


class Progress(Closing):
    """Says how a run is doing, as a live line or as plain lines.

    The live line needs a terminal; a pipe, ``NO_COLOR`` or ``TERM=dumb`` give one plain line for
    each :meth:`update`. Use it as a context manager, so that Ctrl-C leaves the terminal whole.

    Args:
        total: updates of the whole run.
        start: updates already done, when a run is resumed.
        stream: where to write; standard output when left out.
    """

    def __init__(self, total: int, start: int = 0, stream: TextIO | None = None) -> None:
        self.total = total
        self._step = start
        self._values: dict[str, float] = {}
        self._rate: float | None = None  # seconds per update
        self._since = self._drawn = time.monotonic()
        self._stream = stream if stream is not None else sys.stdout
        self._live = _live(self._stream)
        if self._live is not None:
            self._live.start()
            self._live.update(self._line(), refresh=True)
            # Also when nobody closes it: the cursor is hidden while the line lives.
            self._finish = weakref.finalize(self, self._live.stop)

    def update(self, step: int, values: Mapping[str, Any]) -> None:
        """Show ``values`` after ``step`` updates.

        Args:
            step: updates done.
            values: by the names of :mod:`megalith.train.metrics`, and ``validation_loss``. What is
                not given keeps its last value on the live line.
        """
        now = time.monotonic()
        if step > self._step:
            rate = (now - self._since) / (step - self._step)
            # The first window holds compilation and warm caches; later ones soon outweigh it.
            self._rate = rate if self._rate is None else 0.7 * self._rate + 0.3 * rate
            self._step, self._since = step, now
        given = {name: value for name, value in values.items() if isinstance(value, int | float)}
        self._values.update(given)
        if self._live is not None:
            due = now - self._drawn > _REDRAW
            self._live.update(self._line(), refresh=due)
            self._drawn = now if due else self._drawn
        else:
            count = f"{step:>{len(str(self.total))}}/{self.total}"
            self._print("  ".join([f"step {count}", *_parts(given), *self._remaining()]))

    def note(self, text: str) -> None:
        """One line that stays, such as ``checkpoint at step 100``."""
        if self._live is not None:
            self._live.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            self._print(text)

    def close(self) -> None:
        """Leave the last state on the screen and give the terminal back."""
        if self._live is not None:
            self._finish()

    def _print(self, text: str) -> None:
        print(text, file=self._stream, flush=True)

    def _remaining(self) -> list[str]:
        if self._rate is None or self._step >= self.total:
            return []
        return [f"ETA {units.duration(self._rate * (self.total - self._step))}"]

    def _line(self) -> Table:
        line = Table.grid(padding=(0, 1), expand=True)
        line.add_column(width=16)
        line.add_column(no_wrap=True)
        line.add_column(no_wrap=True, ratio=1, overflow="ellipsis")
        shown = "  ".join([*self._remaining(), *_parts(self._values)])
        line.add_row(
            ProgressBar(total=self.total, completed=self._step, width=16),
            Text(f"{self._step}/{self.total}", style="bold"),
            Text(shown),
        )
        return line


def _parts(values: Mapping[str, float]) -> list[str]:
    found = []
    for shown, (label, form) in _SHOWN.items():
        for name in [n for n in values if n == shown or (shown == "_per_s" and n.endswith(shown))]:
            unit = f" {name.removesuffix('_per_s')}/s" if shown == "_per_s" else ""
            if values[name] or name != "skipped":
                found.append(f"{label} {form(values[name])}{unit}".strip())
    return found


def _live(stream: TextIO) -> Live | None:
    """A live display for ``stream``, or ``None`` where plain lines are the better choice."""
    if not stream.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return None
    # Without a refresh thread: nothing to fork with loader workers, nothing to outlive Ctrl-C.
    return Live(console=Console(file=stream), auto_refresh=False, vertical_overflow="crop")
