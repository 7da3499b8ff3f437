"""What a plan needs of the data, without any of it: vocabulary, classes, and a sample's shapes."""

from __future__ import annotations

from pathlib import Path

from megalith.core.errors import RecipeError
from megalith.data import tokenizers
from megalith.data.prepare import prepare
from megalith.recipe import Recipe
from megalith.recipe.schema import FactoryData, ImageData, TextData

Shapes = dict[str, tuple[tuple[int, ...], str]]

_PIXELS = {"digits": 8, "fashion-mnist": 28}


def facts_and_sample(recipe: Recipe) -> tuple[dict[str, int], Shapes]:
    """``Splits.facts``, and shape and dtype of each tensor of a sample, by name.

    No corpus is read: a text's vocabulary follows from the tokenizer's name, or from its file where
    that exists. Data of a factory is made, and one sample looked at.

    Raises:
        RecipeError: the vocabulary depends on a file that is not here.
    """
    section = recipe.data
    if isinstance(section, TextData):
        return _facts_of_text(recipe, section), _text(section)
    if isinstance(section, ImageData) and section.source in _PIXELS:
        size = _PIXELS[section.source]
        shapes: Shapes = {"image": ((1, size, size), "float32"), "target": ((), "int64")}
        return {"classes": 10, "channels": 1}, {**shapes, "sample": ((), "int64")}
    return _looked_at(recipe, section)


def _text(section: TextData) -> Shapes:
    names = ["tokens", "targets"]
    if not section.cross_document_attention:
        names += ["documents", "positions"]
    shapes: Shapes = dict.fromkeys(names, ((section.sequence,), "int64"))
    return {**shapes, "bytes": ((), "int64"), "sample": ((), "int64")}


def _facts_of_text(recipe: Recipe, section: TextData) -> dict[str, int]:
    name = section.tokenizer
    if name == "bytes":
        return {"vocab": tokenizers.ByteTokenizer.vocab}
    size = tokenizers.bpe_size(name)
    if size is not None:
        return {"vocab": size}
    if Path(name).expanduser().is_file():
        return {"vocab": tokenizers.load(Path(name).expanduser(), name).vocab}
    model = recipe.model
    if getattr(model, "vocab", None) is None and getattr(model, "path", None) is None:
        raise RecipeError(
            f"model.vocab: is that of data.tokenizer '{name}', which is not here; say it, such as "
            "model.vocab=32000"
        )
    return {}


def _looked_at(recipe: Recipe, section: ImageData | FactoryData) -> tuple[dict[str, int], Shapes]:
    splits = prepare(section, recipe.train.seed)
    shapes: Shapes = {
        name: (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        for name, tensor in splits.train[0].items()
    }
    return dict(splits.facts), {**shapes, "sample": ((), "int64")}
