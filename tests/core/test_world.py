"""The ranks that others have started, told from the environment."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from megalith.core.errors import TrainingError
from megalith.core.world import World, first_host, found, join


def test_a_process_alone_finds_nothing() -> None:
    assert found({}) is None


def test_torchrun_is_found() -> None:
    variables = {
        "RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "4",
        "TORCHELASTIC_RESTART_COUNT": "2",
        "SLURM_PROCID": "1",  # torchrun inside of a SLURM job counts
        "SLURM_STEP_NODELIST": "a[1-2]",
    }
    assert found(variables) == World(5, 8, 1, 4, restart=2, meeting="env://")


def test_slurm_is_found() -> None:
    variables = {
        "SLURM_PROCID": "5",
        "SLURM_STEP_NUM_TASKS": "8",
        "SLURM_LOCALID": "1",
        "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
        "SLURM_STEP_NODELIST": "gpu[017-018]",
        "SLURM_JOB_ID": "4711",
        "SLURM_STEP_ID": "0",
    }
    world = found(variables)
    assert world == World(5, 8, 1, 4, meeting=f"tcp://gpu017:{20000 + 7 * 4711 % 20000}")


def test_a_batch_script_outside_of_srun_is_alone() -> None:
    assert found({"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "1"}) is None


def test_a_slurm_step_of_one_task_starts_its_own_ranks() -> None:
    variables = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NODELIST": "a"}
    assert found(variables) is None


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("login", "login"),
        ("gpu[003-007,9],login", "gpu003"),
        ("a-1,b-2", "a-1"),
        ("rack[2,4]-node", "rack2-node"),
        ("n[08]", "n08"),
    ],
)
def test_the_first_host_of_a_list(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


@pytest.mark.parametrize(
    "variables",
    [
        {"RANK": "8", "WORLD_SIZE": "8"},
        {"RANK": "x", "WORLD_SIZE": "8"},
        {"RANK": "0", "WORLD_SIZE": "2", "PET_NPROC_PER_NODE": "2"},
    ],
)
def test_what_cannot_be_is_refused(variables: dict[str, str]) -> None:
    with pytest.raises(TrainingError, match=r"^ranks: [^\n]+$"):
        found(variables)


def test_a_store_that_torchrun_keeps_over_restarts_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in {
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_MAX_RESTARTS": "3",
        "GROUP_WORLD_SIZE": "2",
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(TrainingError, match="set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"):
        join(World(0, 4, 0, 2), torch.device("cpu"))


@pytest.mark.slow
@pytest.mark.parametrize("shared", ["0", "1"])
def test_ranks_of_torchrun_meet_again_after_a_restart(
    tmp_path: Path, shared: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            """
            import os, signal, sys
            import torch, torch.distributed as dist
            from megalith.core import world

            here = world.found()
            world.join(here, torch.device("cpu"), timeout=30)
            value = torch.ones(1)
            dist.all_reduce(value)
            if here.restart < 2 and here.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            dist.all_reduce(value)
            if here.rank == 0:
                print("met", here.restart, value.item(), flush=True)
            world.leave()
            """
        )
    )
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    if shared == "0":
        monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*command, "--nproc-per-node", "2", "--max-restarts", "2", str(script)],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert "met 2 4.0" in done.stdout, done.stderr
