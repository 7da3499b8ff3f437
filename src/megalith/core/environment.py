"""Where something ran: versions, machine, device. Kept with every run and benchmark."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import psutil
import torch

import megalith
from megalith.core import devices


def describe(device: torch.device | None = None) -> dict[str, Any]:
    """Versions, machine and device, as values that JSON can hold.

    Args:
        device: the one in use; left out: the one that ``auto`` picks.
    """
    device = device or devices.pick()
    return {
        "megalith": megalith.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": cpu_model(),
        "cores": usable_cores(),
        "threads": torch.get_num_threads(),
        "memory_bytes": devices.memory_total(torch.device("cpu")),
        "device": str(device),
        "device_name": devices.describe(device) if devices.is_accelerator(device) else cpu_model(),
        "device_memory_bytes": devices.memory_total(device),
        "git": git_revision(Path.cwd()),
    }


def usable_cores() -> int:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return psutil.cpu_count() or 1


def cpu_model() -> str:
    """The processor's name as the system tells it."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def git_revision(folder: Path) -> str | None:
    """The commit of the repository that ``folder`` is in, with ``+changes`` if it has any.

    ``None`` without a repository or without git.
    """

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    revision = git("rev-parse", "HEAD")
    if revision is None:
        return None
    return f"{revision}+changes" if git("status", "--porcelain", "-uno") else revision
