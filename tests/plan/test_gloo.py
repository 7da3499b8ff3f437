"""What gloo's collectives take, by the allocator's events and as the tracker sees them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.distributed.fake_pg import FakeStore

from megalith.core.launch import start
from megalith.layout import mesh as meshes
from megalith.plan import accuracy, memory
from megalith.plan.gloo import Copies
from megalith.plan.tracker import Tracker
from megalith.recipe import parse

SIZE = 1 << 16


def gather(x: torch.Tensor, group: dist.ProcessGroup) -> None:
    dist.all_gather_single(x.new_empty(2 * len(x)), x, group)


def scatter(x: torch.Tensor, group: dist.ProcessGroup) -> None:
    dist.reduce_scatter_single(x.new_empty(len(x) // 2), x, group=group)


def total(x: torch.Tensor, group: dist.ProcessGroup) -> None:
    dist.all_reduce(x, group=group)


def functional_gather(x: torch.Tensor, group: dist.ProcessGroup) -> None:
    functional.wait_tensor(functional.all_gather_single(x, 0, group))


def functional_scatter(x: torch.Tensor, group: dist.ProcessGroup) -> None:
    functional.wait_tensor(functional.reduce_scatter_single(x, "sum", 0, group))


def functional_total(x: torch.Tensor, group: dist.ProcessGroup) -> None:
    functional.wait_tensor(functional.all_reduce(x, "sum", group))


def exchange(x: torch.Tensor, group: dist.ProcessGroup) -> None:
    functional.wait_tensor(functional.all_to_all_single(x, None, None, group))


EVERY = [
    gather, scatter, total, functional_gather, functional_scatter, functional_total, exchange,
]  # fmt: skip
Collective = Callable[[torch.Tensor, dist.ProcessGroup], None]


def really(_: None) -> dict[str, int]:
    """Most bytes that each collective takes on a rank of two."""
    mesh = meshes.build(parse({"layout": {"replicate": 2}}).layout, torch.device("cpu"))
    group = mesh.group("replicate")
    assert group is not None
    found = {}
    for collective in EVERY:
        x = torch.randn(SIZE)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            collective(x, group)
        found[collective.__name__] = max(accumulate(accuracy.sizes(profiler), initial=0))
    return found


def tracked(collective: Collective, *, copies: bool) -> int:
    """The same as the planner sees it."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    group = dist.group.WORLD
    assert group is not None
    try:
        with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
            x = torch.randn(SIZE)
            tracker = Tracker("cpu")
            tracker.name(x, "input")
            with tracker:
                tracker.start_over()
                if copies:
                    with Copies(tracker):
                        collective(x, group)
                else:
                    collective(x, group)
    finally:
        dist.destroy_process_group()
    return memory.read(tracker.record, None).allocated - x.nbytes


@pytest.fixture(scope="module")
def real() -> dict[str, int]:
    return start(2, really, (None,), timeout=60)


@pytest.mark.parametrize("collective", EVERY, ids=lambda one: one.__name__)
def test_a_collective_takes_what_gloo_takes(collective: Collective, real: dict[str, int]) -> None:
    assert tracked(collective, copies=True) == pytest.approx(real[collective.__name__], abs=1024)


@pytest.mark.parametrize("collective", [gather, scatter, functional_gather, functional_scatter])
def test_two_collectives_copy(collective: Collective, real: dict[str, int]) -> None:
    """The other way round: without its copy a prediction would be short by a whole tensor."""
    assert tracked(collective, copies=False) < real[collective.__name__] - 4 * SIZE + 1024
