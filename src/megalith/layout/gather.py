"""Whole tensors on one rank, put together from all ranks' pieces."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from megalith.layout.mesh import Mesh
from megalith.layout.pieces import Piece


def gather(pieces: Mapping[str, Piece], mesh: Mesh) -> dict[str, Tensor]:
    """Every tensor whole, on the host of the main rank; an empty dict on the others.

    All ranks call it. The main rank's host must have room for all of them.
    """
    owned = {
        name: (piece.shape, piece.start, piece.tensor.detach().cpu())
        for name, piece in pieces.items()
        if piece.owned
    }
    everyone: list[dict[str, tuple[tuple[int, ...], tuple[int, ...], Tensor]] | None] = [owned]
    if mesh.size > 1:
        everyone = [None] * mesh.size
        dist.gather_object(owned, everyone if mesh.main else None)
    if not mesh.main:
        return {}
    whole: dict[str, Tensor] = {}
    for found in everyone:
        for name, (shape, start, tensor) in (found or {}).items():
            # NaN shows what no rank answers for.
            if name not in whole:
                whole[name] = _blank(shape, tensor.dtype)
            part = Piece(tensor, shape, start)
            whole[name][part.box] = tensor
    return whole


def _blank(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.full(shape, float("nan") if dtype.is_floating_point else 0, dtype=dtype)
