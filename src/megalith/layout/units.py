"""The repeated parts of a model: what checkpointing, compilation and sharding work on."""

from __future__ import annotations

from fnmatch import fnmatchcase

from torch import nn


def units(model: nn.Module) -> dict[str, nn.Module]:
    """Repeated parts by name, in order.

    A model of ours lists them as patterns in its attribute ``units``. In any other module they are
    the items of each outermost ``ModuleList``.
    """
    patterns: tuple[str, ...] | None = getattr(model, "units", None)
    if patterns is not None:
        return {
            name: module
            for name, module in model.named_modules()
            if any(fnmatchcase(name, p) and name.count(".") == p.count(".") for p in patterns)
        }
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{unit}.") for unit in found)
        if isinstance(module, nn.ModuleList) and not inside:
            found |= {f"{name}.{index}".lstrip("."): item for index, item in enumerate(module)}
    return found


def norms_with_statistics(module: nn.Module) -> list[nn.Module]:
    """The parts of ``module`` that keep running statistics, such as batch norms."""
    return [part for part in module.modules() if getattr(part, "track_running_stats", False)]
