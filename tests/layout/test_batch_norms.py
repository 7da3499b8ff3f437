"""Batch norms under layouts: each rank's own statistics, or those of all ranks' samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from megalith.layout import norms
from megalith.recipe.schema import LayoutSection
from megalith.verify.compare import Difference
from megalith.verify.problem import Problem
from trials import differences, forked, one_thread, outcome, small

STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
DATA: list[dict[str, Any]] = [
    {"replicate": 2},
    {"replicate": 2, "engine": "ddp"},
    {"shard": 2},
    {"shard": 2, "zero": 1},
]


def resnet(**train: Any) -> Problem:
    """Eight micro-batches of two to four images."""
    return small(
        8,
        {"blocks": [1, 1], "width": 8},
        model={"family": "resnet"},
        data={"source": "digits"},
        task={"name": "classify"},
        train=train,
    )


def joined(given: Problem, ranks: int) -> Problem:
    """The micro-batches that the ranks have at the same time, as one."""
    updates = [
        [
            {
                name: torch.cat([batch[name] for batch in update[n : n + ranks]])
                for name in update[0]
            }
            for n in range(0, len(update), ranks)
        ]
        for update in given.updates
    ]
    return replace(given, updates=updates)


def of_statistics(difference: Difference) -> bool:
    """Running statistics, and evaluation, which uses them."""
    return difference.name.endswith(STATISTICS) or "evaluation" in difference.name


def test_without_synchronisation_gradients_are_those_of_separate_micro_batches() -> None:
    wrong = differences(resnet(), [*DATA, {"replicate": 2, "shard": 2}], ignore=of_statistics)
    assert wrong == {}


def test_without_synchronisation_running_statistics_are_the_main_ranks_own() -> None:
    """The difference that the guide states: of rank 0's samples, not of all."""
    given = resnet()
    own = replace(given, updates=[update[::2] for update in given.updates])
    with one_thread():
        right, every = outcome(own, updates=1), outcome(given, updates=1)
    found = forked(2, outcome, given, LayoutSection(replicate=2), torch.float64, 1)
    held = {n: t for n, t in found.tensors["parameter"].items() if n.endswith(STATISTICS)}
    assert held
    for name, value in held.items():
        torch.testing.assert_close(value, right.tensors["parameter"][name], rtol=1e-12, atol=1e-12)
        assert not torch.equal(value, every.tensors["parameter"][name])


@pytest.mark.parametrize("train", [{}, {"checkpointing": "full"}], ids=["", "recomputed"])
def test_with_synchronisation_the_ranks_micro_batches_count_as_one(train: dict[str, Any]) -> None:
    """Gradients, running statistics and evaluation are one process's with larger micro-batches."""
    given = resnet(**train)
    with one_thread():
        right = outcome(joined(given, 2))
        other = outcome(given)
    layouts = [LayoutSection(**{**one, "synchronised_norms": True}) for one in DATA]
    for section, found in zip(layouts, forked(2, _all, given, layouts), strict=True):
        for kind, tensors in right.tensors.items():
            assert tensors.keys() == found.tensors[kind].keys()
            for name, value in tensors.items():
                message = f"{section}: {kind} {name}".__add__
                torch.testing.assert_close(
                    found.tensors[kind][name], value, rtol=1e-8, atol=1e-11, msg=message
                )
        assert found.numbers == pytest.approx(right.numbers, rel=1e-10)
    assert other.numbers["norm of update 1"] != pytest.approx(right.numbers["norm of update 1"])


def _all(given: Problem, layouts: list[LayoutSection]) -> list[Any]:
    return [outcome(given, layout) for layout in layouts]


def _norms(make: Callable[[], torch.nn.Module], parts: list[torch.Tensor]) -> None:
    group = torch.distributed.group.WORLD
    rank = torch.distributed.get_rank()
    assert group is not None
    together, alone = make(), make()
    norms.synchronise(alone, group)
    slope = torch.cat([part.flip(0).sin() for part in parts])
    x = torch.cat(parts).requires_grad_()
    (together(x) * slope).sum().backward()
    own = parts[rank].clone().requires_grad_()
    first = sum(len(part) for part in parts[:rank])
    here = slice(first, first + len(own))
    (alone(own) * slope[here]).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(own.grad, x.grad[here], rtol=1e-11, atol=1e-12)
    for one, other in zip(together.buffers(), alone.buffers(), strict=True):
        torch.testing.assert_close(other, one, rtol=1e-12, atol=1e-12)
    for one, other in zip(together.parameters(), alone.parameters(), strict=True):
        assert other.grad is not None
        torch.distributed.all_reduce(other.grad)
        torch.testing.assert_close(other.grad, one.grad, rtol=1e-11, atol=1e-12)


def _every_norm() -> None:
    generator = torch.Generator().manual_seed(1)

    def parts(*shape: int) -> list[torch.Tensor]:
        return [
            torch.randn(size, *shape, generator=generator, dtype=torch.float64) + 3
            for size in (1, 4, 2)
        ]

    nn, wide = torch.nn, {"dtype": torch.float64}
    _norms(lambda: nn.BatchNorm1d(5, **wide), parts(5))
    _norms(lambda: nn.BatchNorm1d(5, momentum=None, **wide), parts(5, 3))
    _norms(lambda: nn.BatchNorm2d(3, affine=False, **wide), parts(3, 2, 2))
    _norms(lambda: nn.BatchNorm2d(3, track_running_stats=False, **wide), parts(3, 2, 2))


def test_a_synchronised_norm_is_torchs_norm_of_all_samples_ragged_or_not() -> None:
    forked(3, _every_norm)
