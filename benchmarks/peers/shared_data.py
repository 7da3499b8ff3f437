"""The shared batches as Megalith's data, in the order of the file."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from megalith.data import Splits
from megalith.data.order import sample_ids


class Samples(Dataset[dict[str, Any]]):
    """Rows of ``tokens``, int64 ``[samples, sequence + 1]``."""

    def __init__(self, tokens: Tensor) -> None:
        self.tokens = tokens

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = self.tokens[index]
        return {"tokens": row[:-1], "targets": row[1:]}


def splits(path: str, samples: int, vocab: int, seed: int) -> Splits:
    """The first ``samples`` rows, laid out so that the order of ``seed`` gives them as they stand.

    Validation is one sample: the loop evaluates once at its end, which is not timed.
    """
    rows = np.load(path).reshape(-1, np.load(path, mmap_mode="r").shape[-1])[:samples]
    tokens = torch.from_numpy(rows)
    placed = torch.empty_like(tokens)
    placed[torch.from_numpy(sample_ids(seed, samples, 0, samples))] = tokens
    return Splits(
        train=Samples(placed),
        validation=Samples(placed[:1]),
        facts={"vocab": vocab},
        fingerprint=hashlib.sha256(rows.tobytes()).hexdigest(),
    )
