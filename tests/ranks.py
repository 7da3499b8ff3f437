"""Ranks for tests: processes of one gloo group, forked from a clean server that has torch."""

from __future__ import annotations

import datetime
import multiprocessing
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_CONTEXT = multiprocessing.get_context("forkserver")


def on_ranks(count: int, folder: Path, work: Callable[..., None], *args: Any) -> None:
    """Run ``work(*args)`` on ``count`` ranks; what fails on any of them fails here.

    Args:
        folder: an empty folder for the ranks to meet in.
        work: a function of a module's top level.
    """
    _CONTEXT.set_forkserver_preload(["torch", "torch.distributed", "megalith.layout.linear"])
    processes = [
        _CONTEXT.Process(target=_rank, args=(rank, count, folder, work, args))
        for rank in range(count)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(90)
        if process.is_alive():
            process.kill()
    failures = [file.read_text() for file in sorted(folder.glob("failure-*"))]
    assert not failures, failures[0]
    assert all(process.exitcode == 0 for process in processes)


def _rank(rank: int, count: int, folder: Path, work: Callable[..., None], args: Any) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder / 'meet'}",
            rank=rank,
            world_size=count,
            timeout=datetime.timedelta(seconds=60),
        )
        work(*args)
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        (folder / f"failure-{rank}").write_text(traceback.format_exc())
        raise
