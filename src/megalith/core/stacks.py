"""Where a rank is: its Python stack, and the collective that it waits in."""

from __future__ import annotations

import linecache
import re
import sysconfig
import traceback
from dataclasses import dataclass
from pathlib import Path

import torch

_TORCH = str(Path(torch.__file__).parent)
_STANDARD = sysconfig.get_path("stdlib")
_COLLECTIVES = (f"{_TORCH}/distributed/", f"{_TORCH}/_C/_distributed")
_LINE = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$')
_WAITS = re.compile(r"\bwait\w*\(|\bsynchronize\(|\bdist\.\w+\(")


@dataclass(frozen=True)
class Frame:
    """One call of a stack."""

    file: str
    line: int
    function: str

    @property
    def library(self) -> bool:
        """Whether it is torch's or Python's own code."""
        inside = "site-packages" in self.file.removeprefix(_STANDARD)
        return self.file.startswith((_TORCH, "<")) or (
            self.file.startswith(_STANDARD) and not inside
        )

    @property
    def source(self) -> str:
        """The line of code."""
        return linecache.getline(self.file, self.line).strip()


@dataclass(frozen=True)
class Stack:
    """The calls a rank is in, innermost first."""

    frames: tuple[Frame, ...] = ()

    @property
    def place(self) -> Frame | None:
        """The innermost call that is neither torch's nor Python's own."""
        return next((frame for frame in self.frames if not frame.library), None)

    @property
    def collective(self) -> str | None:
        """What of ``torch.distributed`` it is in, by the name that was called."""
        name = None
        for frame in self.frames:
            if not frame.library:
                break
            if frame.file.startswith(_COLLECTIVES) and not frame.file.endswith("c10d_logger.py"):
                name = frame.function
        return name

    @property
    def waits(self) -> bool:
        """Whether it seems to wait for other ranks."""
        place = self.place
        return self.collective is not None or (
            place is not None and _WAITS.search(place.source) is not None
        )

    def describe(self) -> str:
        """``all_reduce at layout/data.py:88 (work.wait())``, as far as it is known."""
        place = self.place
        if place is None:
            return "an unknown place"
        where = f"{_short(place.file)}:{place.line}"
        if place.source:
            where += f" ({place.source})"
        return f"{self.collective} at {where}" if self.collective else where


def of_error(error: BaseException) -> Stack:
    """Where ``error`` was raised."""
    summary = traceback.extract_tb(error.__traceback__)
    return Stack(tuple(Frame(f.filename, f.lineno or 0, f.name) for f in reversed(summary)))


def newest(log: str, inside: str) -> Stack | None:
    """The newest stack that ``faulthandler`` wrote into ``log``.

    Args:
        log: text; other lines are passed over.
        inside: name of a function that the wanted thread is in.
    """
    frames: list[Frame] = []
    result = None
    for line in log.splitlines():
        match = _LINE.match(line)
        if match:
            frames.append(Frame(match["file"], int(match["line"]), match["function"]))
            if match["function"] == inside:
                result = Stack(tuple(frames))
        else:
            frames = []
    return result


def _short(file: str) -> str:
    parts = Path(file).parts
    start = max((i for i, part in enumerate(parts) if part == "megalith"), default=len(parts) - 2)
    return str(Path(*parts[max(0, start) :]))
