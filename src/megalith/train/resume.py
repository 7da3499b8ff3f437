"""Whether a checkpoint and a recipe belong to the same run."""

from __future__ import annotations

from typing import Any

from megalith.core.errors import CheckpointError
from megalith.recipe import Recipe

_DECIDES = ("model", "data", "task", "train.seed", "train.global_batch", "optim.name", "train.ema")
"""Fields that decide weights, samples or the shape of the state: a run keeps them to its end."""

_FREE = (
    "data.workers",
    "data.cache",
    "model.attention",
    "model.path",
)
"""Fields below those that only decide how the same numbers are computed or stored."""


def changes(saved: dict[str, Any], recipe: Recipe) -> list[str]:
    """What differs, as ``"optim.lr: 0.001 -> 0.0005"``; run and evaluation settings do not count.

    Raises:
        CheckpointError: a field that decides the run's weights or samples differs.
    """
    old, new = _flat(saved), _flat(recipe.model_dump(mode="json"))
    found = []
    for name in sorted(old.keys() | new.keys()):
        if old.get(name) == new.get(name) or name.startswith(("run.", "checkpoint.", "evaluate.")):
            continue
        if _under(name, _DECIDES) and not _under(name, _FREE):
            raise CheckpointError(
                f"{name}: {new.get(name)!r} differs from the checkpoint's {old.get(name)!r}; "
                "resume with the same value, or start another run (run.dir=...)"
            )
        found.append(f"{name}: {old.get(name)!r} -> {new.get(name)!r}")
    return found


def _under(name: str, prefixes: tuple[str, ...]) -> bool:
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in prefixes)


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat
