"""Batches of samples, in an order and with an augmentation that depend on ordinals alone.

The ordinal of a sample counts from the beginning of the run; see :mod:`megalith.data.order`. The
position of a loader is the ordinal that comes next, which is all that a resumed run needs:
neither the number of workers nor what they have prepared ahead has a part in it.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from megalith.core import seeds
from megalith.core.closing import Closing
from megalith.core.errors import DataError
from megalith.data.order import sample_ids

Batch = dict[str, Tensor]

_AHEAD = 1024  # ordinals whose order is computed at once


class Loader(Closing):
    """Micro-batches without end: stacked samples, and ``"sample"``, [batch] int64, their indices.

    An iterator goes on where the loader stands. Use it as a context, or :meth:`close` it, to end
    its workers.

    Args:
        dataset: map-style; its method ``augment(sample, generator)``, if it has one, is called
            with a generator that depends on the seed and the ordinal.
        seed: of the run.
        batch: samples in a batch.
        start: ordinal of the first sample, over all ranks.
        ranks: loaders that share out the order: they take turns, a batch each.
        rank: which of them this is.
        workers: processes that prepare samples; 0: this one does.
        pin: copy batches to pinned memory, which makes transfers to an accelerator faster.

    Raises:
        DataError: the data set is empty.
    """

    def __init__(
        self,
        dataset: Dataset[dict[str, Any]],
        *,
        seed: int,
        batch: int,
        start: int = 0,
        ranks: int = 1,
        rank: int = 0,
        workers: int = 0,
        pin: bool = False,
    ):
        size = len(dataset)  # pyright: ignore[reportArgumentType]
        if not size:
            raise DataError("data: the train split holds no sample")
        self._source = _Ordered(dataset, seed)
        self._seed, self._size, self._batch = seed, size, batch
        self._ranks, self._rank = ranks, rank
        self._workers, self._pin = workers, pin
        self._position = start
        self._batches: Iterator[Batch] | None = None

    @property
    def position(self) -> int:
        """Ordinal of the first sample that no rank has handed out, if all are as far as this."""
        return self._position

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self._batches is None:
            self._batches = iter(self._open())
        batch = next(self._batches)
        self._position += self._batch * self._ranks
        return batch

    def _open(self) -> DataLoader[Batch]:
        ordinals = _Ordinals(
            self._seed, self._size, self._batch, self._position, self._ranks, self._rank
        )
        return DataLoader(
            self._source,  # pyright: ignore[reportArgumentType]
            batch_sampler=ordinals,  # pyright: ignore[reportArgumentType]
            num_workers=self._workers,
            worker_init_fn=_settle if self._workers else None,
            pin_memory=self._pin,
            # Else the loader draws a seed for its workers from torch's default generator.
            generator=torch.Generator(),
        )

    def close(self) -> None:
        """End the workers; iterating again starts new ones."""
        self._batches = None


class _Ordinals:
    """A rank's batches of (ordinal, index)."""

    def __init__(self, seed: int, size: int, batch: int, start: int, ranks: int, rank: int):
        self._seed, self._size, self._batch, self._start = seed, size, batch, start
        self._ranks, self._rank = ranks, rank

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        turn = self._batch * self._ranks
        start, count = self._start, turn * max(1, _AHEAD // turn)
        while True:
            ids = sample_ids(self._seed, self._size, start, count).tolist()
            pairs = list(zip(range(start, start + count), ids, strict=True))
            for first in range(self._rank * self._batch, count, turn):
                yield pairs[first : first + self._batch]
            start += count


class _Ordered(Dataset[dict[str, Any]]):
    """Samples by (ordinal, index), augmented."""

    def __init__(self, dataset: Dataset[dict[str, Any]], seed: int):
        self._dataset, self._seed = dataset, seed
        self._augment = getattr(dataset, "augment", None)

    def __getitem__(self, place: tuple[int, int]) -> dict[str, Any]:
        ordinal, index = place
        sample = self._dataset[index]
        if self._augment is not None:
            sample = self._augment(sample, seeds.generator(self._seed, "augment", ordinal))
        return {**sample, "sample": torch.tensor(index)}


def _settle(worker: int) -> None:
    """Leave Ctrl-C, and a scheduler's first SIGTERM, to the process that saves the run.

    Both reach every process of a group at once. A second SIGTERM ends the worker as usual, which
    is what torch itself sends to one that hangs.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(
        signal.SIGTERM, lambda number, frame: signal.signal(signal.SIGTERM, signal.SIG_DFL)
    )


def validation_batches(
    dataset: Dataset[dict[str, Any]], batch: int, limit: int | None = None
) -> Iterator[Batch]:
    """Every sample once, in order; the last batch holds what is left.

    Args:
        dataset: map-style; never augmented.
        batch: samples in a batch.
        limit: of the samples: only the first so many.
    """
    for found, _ in validation_shares(dataset, batch, limit):
        yield found


def validation_shares(
    dataset: Dataset[dict[str, Any]],
    batch: int,
    limit: int | None = None,
    *,
    ranks: int = 1,
    rank: int = 0,
) -> Iterator[tuple[Batch, bool]]:
    """A rank's share of :func:`validation_batches`: every rank gets equally many.

    Where no batch is left for this rank, it gets that of the first, and ``False``.
    """
    size = len(dataset)  # pyright: ignore[reportArgumentType]
    stop = size if limit is None else min(size, limit)
    for turn in range(0, stop, batch * ranks):
        own = turn + rank * batch
        first = own if own < stop else turn
        ids = np.arange(first, min(first + batch, stop))
        found = default_collate([dataset[int(index)] for index in ids])
        yield {**found, "sample": torch.from_numpy(ids)}, own < stop
