"""The figures of a line of metrics: loss, speed, memory, energy, over a window of updates."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megalith.core import devices
from megalith.core.energy import EnergyMeter
from megalith.layout.compile import graphs_compiled
from megalith.step import Measured
from megalith.train.ranks import table
from megalith.train.setup import Session


@dataclass
class Window:
    """What happened since the last line of metrics."""

    loss: float = 0.0
    count: int = 0
    updates: int = 0
    seconds: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(("data", "compute", "save", "evaluate"), 0.0)
    )
    start: float = field(default_factory=time.perf_counter)

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Inside, time counts for ``part``."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[part] += time.perf_counter() - start

    def add(self, measured: Measured) -> None:
        """Count an update that was made."""
        self.loss += float(measured.loss) * int(measured.count)
        self.count += int(measured.count)


class Figures:
    """Keeps the present window, and makes a line of each that ends.

    Attributes:
        update_seconds: what an update computed for, in each window that has ended.
    """

    def __init__(self, session: Session, local_rank: int = 0) -> None:
        self.session = session
        self.window = Window()
        self.update_seconds: list[float] = []
        self._graphs_before = graphs_compiled()
        # The processors' counters are the machine's: its first rank reads them for all.
        counters = {} if local_rank == 0 else {"powercap": Path(os.devnull)}
        self._energy = EnergyMeter(session.device, **counters)

    def line(self, measured: Measured) -> dict[str, Any] | None:
        """End the window; all ranks call it, and rank 0 gets the figures of all.

        Args:
            measured: of the window's last update.
        """
        session, step, window = self.session, self.session.step, self.window
        self.window = Window()
        if window.updates:
            self.update_seconds.append(window.seconds["compute"] / window.updates)
        joules = self._energy.read()
        own = [devices.peak_memory(session.device), float("nan") if joules is None else joules]
        peaks, energies = table(session.mesh, own).unbind(1)
        if not session.mesh.main:
            return None
        elapsed = time.perf_counter() - window.start
        compute = window.seconds["compute"]
        values: dict[str, Any] = {
            "loss": window.loss / window.count if window.count else float("nan"),
            "lr": session.recipe.optim.lr * step.schedule(step.done - 1),
            "grad_norm": float(measured.norm),
            f"{step.task.item}_per_s": window.count / (window.seconds["data"] + compute),
            "peak_memory": int(peaks.max()),
            "skipped": step.skipped,
            "seconds": elapsed,
            **{f"seconds_{part}": value for part, value in window.seconds.items()},
        }
        if session.flops:
            values["mfu"] = self._mfu(session.flops * window.updates / compute)
        if step.loss_scale is not None:
            values["loss_scale"] = step.loss_scale.scale
        if session.recipe.train.compile:
            values["recompiles"] = max(0, graphs_compiled() - self._graphs_before - 1)
        if not energies.isnan().all():
            values["energy_joules"] = float(energies.nansum())
        return values

    def _mfu(self, rate: float) -> float:
        """``rate`` FLOP/s as a share of the devices' peak, which other processes may have hidden.

        A peak below what was just reached was measured while the device was busy: once more, then.
        """
        session = self.session
        rate /= session.mesh.size
        if rate > session.peak:
            precision = session.step.precision
            again = devices.matmul_peak(session.device, precision.computing_dtype)
            session.peak = max(session.peak, again)
        return rate / session.peak
