"""Joules from made-up RAPL counters: sums, wrap-around, and machines that cannot tell."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megalith.core.energy import EnergyMeter

CPU = torch.device("cpu")


def _counter(powercap: Path, place: str, name: str, microjoules: int, limit: int) -> Path:
    folder = powercap / f"intel-rapl:{place}"
    folder.mkdir(parents=True)
    (folder / "name").write_text(f"{name}\n")
    (folder / "max_energy_range_uj").write_text(f"{limit}\n")
    (folder / "energy_uj").write_text(f"{microjoules}\n")
    return folder / "energy_uj"


def test_packages_and_memory_add_up_and_parts_of_a_package_do_not_count_twice(tmp_path) -> None:
    package = _counter(tmp_path, "0", "package-0", 1_000_000, 10**9)
    core = _counter(tmp_path, "0:0", "core", 500_000, 10**9)
    memory = _counter(tmp_path, "0:1", "dram", 0, 10**9)
    whole = _counter(tmp_path, "1", "psys", 9_000_000, 10**9)
    meter = EnergyMeter(CPU, tmp_path)
    assert meter.sources == ["package-0", "dram"]
    assert meter.read() == 0
    package.write_text("4000000")
    memory.write_text("250000")
    core.write_text("3000000")
    whole.write_text("90000000")
    assert meter.read() == pytest.approx(3.25)
    assert meter.read() == pytest.approx(3.25), "reading uses nothing"


def test_a_counter_that_wraps_around_goes_on(tmp_path) -> None:
    file = _counter(tmp_path, "0", "package-0", 9_000_000, 10_000_000)
    meter = EnergyMeter(CPU, tmp_path)
    file.write_text("2000000")
    assert meter.read() == pytest.approx(3.0)
    file.write_text("5000000")
    assert meter.read() == pytest.approx(6.0)


def test_a_machine_without_counters_says_nothing(tmp_path) -> None:
    meter = EnergyMeter(CPU, tmp_path / "powercap")
    assert meter.sources == []
    assert meter.read() is None
