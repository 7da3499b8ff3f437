"""What of a step goes into a checkpoint, and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megalith.checkpoint import store
from megalith.core.errors import CheckpointError
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


def tensors(step: Step) -> store.Tensors:
    """Every tensor that decides how ``step`` goes on."""
    parts = {"model": model_tensors(step.model), "optimizer": step.optimizers.state_tensors()}
    if step.ema is not None:
        parts["ema"] = step.ema.average
    return parts


def numbers(step: Step) -> dict[str, Any]:
    """Every number that does; random numbers need none, they follow from the update."""
    state: dict[str, Any] = {"done": step.done, "skipped": step.skipped}
    if step.loss_scale is not None:
        state["loss_scale"] = {"scale": step.loss_scale.scale, "good": step.loss_scale.good}
    return state


def restore(step: Step, entry: store.Entry) -> None:
    """Put ``step`` where it was when ``entry`` was saved, bit for bit.

    Raises:
        CheckpointError: the model is another one.
    """
    load_model(step.model, entry.path)
    names = set(step.optimizers.names.values())
    saved = store.load(entry.path, "optimizer")
    foreign = sorted({path.rpartition("/")[0] for path in saved} - names)
    if foreign:
        raise CheckpointError(f"{entry.path}: has optimizer state of '{foreign[0]}', not trained")
    step.optimizers.load_state_tensors(saved)
    if step.ema is not None:
        step.ema.load(store.load(entry.path, "ema"))
    step.done, step.skipped = entry.state["done"], entry.state["skipped"]
    if step.loss_scale is not None:
        step.loss_scale.scale = entry.state["loss_scale"]["scale"]
        step.loss_scale.good = entry.state["loss_scale"]["good"]


@torch.no_grad()
def load_model(model: nn.Module, path: Path, part: str = "model") -> None:
    """Copy a checkpoint's weights (``part`` may be ``ema``) into ``model``, in place.

    Raises:
        CheckpointError: names or shapes differ.
    """
    wanted, saved = model_tensors(model), store.load(path, part)
    if part == "ema":
        saved = store.load(path, "model") | saved
    for name in wanted.keys() | saved.keys():
        if name not in saved or name not in wanted:
            where = "the checkpoint" if name not in saved else "the model"
            raise CheckpointError(f"{path}: '{name}' is missing in {where}; another recipe's?")
        if wanted[name].shape != saved[name].shape:
            raise CheckpointError(
                f"{path}: '{name}' has shape {list(saved[name].shape)}, "
                f"the model's is {list(wanted[name].shape)}"
            )
    for name, tensor in wanted.items():
        tensor.copy_(saved[name])
