"""Model families: plain ``nn.Module``s that know nothing of ranks, data or tasks.

A family is a folder whose package offers ``build(config) -> nn.Module``. Its module fills each
parameter by ``init_weight(name, tensor, generator)``, and lists in ``units`` the name patterns of
its repeated parts, which are what checkpointing, compilation and sharding work on. A module with
buffers that must be right after ``to_empty`` sets them in ``init_buffers()``.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn

from megalith.core import imports, seeds
from megalith.core.errors import RecipeError
from megalith.recipe.families import DecoderConfig, FactoryModel, ResNetConfig

ModelConfig = DecoderConfig | ResNetConfig | FactoryModel


def resolve(config: ModelConfig, facts: Mapping[str, int]) -> ModelConfig:
    """``config`` with the fields that its ``path`` or the data's ``facts`` decide filled in.

    Args:
        config: the recipe's ``[model]``.
        facts: what the data knows, such as ``{"vocab": 4096}`` or ``{"classes": 10}``.

    Raises:
        RecipeError: a field is too small for the data, or ``path`` holds no such model.
    """
    if isinstance(config, FactoryModel):
        return config
    if config.path is not None:
        config = _family(config).read_config(config)
    found = {k: v for k, v in facts.items() if k in type(config).model_fields}
    for name, needed in found.items():
        given = getattr(config, name)
        if given is not None and given < needed:
            raise RecipeError(f"model.{name}: {given} is smaller than the data's {needed}")
        if name == "channels" and given not in (None, needed):
            raise RecipeError(f"model.channels: {given}, but the data's images have {needed}")
    missing = {k: v for k, v in found.items() if getattr(config, k) is None}
    return config.model_copy(update=missing)


def build(
    config: ModelConfig,
    seed: int,
    device: torch.device | str = "cpu",
    *,
    filled: bool = True,
) -> nn.Module:
    """The module with its initial weights, float32, on ``device``.

    Weights are a function of ``(seed, parameter name, full shape)`` alone (contract 3). A factory's
    module keeps the weights its own code gives it under ``torch.manual_seed``. On the ``meta``
    device nothing is filled in.

    Args:
        config: resolved, see :func:`resolve`.
        filled: false: a family's weights get no values, as on the ``meta`` device.
    """
    device = torch.device(device)
    if isinstance(config, FactoryModel):
        factory = imports.resolve(config.factory, "model.factory")
        seeds.set_default(seed, "init")
        with device:
            module = factory(**config.args)
        if not isinstance(module, nn.Module):
            raise RecipeError(
                f"model.factory: '{config.factory}' returned {type(module).__name__}, "
                "not an nn.Module"
            )
        return module
    family = _family(config)
    with device:
        module = family.build(config)
    if filled and device.type != "meta":
        if config.path is not None:
            fresh = family.load_weights(module, config)  # what the file does not hold
            initialise(module, seed, fresh or ())
        else:
            initialise(module, seed)
    return module


@torch.no_grad()
def initialise(module: Any, seed: int, only: Collection[str] | None = None) -> None:
    """Fill parameters, each from a generator of its own drawn on the host, and set buffers.

    Args:
        only: names of the parameters to fill, buffers left alone; ``None``: everything.
    """
    if only is None and hasattr(module, "init_buffers"):
        module.init_buffers()
    for name, parameter in module.named_parameters():
        if only is not None and name not in only:
            continue
        host = torch.empty(parameter.shape, dtype=torch.float32)
        module.init_weight(name, host, seeds.generator(seed, "init", name))
        parameter.copy_(host)


def brings_weights(config: ModelConfig) -> bool:
    """Whether the weights come from a file or from the user's own code, all at once."""
    return isinstance(config, FactoryModel) or config.path is not None


def _family(config: ModelConfig) -> Any:
    return importlib.import_module(f"megalith.models.{config.family}")
