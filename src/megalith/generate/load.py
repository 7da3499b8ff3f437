"""Finding a model to generate with: in a run folder, or in a folder of Hugging Face's layout."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import nn

from megalith import checkpoint, models
from megalith.checkpoint import manifest
from megalith.core import devices
from megalith.core.errors import CheckpointError, MegalithError
from megalith.core.runs import RunFolder
from megalith.data import tokenizers
from megalith.data.tokenizers import Tokenizer
from megalith.models.decoder import Decoder
from megalith.recipe import Recipe, load, parse
from megalith.recipe.families import FactoryModel

_HF_CONFIG = "config.json"
_TOKENIZER = "tokenizer.json"


def load_for_generation(
    run_or_folder: str | Path, step: int | None = None, device: str = "auto"
) -> tuple[Decoder, Tokenizer, Recipe]:
    """The model in evaluation mode, float32, with its tokenizer and recipe.

    Args:
        run_or_folder: a Megalith run folder, or a folder with Hugging Face's ``config.json``,
            safetensors and ``tokenizer.json``.
        step: of the run's checkpoint; left out: the one with the lowest validation loss, or the
            newest if none was evaluated. Averaged weights are taken where the run has them.
        device: as in ``train.device``.

    Raises:
        MegalithError: in one line, what is missing, damaged, or no decoder.
    """
    path = Path(run_or_folder).expanduser()
    run = RunFolder(path)
    if run.recipe.is_file():
        return _from_run(run, step, devices.pick(device))
    if (path / _HF_CONFIG).is_file():
        if step is not None:
            raise CheckpointError(f"{path}: has no steps to choose from, it is not a run folder")
        return _from_pretrained(path, devices.pick(device))
    if not path.exists():
        raise CheckpointError(f"{path}: no such folder")
    owner = next((up for up in path.absolute().parents if RunFolder(up).recipe.is_file()), None)
    hint = f"; give the run's folder, {owner}" if owner else ""
    raise CheckpointError(
        f"{path}: neither a run folder (no recipe.toml) nor a model folder (no config.json){hint}"
    )


def load_run(
    run: RunFolder, step: int | None = None, device: torch.device | str = "cpu"
) -> tuple[nn.Module, Recipe]:
    """The module of a run, of any kind, in evaluation mode, float32, with its recipe.

    Args:
        step: see :func:`load_for_generation`.

    Raises:
        MegalithError: the run has no such whole checkpoint.
    """
    recipe = load(run.recipe)
    entry = _chosen(run, step)
    model = _shell(recipe, torch.device(device))
    averaged = checkpoint.holds(entry.path, "ema")
    checkpoint.load_model(model, entry.path, "ema" if averaged else "model")
    return model.eval(), recipe


def _from_run(
    run: RunFolder, step: int | None, device: torch.device
) -> tuple[Decoder, Tokenizer, Recipe]:
    model, recipe = load_run(run, step, device)
    if not run.tokenizer.is_file():
        raise CheckpointError(f"{run.path}: holds no {run.tokenizer.name}; its data was not text")
    tokenizer = tokenizers.load(run.tokenizer)
    return _decoder(model, run.path, tokenizer), tokenizer, recipe


def _chosen(run: RunFolder, step: int | None) -> checkpoint.Entry:
    found = checkpoint.entries(run.checkpoints)
    if step is not None:
        entry = next((entry for entry in found if entry.step == step), None)
        if entry is None:
            kept = ", ".join(str(entry.step) for entry in found) or "none"
            raise CheckpointError(f"{run.path}: no checkpoint of step {step}; there is: {kept}")
        manifest.verify(entry.path)
        return entry
    # The newest comes first among those that were not evaluated: they sort as infinitely bad.
    found.sort(key=lambda e: (_loss(e), e.step if _loss(e) < math.inf else -e.step))
    for entry in found:
        try:
            manifest.verify(entry.path)
        except CheckpointError:
            continue  # damaged: the next best may be whole
        return entry
    raise CheckpointError(f"{run.path}: holds no whole checkpoint yet")


def _loss(entry: checkpoint.Entry) -> float:
    loss = entry.validation_loss
    return math.inf if loss is None or math.isnan(loss) else loss


def _shell(recipe: Recipe, device: torch.device) -> nn.Module:
    """The recipe's module on ``device``, its weights still to come."""
    if isinstance(recipe.model, FactoryModel):  # its code may not bear the meta device
        return models.build(recipe.model, recipe.train.seed).to(device)
    config = recipe.model.model_copy(update={"path": None})  # the checkpoint has the weights
    model: Any = models.build(config, recipe.train.seed, "meta").to_empty(device=device)
    if hasattr(model, "init_buffers"):
        model.init_buffers()
    return model


def _from_pretrained(path: Path, device: torch.device) -> tuple[Decoder, Tokenizer, Recipe]:
    if not (path / _TOKENIZER).is_file():
        raise CheckpointError(f"{path}: holds no {_TOKENIZER}, which generation needs")
    tokenizer = tokenizers.load(path / _TOKENIZER)
    recipe = parse({"model": {"path": str(path)}, "data": {"tokenizer": str(path / _TOKENIZER)}})
    config = models.resolve(recipe.model, {})
    recipe = recipe.model_copy(update={"model": config})
    model = _decoder(models.build(config, recipe.train.seed, device), path, tokenizer)
    return model.eval(), tokenizer, recipe


def _decoder(model: nn.Module, path: Path, tokenizer: Tokenizer) -> Decoder:
    if not isinstance(model, Decoder):
        kind = type(model).__name__
        raise MegalithError(f"{path}: holds a {kind}, and only a Decoder generates text")
    known = model.head_weight.shape[0]
    if tokenizer.end >= known:
        raise MegalithError(
            f"{path}: the tokenizer's end token is {tokenizer.end}, but the model knows {known} ids"
        )
    return model
