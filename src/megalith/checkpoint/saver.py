"""Saving while training goes on: copy to host memory, then write in a thread."""

from __future__ import annotations

import copy
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalith.checkpoint import write
from megalith.checkpoint.store import prune
from megalith.checkpoint.write import Parts, Together
from megalith.layout.mesh import Mesh, single
from megalith.layout.pieces import Piece


class Saver:
    """Saves the checkpoints of a run, one at a time; all ranks make the same calls.

    The thread makes no collective call, which could meet those of training in another order on
    another rank: rank 0 waits for the others' listings on the file system.

    Args:
        asynchronous: let the caller go on as soon as the values are copied.
        keep: newest checkpoints that stay, see ``prune``; ``None``: all.
        patience: how long rank 0 waits for the files of the slowest rank, seconds.
    """

    def __init__(
        self,
        checkpoints: Path,
        mesh: Mesh | None = None,
        *,
        asynchronous: bool = False,
        keep: int | None = None,
        patience: float = 600.0,
    ) -> None:
        self._checkpoints = checkpoints
        self._mesh = mesh or single()
        self._keep = keep
        self._patience = patience
        self._pool = ThreadPoolExecutor(1, "checkpoint") if asynchronous else None
        self._writing: Future[None] | None = None
        self._host: dict[tuple[str, str], Tensor] = {}

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        try:
            if kind is None:
                self.wait()
        finally:
            if self._pool is not None:
                self._pool.shutdown()  # what is being written is finished in any case

    def save(self, step: int, parts: Parts, state: dict[str, Any]) -> float:
        """Save the values as they are now; returns the seconds that the caller was held up.

        Raises:
            CheckpointError: this save, or with ``asynchronous`` the one before, failed on a rank.
        """
        start = time.perf_counter()
        self.wait()
        if self._pool is None:
            write.save(self._checkpoints, step, parts, state, self._mesh)
            if self._mesh.main:
                self._prune()
        else:
            write.begin(self._checkpoints, step, self._mesh)
            copied, state = self._copied(parts), copy.deepcopy(state)
            self._writing = self._pool.submit(self._write, step, copied, state)
        return time.perf_counter() - start

    def wait(self) -> None:
        """Until what was given to :meth:`save` is on disk.

        Raises:
            CheckpointError: it failed, on this rank or another.
        """
        if self._writing is None:
            return
        writing, self._writing = self._writing, None
        with Together(self._mesh, self._checkpoints):
            writing.result()

    def _write(self, step: int, parts: Parts, state: dict[str, Any]) -> None:
        with write.reported(self._checkpoints, step, self._mesh):
            write.write_pieces(self._checkpoints, step, parts, self._mesh)
        if self._mesh.main:
            write.finish(self._checkpoints, step, state, self._mesh, self._patience)
            self._prune()

    def _prune(self) -> None:
        if self._keep is not None:
            prune(self._checkpoints, self._keep)

    @torch.no_grad()
    def _copied(self, parts: Parts) -> dict[str, dict[str, Piece]]:
        """The owned pieces in host memory, which is kept from save to save."""
        host: dict[tuple[str, str], Tensor] = {}
        copied: dict[str, dict[str, Piece]] = {part: {} for part in parts}
        for part, pieces in parts.items():
            for name, piece in pieces.items():
                if not piece.owned:
                    continue
                target = self._host.get((part, name))
                value = piece.tensor.detach()
                if target is None or (target.shape, target.dtype) != (value.shape, value.dtype):
                    target = torch.empty(value.shape, dtype=value.dtype, device="cpu")
                target.copy_(value)
                host[part, name] = target
                copied[part][name] = Piece(target, piece.shape, piece.start)
        self._host = host
        return copied
