"""What a run measured: ``metrics.jsonl``, one JSON object a line.

Every line has ``kind`` (``train``, ``validation`` or ``event``), ``step`` (updates done) and
``time`` (unix seconds). A number that is not finite stands as ``null``, and its name in the list
``nonfinite``, since JSON knows no NaN.

Train lines, each over the window since the line before:
``loss``, ``lr``, ``grad_norm``; ``tokens_per_s`` (or ``images_per_s`` ...); ``mfu`` (0 to 1);
``peak_memory`` (bytes); ``skipped`` (updates skipped so far); ``recompiles`` (so far);
``loss_scale``; ``seconds`` (wall) and its parts ``seconds_data``, ``seconds_compute``,
``seconds_save``, ``seconds_evaluate``; ``energy_joules``.
Validation lines: ``loss``, the task's metrics, ``best`` (whether it is the lowest so far).
Event lines: ``event`` (``resume``, ``early_stop``, ``interrupted``, ``nonfinite``, ``checkpoint``,
``done``), ``message``, and what else belongs to it.
"""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any, Literal

from megalith.core.closing import Closing
from megalith.core.imports import optional
from megalith.core.runs import RunFolder, write_whole

Kind = Literal["train", "validation", "event"]


class MetricsWriter(Closing):
    """Appends lines to a run's ``metrics.jsonl``.

    Each line is handed to the system before :meth:`write` returns: a process that is killed loses
    none, at worst the last one is torn.

    Args:
        folder: the run folder; made if it is missing.
        resume_from: ``None`` starts a new file. A step keeps the lines up to it and drops what a
            killed run wrote after its last checkpoint, since the resumed run writes that again.
        tensorboard: also write TensorBoard events to ``tensorboard/`` in the run folder.

    Raises:
        MissingExtra: ``tensorboard`` is asked for and not installed.
    """

    def __init__(
        self, folder: RunFolder, *, resume_from: int | None = None, tensorboard: bool = False
    ) -> None:
        self._board = _board(folder, resume_from) if tensorboard else None
        folder.path.mkdir(parents=True, exist_ok=True)
        kept = [] if resume_from is None else read_metrics(folder)
        write_whole(
            folder.metrics,
            "".join(_line(entry) for entry in kept if entry["step"] <= (resume_from or 0)),
        )
        self._file = folder.metrics.open("a", encoding="utf-8")

    def write(self, kind: Kind, step: int, **values: Any) -> None:
        """Append one line.

        Args:
            kind: what the line is about.
            step: updates done.
            values: numbers, texts, or lists and dicts of them; one-element tensors count as
                numbers.
        """
        entry = {"kind": kind, "step": step, "time": round(time.time(), 3), **values}
        self._file.write(_line(entry))
        self._file.flush()
        if self._board is not None and kind != "event":
            for name, value in values.items():
                if isinstance(value := _plain(value), int | float):
                    self._board.add_scalar(f"{kind}/{name}", value, step)

    def close(self) -> None:
        """Close the file; calling it twice does no harm."""
        self._file.close()
        if self._board is not None:
            self._board.close()


def read_metrics(folder: RunFolder | Path) -> list[dict[str, Any]]:
    """Every whole line of a run's metrics, in the order in which they were written.

    A line that a killed process left half written is left out, and so is anything that is not an
    object with a ``kind`` and a whole ``step``. A missing file gives an empty list.
    """
    run = folder if isinstance(folder, RunFolder) else RunFolder(folder)
    found = read_lines(run.metrics)
    return [e for e in found if isinstance(e.get("kind"), str) and isinstance(e.get("step"), int)]


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The JSON objects of a file, one a line; torn lines are left out, a missing file is empty."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return []
    entries = []
    # Not splitlines(): that also cuts at U+2028, which may stand inside a text.
    for line in text.split("\n"):
        try:
            entry = json.loads(line)
        except ValueError:  # empty or torn
            continue
        if isinstance(entry, dict):
            entries.append(entry)
    return entries


def _line(entry: dict[str, Any]) -> str:
    lost: list[str] = []
    clean = {name: _finite(value, name, lost) for name, value in entry.items()}
    if lost:
        clean["nonfinite"] = lost
    return json.dumps(clean, allow_nan=False, default=str) + "\n"


def _plain(value: Any) -> Any:
    """One-element tensors and numpy scalars as Python numbers."""
    return value.item() if hasattr(value, "item") else value


def _finite(value: Any, name: str, lost: list[str]) -> Any:
    value = _plain(value)
    if isinstance(value, float) and not math.isfinite(value):
        lost.append(name)
        return None
    if isinstance(value, dict):
        return {str(k): _finite(v, f"{name}.{k}", lost) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v, f"{name}.{i}", lost) for i, v in enumerate(value)]
    return value


def _board(folder: RunFolder, resume_from: int | None) -> Any:
    optional("tensorboard", "tensorboard", "run.tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    purge = None if resume_from is None else resume_from + 1
    return SummaryWriter(str(folder.path / "tensorboard"), purge_step=purge)
