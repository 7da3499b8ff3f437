"""What works on this machine, tried rather than looked up, and how to get what does not."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import distributed

from megalith.core import devices, environment, units
from megalith.core.energy import EnergyMeter

EXTRAS = {
    "vision": ("sklearn", "the digits data set"),
    "tensorboard": ("tensorboard", "run.tensorboard"),
    "energy": ("pynvml", "joules of NVIDIA devices"),
}
"""Each optional extra: a module that it brings, and what needs it."""

_POWERCAP = Path("/sys/class/powercap")


class _Fails(Exception):
    """A check found a fault of its own, which has its own remedy."""

    def __init__(self, detail: str, remedy: str) -> None:
        super().__init__(detail)
        self.remedy = remedy


@dataclass(frozen=True)
class Row:
    """One thing that was tried.

    Attributes:
        needed: nothing works without it; else only ``what`` itself is missing.
        remedy: the command or step that would make it work; empty if it does.
    """

    what: str
    works: bool
    detail: str
    remedy: str = ""
    needed: bool = False


def examine() -> Iterator[Row]:
    """Try everything, one row at a time; some take a second."""
    yield _row("python", _python, "", needed=True)
    yield _row("torch", _torch, f"pip install 'torch{_torch_range()}'", needed=True)
    yield _row("cpu", _cpu, "")
    yield _row("cpu bf16", _cpu_bf16, "train.precision=fp32 is the faster one on this processor")
    yield _row("accelerator", _accelerator, "optional: train.device=cpu is used without one")
    yield _row("fused AdamW", _fused_adamw, "reinstall torch", needed=True)
    yield _row("compiler", _compiler, _compiler_remedy())
    yield _row("collectives", _collectives, "reinstall torch; this build has no gloo")
    for extra, (module, purpose) in EXTRAS.items():
        yield _row(extra, _imports(module, purpose), f"pip install 'megalith[{extra}]'")
    yield _row(
        "transformers",
        _imports("transformers", "models of Hugging Face by model.factory"),
        "pip install 'transformers>=5,<6'",
    )
    yield _row("energy counters", _energy, "this machine shows none")
    yield _row("cache folder", _cache, "set data.cache to a folder you can write to", needed=True)


def _row(what: str, check: Callable[[], str], remedy: str, *, needed: bool = False) -> Row:
    try:
        return Row(what, True, check(), needed=needed)
    except _Fails as error:
        return Row(what, False, str(error), error.remedy or remedy, needed)
    except Exception as error:  # whatever breaks here is what the user came to hear of
        detail = " ".join(f"{type(error).__name__}: {error}".split())
        return Row(what, False, detail, remedy, needed)


def _python() -> str:
    return f"{platform.python_version()} on {platform.system()} {platform.machine()}"


def _torch_range() -> str:
    for line in importlib.metadata.requires("megalith") or []:
        if re.match(r"torch\b", line):
            return line.removeprefix("torch").strip()
    return ""


def _torch() -> str:
    def numbers(text: str) -> list[int]:
        return [int(n) for n in re.findall(r"\d+", text)[:2]]

    low, high = (re.search(sign + r"=?([\d.]+)", _torch_range()) for sign in (">", "<"))
    here = numbers(torch.__version__)
    if low and high and not numbers(low[1]) <= here < numbers(high[1]):
        raise _Fails(f"{torch.__version__} is not in {_torch_range()}", "")
    return torch.__version__


def _cpu() -> str:
    cpu = torch.device("cpu")
    info = Path("/proc/cpuinfo")
    flags = set(info.read_text().split()) if info.exists() else set()
    known = [f for f in ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd") if f in flags]
    rate = devices.matmul_peak(cpu, torch.float32, seconds=0.5)
    return (
        f"{environment.cpu_model()}, {torch.get_num_threads()} threads, "
        f"{units.size(devices.memory_total(cpu))}, {' '.join(known) or 'no known extensions'}, "
        f"fp32 {rate / 1e12:.3g} TFLOP/s"
    )


def _cpu_bf16() -> str:
    cpu = torch.device("cpu")
    full, half = (
        devices.matmul_peak(cpu, dtype, seconds=0.5) for dtype in (torch.float32, torch.bfloat16)
    )
    said = f"bf16 products run at {half / full:.2g} times the rate of fp32"
    if half < full:
        raise _Fails(said, "")
    return said


def _accelerator() -> str:
    device = devices.pick()
    if not devices.is_accelerator(device):
        if shutil.which("nvidia-smi"):
            raise _Fails(
                "there is an NVIDIA driver, but this torch cannot use it",
                f"pip install --force-reinstall 'torch{_torch_range()}' (not its CPU build)",
            )
        raise _Fails("none found", "")
    works = [p for p in devices.DTYPES if devices.supports(device, p)]
    memory = units.size(devices.memory_total(device))
    return f"{device}: {devices.describe(device)}, {memory}, {' '.join(works)}"


def _fused_adamw() -> str:
    device = devices.pick()
    weight = torch.nn.Parameter(torch.ones(8, device=device))
    weight.grad = torch.ones(8, device=device)
    torch.optim.AdamW([weight], lr=0.1, fused=True).step()
    if not bool((weight < 1).all()):
        raise _Fails("a step left the weights as they were", "")
    return f"runs on {device}"


def _compiler_remedy() -> str:
    if platform.system() == "Darwin":
        return "xcode-select --install"
    return "apt-get install g++ (or your system's C++ compiler)"


def _compiler() -> str:
    """What torch.compile needs on a CPU: a C++ compiler that builds and runs with OpenMP."""
    names = [os.environ.get("CXX", ""), "g++", "clang++", "c++"]
    found = next((path for name in names if name and (path := shutil.which(name))), None)
    if found is None:
        raise _Fails("no C++ compiler, which train.compile needs", "")
    flags = [] if platform.system() == "Darwin" else ["-fopenmp"]
    with tempfile.TemporaryDirectory() as folder:
        source, program = Path(folder) / "try.cpp", Path(folder) / "try"
        source.write_text("#include <vector>\nint main() { return std::vector<int>{0}[0]; }\n")
        subprocess.run([found, *flags, source, "-o", program], check=True, capture_output=True)
        subprocess.run([program], check=True)
    return f"{found} builds and runs (train.compile)"


def _collectives() -> str:
    """A sum over a group of one, by each backend that this machine has."""
    if distributed.is_initialized():
        return f"{distributed.get_backend()} is in use"
    named = {torch.device("cpu"), devices.pick()}
    done = []
    for device in sorted(named, key=str):
        backend = devices.collective_backend(device)
        with tempfile.TemporaryDirectory() as folder:
            meeting = (Path(folder) / "meeting").as_uri()
            distributed.init_process_group(backend, init_method=meeting, rank=0, world_size=1)
            try:
                distributed.all_reduce(torch.ones(4, device=device))
            finally:
                distributed.destroy_process_group()
        done.append(backend)
    return " and ".join(done)


def _imports(module: str, purpose: str) -> Callable[[], str]:
    def check() -> str:
        try:
            found = importlib.import_module(module)
        except ModuleNotFoundError as error:
            raise _Fails(f"'{error.name}' is not installed ({purpose})", "") from error
        return f"{module} {getattr(found, '__version__', '')}".strip() + f" ({purpose})"

    return check


def _energy() -> str:
    meter = EnergyMeter(devices.pick())
    if meter.sources:
        return ", ".join(meter.sources)
    if list(_POWERCAP.glob("*-rapl:*")):
        raise _Fails(
            "RAPL is there, but only root may read it",
            f"sudo chmod a+r {_POWERCAP}/*/energy_uj (until the next start)",
        )
    raise _Fails("neither RAPL nor NVML", "")


def _cache() -> str:
    """The default of data.cache, without leaving a trace."""
    folder = Path.cwd() / ".cache" / "megalith"
    there = next(path for path in [folder, *folder.parents] if path.exists())
    with tempfile.NamedTemporaryFile(dir=there) as file:
        file.write(b"x")
        file.flush()
    return f"{folder} can be written, {units.size(shutil.disk_usage(there).free)} free"
