"""Energy used by this machine, from its own counters.

CPU packages and memory: RAPL, read from Linux's powercap folder (often readable by root only).
NVIDIA: NVML, with ``megalith[energy]``. A machine with neither has no figure, and that is said.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from megalith.core.devices import nvidia_uuid


@dataclass
class _Counter:
    """A counter that only grows, until it wraps around."""

    name: str
    read: Callable[[], int]
    joule: float
    """Joules in one unit of :attr:`read`."""
    wraps: int | None
    """The value after which it starts at zero again, in units of :attr:`read`."""
    last: int = 0

    def gained(self) -> float:
        now = self.read()
        step = now - self.last
        if step < 0:
            # Without a known range (a reset driver) the time before the reset is lost.
            step = step + self.wraps if self.wraps else now
        self.last = now
        return step * self.joule


class EnergyMeter:
    """Joules used since it was made.

    A RAPL counter wraps after minutes to hours: call :meth:`read` at least every few minutes.

    Args:
        device: its own energy is counted besides the CPU's.
        powercap: Linux's folder of RAPL counters.
    """

    def __init__(self, device: torch.device, powercap: Path = Path("/sys/class/powercap")) -> None:
        self._counters = [*_rapl(powercap), *_nvml(device)]
        self._total = 0.0

    @property
    def sources(self) -> list[str]:
        """What is counted, such as ``["package-0", "dram"]``; empty if the machine cannot tell."""
        return [counter.name for counter in self._counters]

    def read(self) -> float | None:
        """Joules so far, or ``None`` if the machine cannot tell."""
        if not self._counters:
            return None
        self._total += sum(counter.gained() for counter in self._counters)
        return self._total


def _rapl(powercap: Path) -> list[_Counter]:
    counters = []
    for folder in sorted(powercap.glob("*-rapl:*")):
        try:
            name = (folder / "name").read_text().strip()
            # "core" and "uncore" are parts of a package, "psys" holds all of them.
            if not name.startswith(("package", "dram")):
                continue
            file = folder / "energy_uj"
            wraps = int((folder / "max_energy_range_uj").read_text())
            start = int(file.read_text())
        except OSError:  # not readable by this user: a counter we do not have
            continue

        def read(file: Path = file) -> int:
            return int(file.read_text())

        counters.append(_Counter(name, read, 1e-6, wraps, start))
    return counters


def _nvml(device: torch.device) -> list[_Counter]:
    uuid = nvidia_uuid(device)
    if uuid is None:
        return []
    try:
        pynvml = importlib.import_module("pynvml")
    except ModuleNotFoundError:
        return []
    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)

        def read() -> int:
            return int(pynvml.nvmlDeviceGetTotalEnergyConsumption(handle))

        return [_Counter(str(device), read, 1e-3, None, read())]
    except pynvml.NVMLError:  # older than Volta, or no driver: no counter
        return []
