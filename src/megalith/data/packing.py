"""From a stream of tokens to samples of equal length."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from megalith.data.shards import TokenStream

IGNORED = -100
"""The target that does not count."""


class PackedText(Dataset[dict[str, Any]]):
    """Sample ``i`` covers the tokens ``i * sequence`` to ``(i + 1) * sequence`` of a stream.

    A sample is a dict of

    - ``tokens``: [sequence] int64.
    - ``targets``: [sequence] int64, the token that follows each; -100 does not count.
    - ``bytes``: scalar int64, UTF-8 bytes of text that the valid targets stand for.

    and, where documents are kept apart,

    - ``documents``: [sequence] int64, which document of the sample a token belongs to, from 0;
    - ``positions``: [sequence] int64, counted from 0 where a document, or the sample, starts.

    Then no target reaches from one document into the next, so a model that attends within documents
    has exactly the loss of the documents one by one. Each token of the stream but the first (kept
    apart: the first of each document) is a target once.

    Args:
        stream: the tokens.
        sequence: length of a sample.
        token_bytes: [vocab] int64, bytes that each token stands for.
        apart: keep documents apart.
        whole: keep the stream's last part that does not fill a sample, padded with the last token
            and targets of -100; else it is dropped.
    """

    def __init__(
        self,
        stream: TokenStream,
        sequence: int,
        token_bytes: NDArray[np.int64],
        *,
        apart: bool,
        whole: bool,
    ):
        self._stream, self._sequence = stream, sequence
        self._token_bytes = token_bytes
        self._apart = apart
        targets = max(0, len(stream) - 1)
        self._size = -(-targets // sequence) if whole else targets // sequence

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < self._size:
            raise IndexError(index)
        start = index * self._sequence
        found = self._stream.read(start, start + self._sequence + 1)
        tokens, targets = found[:-1], found[1:].copy()
        extra: dict[str, NDArray[np.int64]] = {}
        if self._apart:
            documents, positions, lasts = self._documents(start, len(tokens))
            targets[lasts] = IGNORED
            extra = {"documents": documents, "positions": positions}
        valid = targets[targets != IGNORED]
        sample = {
            "tokens": torch.from_numpy(self._padded(tokens, int(found[-1]))),
            "targets": torch.from_numpy(self._padded(targets, IGNORED)),
            "bytes": torch.tensor(int(self._token_bytes[valid].sum()), dtype=torch.int64),
        }
        return sample | {name: torch.from_numpy(values) for name, values in extra.items()}

    def _padded(self, values: NDArray[np.int64], value: int) -> NDArray[np.int64]:
        missing = self._sequence - len(values)
        if not missing:
            return np.ascontiguousarray(values)
        return np.pad(values, (0, missing), constant_values=value)

    def _documents(
        self, start: int, length: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Documents and positions of a whole sample, and where a document has its last token.

        What lies behind ``length`` is padding, and a document of its own.
        """
        boundaries = self._stream.boundaries
        first, last = np.searchsorted(boundaries, [start, start + self._sequence], side="right")
        starts = boundaries[first:last].astype(np.int64) - start  # (0, sequence]
        lasts = starts[starts <= length] - 1
        if length < self._sequence:
            starts = np.append(starts[starts < length], length)
        starts = np.concatenate([[0], starts[starts < self._sequence]])
        lengths = np.diff(starts, append=self._sequence)
        documents = np.repeat(np.arange(len(starts)), lengths)
        positions = np.arange(self._sequence) - np.repeat(starts, lengths)
        return documents, positions, lasts
