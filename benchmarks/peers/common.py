"""What every peer's script shares: the job it is given, its clock, and the line it prints."""

from __future__ import annotations

import importlib.metadata
import json
import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Job:
    """One run, the same for every peer. Architecture: GPT-2 (Radford et al. 2019), no dropout.

    Attributes:
        weights: folder with ``config.json`` and ``model.safetensors`` in Hugging Face's layout.
        tokens: ``.npy`` of int64 ``[steps, batch, sequence + 1]``.
        scratch: an empty folder.
        precision: ``fp32`` or ``bf16``.
        checkpointing: Megalith's field of that name; the peers' runs all keep activations.
    """

    weights: str
    tokens: str
    scratch: str
    layers: int
    width: int
    heads: int
    vocab: int
    context: int
    batch: int
    sequence: int
    steps: int
    precision: str
    compile: bool
    checkpointing: str
    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    clip: float

    @classmethod
    def given(cls) -> Job:
        """The job whose file the command line names."""
        values = json.loads(Path(sys.argv[1]).read_text())
        return cls(**{**values, "betas": tuple(values["betas"])})

    @property
    def optimizer(self) -> dict[str, Any]:
        """Arguments of ``torch.optim.AdamW``; decay on every parameter, in every peer."""
        return {
            "lr": self.lr,
            "betas": self.betas,
            "eps": self.eps,
            "weight_decay": self.weight_decay,
            "fused": True,
        }

    def batches(self) -> np.ndarray:
        """int64 ``[steps, batch, sequence + 1]``."""
        return np.load(self.tokens)[: self.steps]


class Clock:
    """Wall time of each update, from the end of the one before."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._last = time.perf_counter()

    def start(self) -> None:
        """Call right before the first update."""
        self._last = time.perf_counter()

    def tick(self) -> None:
        """Call at the end of each update."""
        now = time.perf_counter()
        self.seconds.append(now - self._last)
        self._last = now


def peak_rss() -> int:
    """The largest resident set of this process so far, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no VmHWM")


def report(
    job: Job,
    seconds: list[float],
    losses: list[Tensor] | list[float],
    peak: int,
    versions: list[str],
) -> None:
    """Print the run as one line of JSON.

    Args:
        seconds: of each update.
        losses: mean loss of each update.
        peak: resident set at the end of the last update, in bytes.
        versions: names of the packages to tell the versions of.
    """
    found = [float(loss) for loss in losses]
    if len(seconds) != job.steps or len(found) != job.steps:
        raise RuntimeError(f"{len(seconds)} times and {len(found)} losses of {job.steps} updates")
    if not all(math.isfinite(loss) for loss in found):
        raise RuntimeError(f"a loss is not finite: {found}")
    line = {
        "seconds": seconds,
        "losses": found,
        "peak_rss": peak,
        "threads": torch.get_num_threads(),
        "versions": {name: importlib.metadata.version(name) for name in ["torch", *versions]},
    }
    print(json.dumps(line), flush=True)
