"""Learning-rate schedules: pure functions of the update, so there is no state to save."""

from __future__ import annotations

import math
from collections.abc import Callable

from megalith.core import imports
from megalith.recipe.schema import OptimSection

Schedule = Callable[[int], float]
"""From an update, counted from 0, to the factor on each group's learning rate."""


def build(section: OptimSection, steps: int) -> Schedule:
    """The recipe's schedule over ``steps`` updates, warmup in front.

    During warmup the factor of update ``u`` is ``(u + 1) / warmup``. After it, with ``p`` from 0 at
    the first update to 1 at the last: linear ``1 - (1 - final) p``; cosine
    ``final + (1 - final)(1 + cos pi p) / 2`` (Loshchilov and Hutter 2016, equation 5); wsd stays
    at 1 and falls linearly over the last ``decay`` share (Hu et al. 2024, section 4).
    """
    if imports.is_reference(section.schedule):
        yours = imports.resolve(section.schedule, "optim.schedule")
        return lambda update: float(yours(update, steps))
    warmup, final = section.warmup, section.final
    span = max(steps - 1 - warmup, 1)

    def factor(update: int) -> float:
        if update < warmup:
            return (update + 1) / warmup
        progress = min((update - warmup) / span, 1.0)
        if section.schedule == "linear":
            return 1 - (1 - final) * progress
        if section.schedule == "cosine":
            return final + (1 - final) * (1 + math.cos(math.pi * progress)) / 2
        if section.schedule == "wsd":
            fallen = max(0.0, progress - (1 - section.decay)) / section.decay
            return 1 - (1 - final) * fallen
        return 1.0

    return factor
