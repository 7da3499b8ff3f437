"""torch.compile, unit by unit: all blocks of a model share one compiled graph."""

from __future__ import annotations

import torch
from torch import nn


def apply(units: dict[str, nn.Module]) -> None:
    """Compile each unit in place; a second shape makes the sizes dynamic, once."""
    for unit in units.values():
        unit.compile()


def graphs_compiled() -> int:
    """How many graphs torch.compile has built in this process so far."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])
