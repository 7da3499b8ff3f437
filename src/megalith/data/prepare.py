"""From the recipe's ``[data]`` to splits, whatever their kind."""

from __future__ import annotations

from pathlib import Path

from megalith.core import imports
from megalith.core.errors import RecipeError
from megalith.data import Splits
from megalith.data.corpus import Progress
from megalith.data.text import check_text, prepare_text
from megalith.recipe.schema import FactoryData, ImageData, TextData

DataConfig = TextData | ImageData | FactoryData


def check_sources(section: DataConfig) -> None:
    """Whether what ``section`` names is there; cheap, so that a wrong recipe fails at once.

    Raises:
        RecipeError: with the field's path.
    """
    if isinstance(section, TextData):
        check_text(section)
    elif isinstance(section, ImageData):
        if section.folder is not None and not Path(section.folder).expanduser().is_dir():
            raise RecipeError(f"data.folder: '{section.folder}' is not a folder")
    else:
        imports.resolve(section.factory, "data.factory")


def prepare(section: DataConfig, seed: int, progress: Progress | None = None) -> Splits:
    """The data of a run, made ready and opened.

    Args:
        section: the recipe's ``[data]``.
        seed: of the run. The kinds that Megalith ships split by content and ignore it, so
            runs with other seeds see the same validation data; a factory that takes a ``seed``
            among its ``args`` has its own.
        progress: told of long work as (what, done, total); 0 of 0 is a message.

    Raises:
        RecipeError: ``section`` names what does not exist, or is not what it should be.
        DataError: a source is damaged or unreadable.
    """
    if isinstance(section, TextData):
        return prepare_text(section, progress)
    if isinstance(section, ImageData):
        from megalith.data.images import load_images

        return load_images(section)
    found = imports.resolve(section.factory, "data.factory")(**section.args)
    if not isinstance(found, Splits):
        raise RecipeError(
            f"data.factory: '{section.factory}' returned {type(found).__name__}, "
            "not megalith.data.Splits"
        )
    return found
