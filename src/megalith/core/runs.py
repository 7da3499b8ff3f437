"""The run folder: where a run keeps all that it is.

```
runs/x/
  recipe.toml         the resolved recipe: every field, as it ran
  environment.json    versions, device, machine
  tokenizer.json      the data's tokenizer, where it has one: a run folder can be moved
  metrics.jsonl       one JSON object a line; "kind" is train, validation or event
  samples.jsonl       texts that the model wrote at evaluations: {"step", "prompt", "text"}
  checkpoints/        step-00000100/ ..., each with a manifest of checksums
  logs/               what ranks other than the first printed, and their errors
  report.html         one page that shows all of it
```
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from megalith.core.errors import MegalithError, nearest


@dataclass(frozen=True)
class RunFolder:
    """The paths inside a run folder."""

    path: Path

    @property
    def recipe(self) -> Path:
        return self.path / "recipe.toml"

    @property
    def environment(self) -> Path:
        return self.path / "environment.json"

    @property
    def tokenizer(self) -> Path:
        return self.path / "tokenizer.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def samples(self) -> Path:
        return self.path / "samples.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    def holds_a_run(self) -> bool:
        """Whether a run has started here."""
        return self.recipe.exists() or self.metrics.exists() or self.checkpoints.exists()


def write_whole(path: Path, text: str) -> None:
    """Write ``text`` so that a reader, or a crash, sees the old file or the new one, never half."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def existing_run(path: Path) -> RunFolder:
    """The run in ``path``.

    Raises:
        MegalithError: no run has started there; the nearest folder that holds one is named.
    """
    folder = RunFolder(path)
    if folder.holds_a_run():
        return folder
    beside = [p for p in path.absolute().parent.glob("*") if RunFolder(p).holds_a_run()]
    hint = nearest(path.name, [one.name for one in beside])
    raise MegalithError(f"{path}: holds no run{hint}")
