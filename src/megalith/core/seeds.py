"""Randomness as a pure function of names: no state to save, none to restore.

Every random draw in Megalith takes its seed from a path such as ``(seed, "init", "blocks.0.mlp")``
or ``(seed, "dropout", step, micro_batch, rank)``. So a run that is resumed, spread over other
ranks or evaluated in between draws the same numbers (contracts 3, 4 and 5 of the design).
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch


def derive(*path: int | str) -> int:
    """A 63-bit seed that depends on every part of ``path`` and on nothing else."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in path)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def generator(*path: int | str) -> torch.Generator:
    """A CPU generator seeded by ``path``: its draws are the same on every device's host."""
    return torch.Generator().manual_seed(derive(*path))


def numpy_generator(*path: int | str) -> np.random.Generator:
    """A numpy generator seeded by ``path``."""
    return np.random.Generator(np.random.Philox(derive(*path)))


def set_default(*path: int | str) -> None:
    """Seed torch's default generators, which dropout draws from, on every device."""
    torch.manual_seed(derive(*path))
