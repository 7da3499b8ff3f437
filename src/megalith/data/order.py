"""In which order samples are seen: a pure function of the seed and the sample's ordinal.

The n-th sample of a run belongs to epoch ``n // size``, and each epoch is a permutation of the
data set that is computed, not stored: a Feistel network permutes the next power of four, and values
outside the data set walk on along their cycle until they are inside (Black and Rogaway 2002,
"Ciphers with arbitrary finite domains"). So any point of a run is reached at once.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from megalith.core import seeds

# Small domains have few bits a half, so it takes several rounds until they are well mixed.
_ROUNDS = 8


def sample_ids(seed: int, size: int, start: int, count: int) -> NDArray[np.int64]:
    """Indices of the samples with ordinals ``start`` to ``start + count`` (not included).

    Args:
        seed: of the run.
        size: number of samples in the data set.
        start: ordinal of the first one, counted from the beginning of the run.
        count: how many.

    Returns:
        [count] int64; each whole epoch holds every index once.
    """
    if size < 1:
        raise ValueError("an empty data set has no order")
    epochs, places = np.divmod(np.arange(start, start + count, dtype=np.int64), size)
    ids = np.empty(count, np.int64)
    for epoch in range(start // size, (start + count - 1) // size + 1 if count else 0):
        inside = epochs == epoch
        ids[inside] = _permute(places[inside], size, seed, epoch)
    return ids


def _permute(places: NDArray[np.int64], size: int, seed: int, epoch: int) -> NDArray[np.int64]:
    bits = max(1, ((size - 1).bit_length() + 1) // 2)  # of one half
    keys = [np.uint64(seeds.derive(seed, "order", epoch, turn)) for turn in range(_ROUNDS)]
    values = _feistel(places.astype(np.uint64), bits, keys)
    while (outside := values >= size).any():
        values[outside] = _feistel(values[outside], bits, keys)
    return values.astype(np.int64)


def _feistel(values: NDArray[np.uint64], bits: int, keys: list[np.uint64]) -> NDArray[np.uint64]:
    mask, shift = np.uint64((1 << bits) - 1), np.uint64(bits)
    left, right = values >> shift, values & mask
    for key in keys:
        left, right = right, left ^ (_mix(right + key) & mask)
    return (left << shift) | right


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of SplitMix64 (Steele, Lea and Flood 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
