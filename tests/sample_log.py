"""A task that notes which samples it was given: the evidence of tests on data order."""

from __future__ import annotations

import json
import os
from pathlib import Path

from torch import nn

from megalith.tasks import Batch, Loss
from megalith.tasks.language import Language


class Logged(Language):
    """Language modelling that appends each training micro-batch's sample ids to a file.

    The environment's ``SAMPLE_LOG`` names the file; without it nothing is written.
    """

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        """As usual, and a line in the file."""
        if model.training and "SAMPLE_LOG" in os.environ and not batch["tokens"].is_meta:
            with Path(os.environ["SAMPLE_LOG"]).open("a") as file:
                file.write(json.dumps(batch["sample"].tolist()) + "\n")
        return super().loss(model, batch)


def read_log(path: Path) -> list[list[int]]:
    """Sample ids of each micro-batch; a line torn by a kill is left out."""
    if not path.exists():
        return []
    lines = path.read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]
