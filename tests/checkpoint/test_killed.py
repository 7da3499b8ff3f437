"""Processes killed while they save: the older checkpoint is whole and used."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megalith import checkpoint
from megalith.checkpoint import write
from megalith.layout.mesh import AXES, Mesh
from thread_ranks import spread

ROOT = str(Path(__file__).parents[2])
if ROOT not in sys.path:  # a process imports this module by the name that pytest gave it
    sys.path.append(ROOT)
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "megalith.checkpoint"])


def _save_for_ever(folder: Path) -> None:
    """Every third save replaces the one before; what was saved is told by a file's name."""
    step = max((entry.step for entry in checkpoint.entries(folder)), default=0)
    while True:
        step += 1
        for again in range(1 + (step % 3 == 0)):
            tensors = {f"w{n}": torch.full((1000,), float(step)) for n in range(20)}
            parts = {"model": checkpoint.wholes(tensors), "ema": checkpoint.wholes(tensors)}
            checkpoint.save(folder, step, parts, {"done": step, "again": again})
            (folder.parent / f"saved-{step}").touch()
        checkpoint.prune(folder, keep=1)


def test_killed_at_any_moment_what_was_saved_is_there(tmp_path: Path) -> None:
    folder, draw = tmp_path / "checkpoints", random.Random(0)
    for _ in range(8):
        process = CONTEXT.Process(target=_save_for_ever, args=(folder,))
        process.start()
        before = len(list(tmp_path.glob("saved-*")))
        while len(list(tmp_path.glob("saved-*"))) < before + 3:
            time.sleep(0.005)
            assert process.is_alive()
        time.sleep(draw.uniform(0, 0.1))
        process.kill()
        process.join()
        told = max(int(path.name.removeprefix("saved-")) for path in tmp_path.glob("saved-*"))
        entry = checkpoint.newest_whole(folder)
        assert entry is not None
        assert entry.step in (told, told + 1)
        assert entry.step == checkpoint.entries(folder)[-1].step, "one looks whole and is not"
        loaded = checkpoint.load(entry.path, "ema")
        assert all(bool((tensor == entry.step).all()) for tensor in loaded.values())


def _rank(rank: int, meet: Path, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=2)
    mesh = Mesh(dict.fromkeys(AXES, 1) | {"shard": 2}, dict.fromkeys(AXES, 0) | {"shard": rank})
    pieces = spread({"w": torch.arange(100.0)}, 2, 0, fill=True)[rank]
    checkpoint.save(folder, 1, {"model": pieces}, {"done": 1}, mesh)
    if rank == 1:
        write.write_pieces = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    checkpoint.save(folder, 2, {"model": pieces}, {"done": 2}, mesh)


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no such signal here")
def test_a_rank_killed_while_it_writes_ends_the_save_for_all(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    processes = [
        CONTEXT.Process(target=_rank, args=(rank, tmp_path / "meet", folder)) for rank in range(2)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert processes[1].exitcode == -signal.SIGKILL
    assert processes[0].exitcode == 1, "rank 0 must notice"
    entry = checkpoint.newest_whole(folder)
    assert entry is not None
    assert entry.step == 1
    assert torch.equal(checkpoint.load(entry.path, "model")["w"], torch.arange(100.0))
