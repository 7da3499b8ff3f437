"""Plan, train, shrink and ship large PyTorch models, and prove each hand-over.

```python
import megalith

recipe = megalith.load("recipes/gpt-stdlib.toml", "train.steps=200")
run = megalith.train(recipe)
```
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megalith.core.errors import MegalithError
    from megalith.generate import generate
    from megalith.layout.spread import spread
    from megalith.plan.estimate import plan
    from megalith.recipe import Recipe, load, parse
    from megalith.train.loop import Run, train
    from megalith.verify import verify

__version__ = "0.1.0"

__all__ = [
    "MegalithError",
    "Recipe",
    "Run",
    "generate",
    "load",
    "parse",
    "plan",
    "spread",
    "train",
    "verify",
]

# Torch takes seconds to import, so a name is fetched when it is first used.
_HOMES = {
    "MegalithError": "megalith.core.errors",
    "Recipe": "megalith.recipe",
    "Run": "megalith.train.loop",
    "load": "megalith.recipe",
    "parse": "megalith.recipe",
    "spread": "megalith.layout.spread",
}
# Verbs that have the name of a module, and where the function is.
_VERBS = {
    "train": "megalith.train.loop",
    "generate": "megalith.generate",
    "plan": "megalith.plan",
    "verify": "megalith.verify",
}


class _Verb(ModuleType):
    """A module that can be called: ``megalith.train(recipe)`` beside ``megalith.train.report``."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        name = self.__name__.rpartition(".")[2]
        return getattr(importlib.import_module(_VERBS[name]), name)(*args, **kwargs)


class _Megalith(ModuleType):
    """This package: whoever imports ``megalith.train`` binds it here, and it becomes a verb."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _VERBS and isinstance(value, ModuleType):
            value.__class__ = _Verb
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Megalith


def __getattr__(name: str) -> Any:
    if name in _VERBS:
        return importlib.import_module(f"megalith.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'megalith' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES, *_VERBS])
