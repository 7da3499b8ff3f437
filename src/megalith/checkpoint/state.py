"""What of a step goes into a checkpoint, and back."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from megalith.checkpoint.read import Reader, load_into
from megalith.checkpoint.store import Entry
from megalith.core.errors import CheckpointError
from megalith.layout.mesh import Mesh
from megalith.layout.pieces import Piece, whole

if TYPE_CHECKING:
    from megalith.step import Step


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name; of tied weights, the first name only."""
    seen: set[int] = set()
    found: dict[str, Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            found[name] = tensor
    return found


def wholes(tensors: Mapping[str, Tensor]) -> dict[str, Piece]:
    """Undivided tensors as pieces."""
    return {name: whole(tensor) for name, tensor in tensors.items()}


def numbers(step: Step) -> dict[str, Any]:
    """Every number that does; random numbers need none, they follow from the update."""
    state: dict[str, Any] = {"done": step.done, "skipped": step.skipped}
    if step.loss_scale is not None:
        state["loss_scale"] = {"scale": step.loss_scale.scale, "good": step.loss_scale.good}
    return state


def restore(step: Step, entry: Entry, mesh: Mesh | None = None) -> None:
    """Put ``step`` where it was when ``entry`` was saved, bit for bit, whatever the layouts.

    Args:
        mesh: of ``step``; where its ranks hold different parameters, names that the checkpoint has
            and this rank has not are no error.

    Raises:
        CheckpointError: the model is another one.
    """
    parts = step.pieces()
    alone = mesh is None or mesh.size == 1
    for part in ("model", "ema"):
        if part in parts:
            load_into(entry.path, part, parts[part], names=parts[part] if alone else None)
    _restore_optimizer(step, entry.path, parts, alone)
    step.done, step.skipped = entry.state["done"], entry.state["skipped"]
    if step.loss_scale is not None:
        step.loss_scale.scale = entry.state["loss_scale"]["scale"]
        step.loss_scale.good = entry.state["loss_scale"]["good"]


def _restore_optimizer(
    step: Step, path: Path, parts: Mapping[str, Mapping[str, Piece]], alone: bool
) -> None:
    """Into the state that is there; what the optimizer has not made yet is handed to it."""
    here, trained = parts["optimizer"], set(step.optimizers.names.values())
    made: dict[str, Tensor] = {}
    with Reader(path, "optimizer") as reader:
        for key in sorted(reader.saved):
            name = key.rpartition("/")[0]
            if name not in trained:
                if alone:
                    raise CheckpointError(f"{path}: has optimizer state of '{name}', not trained")
                continue
            spec, parameter = reader.saved[key].spec, parts["model"][name]
            if key in here and spec.shape:
                if here[key].shape != spec.shape:
                    raise CheckpointError(
                        f"{path}: '{key}' has shape {list(spec.shape)}, "
                        f"the optimizer's is {list(here[key].shape)}"
                    )
                reader.copy(key, here[key])
            elif spec.shape == tuple(parameter.shape) and spec.shape:
                local = reader.empty(key, tuple(parameter.tensor.shape))
                reader.copy(key, Piece(local, parameter.shape, parameter.start))
                made[key] = local
            else:
                made[key] = reader.tensor(key)
    step.optimizers.load_state_tensors(made)


@torch.no_grad()
def load_model(model: nn.Module, path: Path, part: str = "model") -> None:
    """Copy a checkpoint's weights (``part`` may be ``ema``) into ``model``, in place.

    Raises:
        CheckpointError: names or shapes differ.
    """
    wanted = wholes(model_tensors(model))
    averaged: set[str] = set()
    if part == "ema":  # what is not averaged, such as running statistics, is the model's own
        with Reader(path, part) as reader:
            averaged = wanted.keys() & reader.saved.keys()
        load_into(path, part, {name: wanted[name] for name in averaged}, names=wanted)
    rest = {name: piece for name, piece in wanted.items() if name not in averaged}
    load_into(path, "model", rest, names=wanted)
