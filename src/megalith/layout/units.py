"""The repeated parts of a model: what checkpointing, compilation and sharding work on."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase

from torch import Tensor, nn

from megalith.models.layers import Absent


class Stages(nn.ModuleList):
    """A rank's stages of a pipeline, where it has several: cut models with the whole's names."""


def models(model: nn.Module) -> list[nn.Module]:
    """The model, or the cut models of a rank that has several stages."""
    return list(model) if isinstance(model, Stages) else [model]


def named_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters by their names in the whole model, each once."""
    for part in models(model):
        yield from part.named_parameters()


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and persistent buffers by their names in the whole model, each once."""
    seen: set[int] = set()
    for part in models(model):
        for name, tensor in part.state_dict(keep_vars=True).items():
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield name, tensor


def units(model: nn.Module) -> dict[str, nn.Module]:
    """Repeated parts by name, in order; those that are here.

    A model of ours lists them as patterns in its attribute ``units``. In any other module they are
    the items of each outermost ``ModuleList``.
    """
    found: dict[str, nn.Module] = {}
    for part in models(model):
        found |= {n: m for n, m in _units(part).items() if not isinstance(m, Absent)}
    return found


def _units(model: nn.Module) -> dict[str, nn.Module]:
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
