"""Weights of residual networks in and out: safetensors with torchvision's names.

The shapes in a file say all that the config says, so a file needs no ``config.json`` beside it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from megalith.core.errors import CheckpointError, RecipeError, nearest
from megalith.models.resnet.model import ResNet
from megalith.recipe.families import ResNetConfig

_FILE = "model.safetensors"
_BLOCK = re.compile(r"layer(\d+)\.(\d+)\.")
_HEAD = ("fc.weight", "fc.bias")


def read_config(config: ResNetConfig) -> ResNetConfig:
    """``config`` with the fields that the file at ``path`` decides.

    ``classes`` stays as it is: where it differs from the file's, the head is a new one.

    Raises:
        CheckpointError: the file cannot be read, or is no residual network.
        RecipeError: a field that the recipe sets is not what the file holds.
    """
    with _open(_path(config)) as file:
        found = _decided(_shapes(file), _path(config))
    for name in sorted(found.keys() & config.model_fields_set):
        if getattr(config, name) not in (None, found[name]):
            raise RecipeError(
                f"model.{name}: {getattr(config, name)} is given, "
                f"but {config.path} has {found[name]}"
            )
    return config.model_copy(update=found)


def with_classes(config: ResNetConfig) -> ResNetConfig:
    """``config`` with the file's number of classes where neither recipe nor data gave one.

    Raises:
        CheckpointError: the file cannot be read.
    """
    if config.path is None or config.classes is not None:
        return config
    with _open(_path(config)) as file:
        return config.model_copy(update={"classes": _shapes(file)["fc.weight"][0]})


@torch.no_grad()
def load_weights(module: ResNet, config: ResNetConfig) -> tuple[str, ...]:
    """Copy the tensors of ``config.path`` into ``module``, in the module's dtypes.

    A file without ``num_batches_tracked`` (torchvision before 0.3) is accepted.

    Returns:
        The names of the parameters that the file does not fill: the head's, where it has another
        number of classes; else none.

    Raises:
        CheckpointError: the file cannot be read, or its names or shapes are not the module's.
    """
    path = _path(config)
    with _open(path) as file:
        shapes = _shapes(file)
        wanted = module.state_dict()
        fresh = () if shapes.get("fc.weight") == tuple(wanted["fc.weight"].shape) else _HEAD
        for name in shapes:
            if name not in wanted:
                raise CheckpointError(f"{path}: no such tensor as '{name}'{nearest(name, wanted)}")
        for name, tensor in wanted.items():
            if name in fresh or (name not in shapes and name.endswith("num_batches_tracked")):
                continue
            if name not in shapes:
                raise CheckpointError(f"{path}: '{name}' is missing{nearest(name, shapes)}")
            if shapes[name] != tuple(tensor.shape):
                raise CheckpointError(
                    f"{path}: '{name}' has shape {list(shapes[name])}, "
                    f"the model's is {list(tensor.shape)}"
                )
            tensor.copy_(file.get_tensor(name))
    return fresh


def save_pretrained(module: ResNet, path: str | Path) -> Path:
    """Write the state dict of ``module`` for torchvision, and return the file's path.

    Args:
        path: a name that ends in ``.safetensors``, or a folder, where the file is named
            ``model.safetensors``.
    """
    path = Path(path)
    file = path if path.suffix == ".safetensors" else path / _FILE
    file.parent.mkdir(parents=True, exist_ok=True)
    tensors = {name: t.detach().cpu().contiguous() for name, t in module.state_dict().items()}
    temporary = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    save_file(tensors, temporary, metadata={"format": "pt"})
    temporary.replace(file)
    return file


def _decided(shapes: Mapping[str, tuple[int, ...]], path: Path) -> dict[str, Any]:
    """The config's fields that the shapes of a state dict decide."""
    missing = [
        name for name in ("conv1.weight", "layer1.0.conv1.weight", *_HEAD) if name not in shapes
    ]
    if missing:
        raise CheckpointError(f"{path}: not a residual network, it has no '{missing[0]}'")
    counts: dict[int, int] = {}
    for name in shapes:
        if match := _BLOCK.match(name):
            stage, number = int(match[1]), int(match[2])
            counts[stage] = max(counts.get(stage, 0), number + 1)
    width, channels, kernel, _ = shapes["conv1.weight"]
    return {
        "block": "bottleneck" if "layer1.0.conv3.weight" in shapes else "basic",
        "blocks": [counts[stage] for stage in sorted(counts)],
        "width": width,
        "channels": channels,
        "stem": "imagenet" if kernel == 7 else "small",
    }


def _path(config: ResNetConfig) -> Path:
    if config.path is None:
        raise RecipeError("model.path: is needed to read weights")
    path = Path(config.path)
    return path / _FILE if path.is_dir() else path


def _shapes(file: Any) -> dict[str, tuple[int, ...]]:
    return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118


@contextmanager
def _open(path: Path) -> Iterator[Any]:
    """The open safetensors file; only what is asked for is read."""
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except OSError as error:
        reason = "no such file" if isinstance(error, FileNotFoundError) else error
        raise CheckpointError(f"model.path: cannot read '{path}' ({reason})") from error
    except SafetensorError as error:
        raise CheckpointError(f"model.path: '{path}' is no safetensors file ({error})") from error
