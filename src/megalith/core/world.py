"""The ranks that a run consists of: found in the environment, joined, left.

Who starts the ranks is told by environment variables:

- ``torchrun``, and all that speaks its language (PyTorchJob, Ray, ...): ``RANK``, ``WORLD_SIZE``,
  ``LOCAL_RANK``, ``LOCAL_WORLD_SIZE``, ``MASTER_ADDR``, ``MASTER_PORT``;
- this project's own launcher (:mod:`megalith.core.launch`): the same, and a file to meet in;
- SLURM's ``srun``: ``SLURM_PROCID``, ``SLURM_LOCALID``, ``SLURM_STEP_NUM_TASKS``,
  ``SLURM_STEP_NODELIST``; the first node is where the ranks meet.
"""

from __future__ import annotations

import datetime
import faulthandler
import os
import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megalith.core import devices
from megalith.core.errors import TrainingError

MEETING = "MEGALITH_MEETING"
"""Variable in which the launcher names the file that its ranks meet in."""

_UNSHARED = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
_CONNECTING = 300.0  # seconds for all nodes to come up, whatever the timeout of a collective


@dataclass(frozen=True)
class World:
    """Where this process stands among all ranks.

    Attributes:
        local_rank: its number on this machine, which is also its accelerator's.
        local_size: ranks on this machine.
        restart: how often the ranks were started again before.
        meeting: URL where the ranks meet; ``env://`` is torchrun's store.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    restart: int = 0
    meeting: str = "env://"


def found(environment: Mapping[str, str] = os.environ) -> World | None:
    """The ranks that someone else has started, this process among them; ``None``: it is alone.

    Raises:
        TrainingError: the variables contradict each other.
    """
    if "RANK" in environment and "WORLD_SIZE" in environment:
        return _torchrun(environment)
    if "SLURM_PROCID" in environment and "SLURM_STEP_NODELIST" in environment:
        return _slurm(environment)
    return None


def speaks(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this process prints: it is alone, or rank 0."""
    world = found(environment)
    return world is None or world.rank == 0


def _torchrun(environment: Mapping[str, str]) -> World:
    if "LOCAL_RANK" not in environment and _number(environment, "PET_NPROC_PER_NODE", 1) > 1:
        raise TrainingError(
            "ranks: PET_NPROC_PER_NODE asks for several ranks on this machine and LOCAL_RANK is "
            "not set; start the run through torchrun, which reads it"
        )
    world = World(
        rank=_number(environment, "RANK"),
        size=_number(environment, "WORLD_SIZE"),
        local_rank=_number(environment, "LOCAL_RANK", 0),
        local_size=_number(environment, "LOCAL_WORLD_SIZE", 1),
        restart=_number(environment, "TORCHELASTIC_RESTART_COUNT", 0),
        meeting=environment.get(MEETING, "env://"),
    )
    if not 0 <= world.rank < world.size:
        raise TrainingError(f"ranks: RANK={world.rank} does not fit WORLD_SIZE={world.size}")
    return world


def _slurm(environment: Mapping[str, str]) -> World | None:
    size = _number(environment, "SLURM_STEP_NUM_TASKS", _number(environment, "SLURM_NTASKS", 1))
    if size == 1:
        return None  # a job of one task: the ranks of its machine are ours to start
    address = environment.get("MASTER_ADDR") or first_host(environment["SLURM_STEP_NODELIST"])
    # Steps of one job run one after another or on other nodes; jobs may share a node.
    job, step = _number(environment, "SLURM_JOB_ID", 0), _number(environment, "SLURM_STEP_ID", 0)
    port = environment.get("MASTER_PORT") or 20000 + (7 * job + step) % 20000
    per_node = environment.get("SLURM_STEP_TASKS_PER_NODE", "1")
    return World(
        rank=_number(environment, "SLURM_PROCID"),
        size=size,
        local_rank=_number(environment, "SLURM_LOCALID", 0),
        local_size=int(re.split(r"\D", per_node)[0] or 1),
        restart=_number(environment, "SLURM_RESTART_COUNT", 0),
        meeting=f"tcp://{address}:{port}",
    )


def first_host(nodes: str) -> str:
    """The first name in a SLURM list of nodes such as ``gpu[003-007,9],login``."""
    name = re.match(r"([^\[,]+)(?:\[([^\],-]+)[^\]]*\]([^,\[]*))?", nodes)
    if name is None:
        raise TrainingError(f"ranks: SLURM_STEP_NODELIST='{nodes}' names no node")
    return "".join(part or "" for part in name.groups())


def _number(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environment.get(name)
    if text is None and default is not None:
        return default
    if text is None or not text.isdecimal():
        raise TrainingError(f"ranks: {name}='{text or ''}' in the environment is no whole number")
    return int(text)


def own_device(world: World, device: torch.device) -> torch.device:
    """The rank's own: the CPU, or the accelerator that has its number, made current.

    Raises:
        TrainingError: this machine has fewer accelerators than ranks.
    """
    if not devices.is_accelerator(device):
        return device
    count = torch.accelerator.device_count()
    if world.local_rank >= count:
        raise TrainingError(
            f"ranks: this machine has {count} of '{device.type}' and {world.local_size} ranks; "
            f"start {count} ranks on it, or set train.device to 'cpu'"
        )
    torch.accelerator.set_device_index(world.local_rank)
    return torch.device(device.type, world.local_rank)


def join(
    world: World, device: torch.device, backend: str | None = None, timeout: float = 600
) -> torch.device:
    """Meet the other ranks; every rank calls it. Returns the rank's own device.

    Args:
        backend: of ``torch.distributed`` for the device; left out: the device's usual one.
        timeout: seconds after which a collective fails.

    Raises:
        TrainingError: the ranks did not find each other.
    """
    device = own_device(world, device)
    _check_store(world)
    # What torchrun and SLURM start has no parent that asks for stacks: kill -USR1 does.
    if world.meeting.partition(":")[0] != "file" and hasattr(signal, "SIGUSR1"):
        faulthandler.register(signal.SIGUSR1, all_threads=True)
    try:
        dist.init_process_group(
            _backend(device, backend),
            timeout=datetime.timedelta(seconds=timeout),
            **_meeting_point(world),
        )
    except (RuntimeError, ValueError) as error:
        first = " ".join(str(error).split())[:200]
        hint = ""
        if world.restart and os.environ.get(_UNSHARED) is None and _store_is_shared():
            hint = f"; set {_UNSHARED}=1 where torchrun is started: without it a restart meets old"
            hint += " addresses"
        raise TrainingError(
            f"ranks: rank {world.rank} of {world.size} did not meet the others at "
            f"{world.meeting}: {first}{hint}"
        ) from error
    return device


def leave() -> None:
    """The end of what :func:`join` began; nothing if it was not called."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _backend(device: torch.device, backend: str | None) -> str:
    """An accelerator's backend has gloo beside it, for values that are on the host."""
    chosen = backend or devices.collective_backend(device)
    if not devices.is_accelerator(device) or ":" in chosen:
        return chosen
    return f"cpu:gloo,{device.type}:{chosen}"


def _store_is_shared() -> bool:
    """Whether torchrun keeps one store for all its attempts."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() == "true"


def _check_store(world: World) -> None:
    """Refuse at once what would fail at the first restart, hours later (pytorch issue 135712)."""
    nodes = _number(os.environ, "GROUP_WORLD_SIZE", 1)
    restarts = _number(os.environ, "TORCHELASTIC_MAX_RESTARTS", 0)
    if world.meeting == "env://" and _store_is_shared() and nodes > 1 and restarts:
        raise TrainingError(
            f"ranks: set {_UNSHARED}=1 on every node where torchrun is started: without it, ranks "
            "that start again meet the addresses of those before them"
        )


def _meeting_point(world: World) -> dict[str, Any]:
    if world.meeting != "env://":
        return {"init_method": world.meeting, "rank": world.rank, "world_size": world.size}
    if not _store_is_shared():
        return {"init_method": "env://"}
    # One agent with one store: a prefix for each attempt keeps old addresses apart.
    store = dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
        os.environ["MASTER_ADDR"],
        _number(os.environ, "MASTER_PORT"),
        is_master=False,
        timeout=datetime.timedelta(seconds=_CONNECTING),
    )
    prefix = f"megalith-{world.restart}"
    prefixed = dist.PrefixStore(prefix, store)  # pyright: ignore[reportPrivateImportUsage]
    return {"store": prefixed, "rank": world.rank, "world_size": world.size}
