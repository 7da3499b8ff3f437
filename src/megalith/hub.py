"""A trained model leaves Megalith: its weights in the layout that other libraries read."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from megalith.core import devices
from megalith.core.errors import MegalithError
from megalith.core.runs import existing_run
from megalith.data import tokenizers
from megalith.generate.load import load_run
from megalith.models import decoder, resnet
from megalith.recipe.families import DecoderConfig, ResNetConfig


def export(run: Path, folder: Path, step: int | None = None) -> list[Path]:
    """Write the model of a run into ``folder`` and return the files.

    A decoder is written in Hugging Face's layout (``config.json``, weights, ``tokenizer.json``), so
    that ``transformers`` loads it; a ResNet as safetensors with torchvision's names; a module
    of the user's own by its ``save_pretrained``, if it has one.

    Args:
        step: of the checkpoint; left out: the best, as for generation.

    Raises:
        MegalithError: there is no such run or checkpoint, or no layout for such a model.
    """
    source = existing_run(run)
    module, recipe = load_run(source, step, devices.pick("cpu"))
    config = recipe.model
    folder.mkdir(parents=True, exist_ok=True)
    untyped: Any = module
    if isinstance(config, DecoderConfig):
        extra = {}
        if source.tokenizer.is_file():
            extra = {"eos_token_id": tokenizers.load(source.tokenizer).end}
        decoder.save_pretrained(untyped, config, folder, extra=extra)
    elif isinstance(config, ResNetConfig):
        resnet.save_pretrained(untyped, folder)
    elif hasattr(module, "save_pretrained"):
        untyped.save_pretrained(folder)
    else:
        raise MegalithError(
            f"export: {type(module).__name__} has no save_pretrained; its weights are plain "
            f"safetensors in {source.checkpoints}"
        )
    if source.tokenizer.is_file():
        shutil.copyfile(source.tokenizer, folder / source.tokenizer.name)
    return sorted(path for path in folder.iterdir() if path.is_file())
