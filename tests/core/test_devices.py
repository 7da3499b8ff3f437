"""Devices: what a name means here, how fast and how large it is."""

from __future__ import annotations

import mmap
import sys
import time

import pytest
import torch

from megalith.core import devices
from megalith.core.errors import RecipeError

CPU = torch.device("cpu")
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's /proc")


def test_auto_is_the_accelerator_if_there_is_one() -> None:
    there = torch.accelerator.current_accelerator(check_available=True)
    assert devices.pick("auto").type == (there.type if there else "cpu")
    assert devices.pick("cpu") == CPU


@pytest.mark.parametrize("name", ["cpux", "", "meta", "cuda:99", "mps:7", "gpu"])
def test_a_device_that_is_not_here_is_refused(name: str) -> None:
    with pytest.raises(RecipeError, match=r"^train\.device: '.*' is "):
        devices.pick(name)


def test_all_precisions_are_tried_and_the_answer_is_torchs_own() -> None:
    assert devices.supports(CPU, "fp32")
    for precision, dtype in devices.DTYPES.items():
        try:
            torch.nn.functional.layer_norm(torch.ones(2, 4, dtype=dtype), (4,)).softmax(-1)
            works = True
        except RuntimeError:
            works = False
        assert devices.supports(CPU, precision) == works


def test_the_matmul_peak_is_at_least_what_one_product_reaches() -> None:
    start = time.perf_counter()
    peak = devices.matmul_peak(CPU, torch.float32, seconds=0.4)
    took = time.perf_counter() - start
    one = torch.rand(512, 512)
    slowest = max(_seconds(one) for _ in range(5))
    assert peak > 2 * 512**3 / slowest
    assert 1e8 < peak < 1e15
    assert took < 10, "a measurement of 0.4 s does not take 10"


def _seconds(one: torch.Tensor) -> float:
    start = time.perf_counter()
    torch.mm(one, one)
    return time.perf_counter() - start


@linux
def test_peak_memory_sees_memory_come_and_forgets_it_after_a_reset() -> None:
    size = 200 * 2**20
    if not devices.reset_peak_memory(CPU):
        pytest.skip("this kernel does not let a process reset its peak")
    before = devices.peak_memory(CPU)
    # Pages of its own: a tensor may get some that this process has used before and still holds.
    with mmap.mmap(-1, size) as pages:
        for offset in range(0, size, mmap.PAGESIZE):
            pages[offset] = 1
        with_it = devices.peak_memory(CPU)
    after = devices.peak_memory(CPU)
    devices.reset_peak_memory(CPU)
    assert with_it - before == pytest.approx(size, rel=0.2)
    assert after == pytest.approx(with_it, rel=0.01)  # Linux counts pages in batches
    assert devices.peak_memory(CPU) < with_it - size // 2


def test_the_memory_of_the_machine_is_more_than_this_process_uses() -> None:
    assert devices.memory_total(CPU) > devices.peak_memory(CPU) > 0
