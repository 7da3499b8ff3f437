"""Every layout of a number of ranks that a recipe allows."""

from __future__ import annotations

from collections.abc import Iterator

from megalith import models, tasks
from megalith.core.errors import RecipeError
from megalith.layout import check
from megalith.layout.mesh import AXES
from megalith.recipe import Recipe
from megalith.recipe.families import FactoryModel
from megalith.recipe.schema import LayoutSection

_VARIANTS = (
    {"shard": 2, "zero": 1},
    {"shard": 2, "zero": 2},
    {"shard": 3, "zero": 1},
    {"replicate": 2, "engine": "ddp"},
    {"tensor": 2, "sequence_parallel": False},
    {"context": 2, "exchange": "all-to-all"},
    {"context": 4, "exchange": "all-to-all"},
    {"context": 2, "tensor": 2, "exchange": "all-to-all"},
    {"pipeline": 2, "schedule": "gpipe"},
    {"pipeline": 2, "schedule": "interleaved"},
    {"pipeline": 4, "schedule": "gpipe"},
    {"pipeline": 2, "shard": 2, "schedule": "interleaved"},
    {"pipeline": 2, "shard": 2, "zero": 1},
    {"pipeline": 2, "shard": 2, "zero": 2},
    {"replicate": 2, "synchronised_norms": True},
)
"""Ways to do the same thing, each tried once where it can matter."""


def every(recipe: Recipe, ranks: int) -> list[LayoutSection]:
    """All layouts of 2 to ``ranks`` ranks that ``recipe`` allows, the smallest first."""
    base = recipe.layout.model_dump(exclude={*AXES, "cuts"})
    found: dict[str, LayoutSection] = {}
    for count in range(2, ranks + 1):
        for sizes in _factors(count, len(AXES)):
            layout = LayoutSection(**{**base, **dict(zip(AXES, sizes, strict=True))})
            found.setdefault(label(layout), layout)
    for variant in _VARIANTS:
        layout = LayoutSection(**{**base, **variant})
        if layout.ranks <= ranks:
            found.setdefault(label(layout), layout)
    return sorted((one for one in found.values() if allows(recipe, one)), key=lambda one: one.ranks)


def allows(recipe: Recipe, layout: LayoutSection) -> bool:
    """Whether the layout is not refused for this recipe."""
    if "synchronised_norms" in layout.model_fields_set and layout.synchronised_norms:
        family = getattr(recipe.model, "family", "")
        if family == "decoder":
            return False  # it has no norms with statistics
    try:
        refuse(recipe.model_copy(update={"layout": layout}))
    except RecipeError:
        return False
    return True


def refuse(recipe: Recipe) -> None:
    """Say before any rank starts why the recipe's layout is not possible, as training does.

    Raises:
        RecipeError: one line.
    """
    facts = {"vocab": 97, "channels": 3, "classes": 10}  # of no importance here
    check.check(recipe, models.resolve(recipe.model, facts), tasks.build(recipe.task))
    if recipe.layout.tensor > 1 and isinstance(recipe.model, FactoryModel):
        module = models.build(recipe.model, 0)
        if not recipe.layout.split and not hasattr(module, "split"):
            raise RecipeError(
                "layout.split: is needed to divide a module of yours over layout.tensor, such as "
                '{"blocks.*.up" = "column", "blocks.*.down" = "row"}'
            )


def label(layout: LayoutSection) -> str:
    """The layout in a few words: ``shard 2 (zero 3) x tensor 2``."""
    words = []
    for axis in AXES:
        size = getattr(layout, axis)
        if size == 1:
            continue
        detail = {
            "shard": f"zero {layout.zero}",
            "pipeline": layout.schedule,
            "context": layout.exchange if layout.exchange != "gather" else "",
            "tensor": "" if layout.sequence_parallel or layout.split else "no sequence",
            "replicate": "ddp" if layout.engine == "ddp" else "",
        }.get(axis, "")
        words.append(f"{axis} {size}" + (f" ({detail})" if detail else ""))
    if layout.synchronised_norms:
        words.append("synchronised norms")
    return " x ".join(words) or "one process"


def spread_axes(layout: LayoutSection) -> tuple[str, ...]:
    """The axes with more than one rank."""
    return tuple(axis for axis in AXES if getattr(layout, axis) > 1)


def parts(layout: LayoutSection) -> list[LayoutSection]:
    """The layout with some of its axes only, the fewest first; what brings a fault in is there."""
    spread = list(spread_axes(layout))
    found = []
    for kept in sorted(_subsets(spread), key=len):
        if 0 < len(kept) < len(spread):
            rest = {axis: 1 for axis in spread if axis not in kept}
            found.append(layout.model_copy(update={**rest, "cuts": []}))
    return found


def _subsets(axes: list[str]) -> Iterator[list[str]]:
    if not axes:
        yield []
        return
    for rest in _subsets(axes[1:]):
        yield rest
        yield [axes[0], *rest]


def _factors(product: int, count: int) -> Iterator[tuple[int, ...]]:
    """All ways to write ``product`` as ``count`` factors in order."""
    if count == 1:
        yield (product,)
        return
    for first in range(1, product + 1):
        if product % first == 0:
            for rest in _factors(product // first, count - 1):
                yield (first, *rest)
