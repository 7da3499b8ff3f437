"""What would make a recipe fit, and what it costs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from megalith.core.errors import MegalithError
from megalith.plan import closed
from megalith.plan.machine import Machine
from megalith.recipe import Recipe, parse
from megalith.recipe.families import DecoderConfig

_TRIED = 4
"""Changes that are traced at most."""

Fields = dict[str, Any]


@dataclass(frozen=True)
class Traced:
    """What a trace says of a recipe: bytes on the fullest rank, whether they fit, and seconds."""

    needed: int
    fits: bool
    seconds: float


@dataclass(frozen=True)
class Change:
    """A change that makes the recipe fit.

    Attributes:
        overrides: what to add to the command.
        needed: bytes on the fullest rank.
        slower: the step's time as a multiple of the recipe's own.
    """

    overrides: list[str]
    needed: int
    slower: float


def changes(
    recipe: Recipe,
    own: Traced,
    machine: Machine,
    judge: Callable[[Recipe], Traced],
    say: Callable[[str], None],
) -> list[Change]:
    """Changes of one or two fields after which ``recipe`` fits, the cheapest first.

    Formulas choose what is worth a trace; only traces are reported.

    Args:
        own: of the recipe as it is.
        judge: traces another recipe.
    """
    found: list[Change] = []
    for fields, other in _worth_a_trace(recipe, own, machine)[:_TRIED]:
        words = overrides(fields)
        say(f"trying {' '.join(words)}")
        try:
            traced = judge(other)
        except MegalithError:
            continue  # refused or not traced: no change to propose
        if traced.fits:
            found.append(Change(words, traced.needed, traced.seconds / own.seconds))
        if len(found) == 2:
            break
    return sorted(found, key=lambda change: change.slower)


def overrides(fields: Fields) -> list[str]:
    """Fields as they are written on the command line."""
    return [f"{name}={str(v).lower() if v is True else v}" for name, v in fields.items()]


def changed(recipe: Recipe, fields: Fields) -> Recipe:
    """``recipe`` with some fields changed, by their paths, and checked anew.

    Raises:
        RecipeError: the outcome is refused.
    """
    values = recipe.model_dump(exclude_unset=True)
    for path, value in fields.items():
        section, _, name = path.partition(".")
        values.setdefault(section, {})[name] = value
    return parse(values)


def _worth_a_trace(recipe: Recipe, own: Traced, machine: Machine) -> list[tuple[Fields, Recipe]]:
    options = list(_valid(recipe))
    if not isinstance(recipe.model, DecoderConfig):
        return options
    # The formula is off by some share; the traced recipe says by how much, here.
    scale = own.needed / closed.rough(recipe, machine).memory
    rated = [(closed.rough(other, machine), fields, other) for fields, other in options]
    hopeful = [row for row in rated if row[0].memory * scale <= 1.1 * machine.device.memory]
    hopeful.sort(key=lambda row: row[0].seconds)
    return [(fields, other) for _, fields, other in hopeful]


def _valid(recipe: Recipe) -> Iterator[tuple[Fields, Recipe]]:
    for fields in _options(recipe):
        try:
            yield fields, changed(recipe, fields)
        except MegalithError:
            continue  # the recipe's own rules refuse it


def _options(recipe: Recipe) -> Iterator[Fields]:
    """One field at a time, then two."""
    train, layout = recipe.train, recipe.layout
    sizes = [n for n in range(train.micro_batch // 2, 0, -1) if train.micro_batch % n == 0]
    smaller: list[Fields] = [{"train.micro_batch": size} for size in sizes]
    ways = ["none", "selective", "full"]
    ways = ways[ways.index(train.checkpointing) + 1 :]
    again: list[Fields] = [{"train.checkpointing": way} for way in ways]
    spread = list(_layouts(recipe))
    yield from (*smaller, *again, *spread)
    for first in again:
        yield from ({**first, **second} for second in (*smaller, *spread))
    if layout.shard > 1 and not layout.offload:
        yield {"layout.offload": True}


def _layouts(recipe: Recipe) -> Iterator[Fields]:
    """The same number of ranks, with more of them sharing a copy."""
    layout = recipe.layout
    # One micro-batch stays what it is where fewer ranks have samples of their own.
    kept = {"train.micro_batch": recipe.train.micro_batch}
    if layout.shard > 1:
        yield from ({"layout.zero": stage} for stage in range(layout.zero + 1, 4))
    if layout.replicate > 1:
        yield {"layout.replicate": 1, "layout.shard": layout.shard * layout.replicate}
    for axis in ("tensor", "pipeline"):
        for source in ("replicate", "shard"):
            have = getattr(layout, source)
            for times in (2, 4, 8):
                if have > 1 and have % times == 0:
                    more = getattr(layout, axis) * times
                    yield {f"layout.{axis}": more, f"layout.{source}": have // times, **kept}
