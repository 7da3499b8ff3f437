"""The catalogue of devices: the one file that knows what a device type is called.

Everything that ``torch.accelerator`` offers goes through it, so that a new kind of accelerator
needs no line here. On the CPU, memory is the resident set of this process.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from torch import nn

from megalith.core.errors import RecipeError, nearest

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""What ``train.precision`` calls them."""

_CPU = "cpu"
_NVIDIA = "cuda"
# Names that a user may write for an accelerator that is not in this machine.
_KNOWN = (_CPU, _NVIDIA, "mps", "xpu", "hpu", "npu", "mtia", "maia", "xla")
_PROC = Path("/proc/self")


def pick(name: str = "auto") -> torch.device:
    """The device that ``train.device`` names: ``auto`` is the accelerator if there is one.

    Raises:
        RecipeError: no such device type, or it is not in this machine.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if name == "auto":
        if accelerator is None:
            return torch.device(_CPU)
        return torch.device(accelerator.type, torch.accelerator.current_device_index())
    kind, _, index = name.partition(":")
    here = ["auto", _CPU, *([accelerator.type] if accelerator else [])]
    if kind not in here:
        listed = ", ".join(f"'{one}'" for one in here)
        what = "is not in this machine" if kind in _KNOWN else "is no device type"
        hint = "" if kind in _KNOWN else nearest(kind, here)
        raise RecipeError(f"train.device: '{name}' {what}, which offers {listed}{hint}")
    if kind == _CPU or not index:
        return pick() if kind != _CPU else torch.device(_CPU)
    count = torch.accelerator.device_count()
    if not index.isdecimal() or int(index) >= count:
        last = f"'{kind}:{count - 1}'"
        raise RecipeError(f"train.device: '{name}' is not in this machine; the last is {last}")
    return torch.device(kind, int(index))


def is_accelerator(device: torch.device) -> bool:
    """Whether work on ``device`` is queued and its memory is not the host's."""
    return device.type not in (_CPU, "meta")


def describe(device: torch.device) -> str:
    """The device's name as its maker writes it, as far as torch tells; else its type."""
    if device.type == _NVIDIA:
        return torch.cuda.get_device_name(device)
    return str(device)


def synchronize(device: torch.device) -> None:
    """Wait until all work queued on ``device`` is done."""
    if is_accelerator(device):
        torch.accelerator.synchronize(device)


def supports(device: torch.device, precision: str) -> bool:
    """Whether a forward and backward pass in ``precision`` (``fp32``, ``bf16``, ``fp16``) runs.

    It is tried, not looked up: one linear layer, normalisation and softmax.
    """
    dtype = DTYPES[precision]
    try:
        layer = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16)).to(device, dtype)
        given = torch.ones(4, 16, device=device, dtype=dtype)
        result = layer(given).softmax(-1).square().sum()
        result.backward()
        return bool(torch.isfinite(result))
    except (RuntimeError, TypeError):  # "not implemented for 'Half'", "does not support bfloat16"
        return False


def multiplies_natively(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether matmuls in ``dtype`` have kernels of their own on ``device``.

    Without them torch falls back on plain loops: on a CPU without bfloat16 instructions a matmul
    in bfloat16 was measured 35 times slower than in float32.
    """
    if is_accelerator(device) or dtype not in (torch.bfloat16, torch.float16):
        return True
    if not torch.backends.mkldnn.is_available():
        return False
    operators = torch.ops.mkldnn
    if dtype == torch.bfloat16:
        return operators._is_mkldnn_bf16_supported()
    return operators._is_mkldnn_fp16_supported()


def matmul_peak(device: torch.device, dtype: torch.dtype, seconds: float = 0.7) -> float:
    """The best rate of square matrix products measured here, in FLOP/s.

    Sizes double from 512 while the next one still fits in ``seconds``; a product of n x n matrices
    counts as 2 n^3 operations. Threads and float32 settings are those of the process.
    """
    best, size = 0.0, 512
    # Launches are queued on an accelerator: one wait for several products hides their cost.
    repeats = 8 if is_accelerator(device) else 1
    end = time.perf_counter() + seconds
    while True:
        one = torch.rand(size, size, device=device).to(dtype)
        out = torch.mm(one, one)
        took, timings, fits = float("inf"), 0, False
        while timings < 2 or time.perf_counter() + took * repeats < end:
            synchronize(device)
            start = time.perf_counter()
            for _ in range(repeats):
                torch.mm(one, one, out=out)
            synchronize(device)
            took = min(took, (time.perf_counter() - start) / repeats)
            timings += 1
            # Doubling costs 8 times as much, thrice: once to warm up and two timings.
            fits = time.perf_counter() + 8 * (1 + 2 * repeats) * took < end and size < 16384
            if timings >= 2 and fits:
                break
        best = max(best, 2 * size**3 / took)
        if not fits:
            return best
        size *= 2


def memory_total(device: torch.device) -> int:
    """All memory of ``device`` in bytes; on the CPU, what this process may use."""
    if is_accelerator(device):
        return int(torch.accelerator.get_memory_info(device)[1])
    import psutil

    limit = Path("/sys/fs/cgroup/memory.max")
    total = psutil.virtual_memory().total
    text = limit.read_text().strip() if limit.exists() else "max"
    return total if text == "max" else min(total, int(text))


def peak_memory(device: torch.device) -> int:
    """The most memory used since the start or :func:`reset_peak_memory`, in bytes.

    Accelerator: memory of tensors. CPU: resident set of this process, libraries included.
    """
    if is_accelerator(device):
        return int(torch.accelerator.max_memory_allocated(device))
    status = _PROC / "status"
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    if sys.platform == "win32":
        import psutil

        return int(psutil.Process().memory_info().peak_wset)
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def reset_peak_memory(device: torch.device) -> bool:
    """Start :func:`peak_memory` anew; false where only the peak since the start is kept."""
    if is_accelerator(device):
        torch.accelerator.reset_peak_memory_stats(device)
        return True
    try:
        # Linux: writing 5 sets the peak to the present resident set (proc_pid_clear_refs(5)).
        (_PROC / "clear_refs").write_text("5")
    except OSError:
        return False
    return True


def nvidia_uuid(device: torch.device) -> str | None:
    """The UUID by which NVML knows ``device``, or ``None`` if it is not NVIDIA's."""
    if device.type != _NVIDIA:
        return None
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


def collective_backend(device: torch.device) -> str:
    """The torch.distributed backend for tensors on ``device``."""
    return torch.distributed.get_default_backend_for_device(device)
