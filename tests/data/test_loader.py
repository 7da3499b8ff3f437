"""Order and loader: pure functions of the seed and the ordinal, whatever the workers do."""

from __future__ import annotations

import os
import signal
import time
from itertools import islice
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

from megalith.core.errors import DataError
from megalith.data.loader import Loader, validation_batches, validation_shares
from megalith.data.order import sample_ids


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 16, 17, 1000, 65537])
def test_every_epoch_is_a_permutation(size: int) -> None:
    for epoch in range(3):
        ids = sample_ids(0, size, epoch * size, size)
        assert sorted(ids.tolist()) == list(range(size))


def test_epochs_and_seeds_differ() -> None:
    orders = [tuple(sample_ids(seed, 50, start, 50)) for seed in (0, 1) for start in (0, 50)]
    assert len(set(orders)) == 4
    assert tuple(range(50)) not in orders


@pytest.mark.parametrize("size", [1, 7, 100])
def test_any_part_of_the_order_equals_that_part_of_the_whole(size: int) -> None:
    whole = sample_ids(3, size, 0, 350)
    for start, count in ((0, 1), (5, 0), (6, 1), (99, 251), (349, 1), (13, 200)):
        assert (sample_ids(3, size, start, count) == whole[start : start + count]).all()


def test_the_order_stays_what_it_is() -> None:
    """Runs of an older version resume on the same samples."""
    assert sample_ids(0, 10, 0, 10).tolist() == [8, 3, 1, 9, 6, 5, 0, 4, 2, 7]
    assert sample_ids(7, 1000, 123_456_789, 3).tolist() == [305, 249, 9]


def test_the_order_looks_random() -> None:
    """First places are uniform, and neighbours are no more alike than chance has them."""
    size = 16
    first = [int(sample_ids(seed, size, 0, 1)[0]) for seed in range(3200)]
    counts = np.bincount(first, minlength=size)
    chi = ((counts - 200) ** 2 / 200).sum()
    assert chi < 37.7  # 15 degrees of freedom, one in a thousand
    ids = sample_ids(0, 100_000, 0, 100_000)
    assert abs(np.corrcoef(ids[:-1], ids[1:])[0, 1]) < 0.015
    assert abs(np.corrcoef(ids, np.arange(100_000))[0, 1]) < 0.015


class Numbers(Dataset[dict[str, Any]]):
    """Sample ``i`` holds ``i``; augmentation adds noise."""

    def __init__(self, size: int):
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"value": torch.full((3,), index, dtype=torch.float32)}


class Noisy(Numbers):
    def augment(self, sample: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
        return {"value": sample["value"] + torch.rand(3, generator=generator)}


def take(count: int, **options: Any) -> list[dict[str, Tensor]]:
    with Loader(Noisy(23), **{"seed": 5, "batch": 4, **options}) as loader:
        return list(islice(loader, count))


def same(first: list[dict[str, Tensor]], second: list[dict[str, Tensor]]) -> bool:
    return len(first) == len(second) and all(
        a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
        for a, b in zip(first, second, strict=True)
    )


def test_a_batch_holds_the_samples_of_the_order_and_their_indices() -> None:
    batches = take(9)
    ids = torch.cat([batch["sample"] for batch in batches])
    assert ids.tolist() == sample_ids(5, 23, 0, 36).tolist()
    assert ids.dtype == torch.int64
    values = torch.cat([batch["value"] for batch in batches])
    assert values.shape == (36, 3)
    assert torch.equal(values.floor()[:, 0].long(), ids)


def test_workers_change_nothing() -> None:
    alone = take(12)
    assert same(alone, take(12, workers=2))


def test_augmentation_depends_on_the_ordinal_alone() -> None:
    by_fours, by_sixes = take(15), take(10, batch=6)
    join = [torch.cat([batch["value"] for batch in found]) for found in (by_fours, by_sixes)]
    assert torch.equal(*join)
    ids = torch.cat([batch["sample"] for batch in by_fours])
    twice = (ids == ids[0]).nonzero().flatten()[:2]
    assert not torch.equal(*join[0][twice])  # another epoch, another augmentation


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("start", [0, 36])
def test_ranks_take_turns_in_the_order_of_one_loader(ranks: int, start: int) -> None:
    alone = take(12, start=start)
    shares = [take(12 // ranks, start=start, ranks=ranks, rank=rank) for rank in range(ranks)]
    together = [batch for turn in zip(*shares, strict=True) for batch in turn]
    assert same(alone, together)


def test_the_position_of_a_rank_is_that_of_all() -> None:
    with Loader(Noisy(23), seed=5, batch=4, ranks=3, rank=1) as loader:
        list(islice(loader, 2))
        assert loader.position == 24


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("limit", [None, 10])
def test_validation_is_shared_out_and_every_rank_has_as_many_batches(
    ranks: int, limit: int | None
) -> None:
    wanted = [b["sample"].tolist() for b in validation_batches(Numbers(23), 4, limit)]
    shares = [
        list(validation_shares(Numbers(23), 4, limit, ranks=ranks, rank=rank))
        for rank in range(ranks)
    ]
    assert len({len(share) for share in shares}) == 1
    turns = [batch for turn in zip(*shares, strict=True) for batch in turn]
    assert [batch["sample"].tolist() for batch, own in turns if own] == wanted


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_resumes_from_its_position(workers: int) -> None:
    whole = take(12)
    with Loader(Noisy(23), seed=5, batch=4, workers=workers) as loader:
        head = list(islice(loader, 5))
        position = loader.position
    assert position == 20  # however much the workers have prepared ahead
    tail = take(7, start=position, workers=workers)
    assert same(whole, head + tail)
    middle = take(5, start=30)
    assert torch.equal(middle[0]["value"][0], whole[7]["value"][2])


def test_a_closed_loader_goes_on_where_it_stood() -> None:
    loader = Loader(Noisy(23), seed=5, batch=4, workers=1)
    found = list(islice(loader, 3))
    loader.close()
    found += list(islice(loader, 3))
    loader.close()
    assert same(found, take(6))


def test_the_default_generator_is_left_alone() -> None:
    """Else the number of workers would move the dropout of a run."""
    torch.manual_seed(0)
    state = torch.get_rng_state()
    take(2, workers=1)
    take(2)
    assert torch.equal(state, torch.get_rng_state())


def workers_of_this_process() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if child.status() != "zombie"]


def test_workers_survive_signals_meant_for_the_main_process_and_end_with_the_loader() -> None:
    before = {process.pid for process in workers_of_this_process()}
    with Loader(Noisy(23), seed=5, batch=4, workers=2) as loader:
        found = list(islice(loader, 1))
        started = [p.pid for p in workers_of_this_process() if p.pid not in before]
        assert len(started) >= 2
        for number in (signal.SIGINT, signal.SIGTERM):
            for process in started:
                os.kill(process, number)
            time.sleep(0.2)
        found += list(islice(loader, 8))
        assert same(found, take(9))
    left = [pid for pid in started if psutil.pid_exists(pid)]
    assert not [pid for pid in left if psutil.Process(pid).status() != "zombie"]


def test_validation_is_in_order_and_ragged_at_the_end() -> None:
    batches = list(validation_batches(Numbers(10), 4))
    assert [batch["sample"].tolist() for batch in batches] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert batches[2]["value"].shape == (2, 3)
    assert len(list(validation_batches(Numbers(10), 4, limit=8))) == 2
    assert len(list(validation_batches(Numbers(10), 4, limit=99))) == 3


def test_an_empty_data_set_is_refused() -> None:
    with pytest.raises(DataError, match="holds no sample"):
        Loader(Numbers(0), seed=0, batch=1)
    with pytest.raises(ValueError, match="no order"):
        sample_ids(0, 0, 0, 1)
