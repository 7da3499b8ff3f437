"""Names that a user writes in a recipe as ``"package.module:name"``."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from megalith.core.errors import MissingExtra, RecipeError, nearest


def is_reference(text: str) -> bool:
    """Whether ``text`` has the form ``package.module:name``."""
    module, _, name = text.partition(":")
    return bool(name) and all(
        part.isidentifier() for part in [*module.split("."), *name.split(".")]
    )


def resolve(reference: str, field: str) -> Any:
    """The object that ``reference`` names; the working folder is searched too.

    Raises:
        RecipeError: ``field`` names no such module or object.
    """
    if not is_reference(reference):
        raise RecipeError(f"{field}: '{reference}' is not of the form 'package.module:name'")
    module_name, _, name = reference.partition(":")
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as error:  # the user's module runs code of its own, which may fail at will
        if isinstance(error, ModuleNotFoundError) and error.name:
            raise RecipeError(
                f"{field}: cannot import '{module_name}' "
                f"(no module '{error.name}' here or installed)"
            ) from error
        why = " ".join(f"{type(error).__name__}: {error}".split())
        raise RecipeError(f"{field}: importing '{module_name}' failed ({why})") from error
    finally:
        sys.path.remove(here)
    for part in name.split("."):
        if not hasattr(found, part):
            hint = nearest(part, [n for n in vars(found) if not n.startswith("_")])
            raise RecipeError(f"{field}: '{module_name}' has no '{name}'{hint}")
        found = getattr(found, part)
    return found


def optional(module: str, extra: str, purpose: str) -> Any:
    """Import ``module``, which the extra ``megalith[extra]`` installs.

    Raises:
        MissingExtra: it is not installed; ``purpose`` says what needed it.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        raise MissingExtra(
            f"{purpose} needs '{package}': pip install 'megalith[{extra}]'"
        ) from error
