"""How a model is cut into the stages of a pipeline."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence

from torch import nn

from megalith.core.errors import RecipeError
from megalith.layout.units import units
from megalith.models.layers import Absent


def parts(model: nn.Module) -> list[str]:
    """The names of a model's parts in the order in which they run: children, and each unit."""
    inside = list(units(model))
    found: list[str] = []
    for name, _ in model.named_children():
        below = [unit for unit in inside if unit.startswith(f"{name}.")]
        found += below or [name]
    return found


def cut(
    model: nn.Module, costs: dict[str, float], stages: int, cuts: Sequence[str]
) -> list[list[str]]:
    """The parts of each stage.

    Args:
        costs: of each part, in the order in which they run.
        cuts: the first unit of each further stage; empty: so that the dearest stage is cheapest.

    Raises:
        RecipeError: there are too few units, or ``cuts`` names none.
    """
    names = list(costs)
    inside = set(units(model))
    places = [i for i, name in enumerate(names) if name in inside]
    if len(places) < stages:
        raise RecipeError(
            f"layout.pipeline: {stages} stages need as many blocks, and the model has {len(places)}"
        )
    if not cuts:
        chosen = _balance([costs[name] for name in names], places[1:], stages)
    else:
        allowed = [names[place] for place in places if place]
        unknown = [name for name in cuts if name not in allowed]
        if unknown or len(cuts) != stages - 1:
            what = f"no stage can begin with '{unknown[0]}'" if unknown else f"{len(cuts)} cuts"
            raise RecipeError(
                f"layout.cuts: {what}; {stages} stages need {stages - 1} names such as "
                f"'{names[places[1]]}'"
            )
        chosen = [names.index(name) for name in cuts]
        if chosen != sorted(set(chosen)):
            raise RecipeError("layout.cuts: the parts must be in the order of the model")
    edges = [0, *chosen, len(names)]
    return [names[a:b] for a, b in itertools.pairwise(edges)]


def _balance(costs: list[float], places: list[int], stages: int) -> list[int]:
    """Where to cut so that the dearest stage is as cheap as it can be; exact, by bisection."""
    low, high = max(costs), sum(costs)
    for _ in range(60):
        limit = (low + high) / 2
        if _greedy(costs, places, limit, stages) is None:
            low = limit
        else:
            high = limit
    found = _greedy(costs, places, high * (1 + 1e-9), stages)
    assert found is not None
    return found


def _greedy(costs: list[float], places: list[int], limit: float, stages: int) -> list[int] | None:
    """Cuts with no stage dearer than ``limit``, each stage as long as it may be, or ``None``."""
    found: list[int] = []
    begin = 0
    for stage in range(stages - 1):
        later = stages - 2 - stage  # cuts still to come after this one
        allowed = [p for p in places if p > begin][: -later or None]
        fitting = [p for p in allowed if sum(costs[begin:p]) <= limit]
        if not fitting:
            return None
        begin = fitting[-1]
        found.append(begin)
    return found if sum(costs[begin:]) <= limit else None


def part_costs(model: nn.Module) -> dict[str, float]:
    """The cost of each part: matrix elements that each token meets, and a little for the rest.

    Embeddings are looked up, not multiplied; a tied head costs its matrix where the model ends.
    """
    found: dict[str, float] = {}
    for name in parts(model):
        module = model.get_submodule(name)
        tables = {m.weight for m in module.modules() if isinstance(m, nn.Embedding)}
        matrices = sum(p.numel() for p in module.parameters() if p.ndim > 1 and p not in tables)
        found[name] = matrices + 1e-3 * sum(p.numel() for p in module.parameters())
    for name in tied(model):
        found[list(found)[-1]] += sum(p.numel() for p in model.get_submodule(name).parameters())
    return found


def tied(model: nn.Module) -> list[str]:
    """The parts of the beginning whose weight the end uses too."""
    if getattr(model, "head", None) is None and hasattr(model, "head_weight"):
        return ["embedding"]
    return []


def stage(model: nn.Module, keep: Sequence[str]) -> nn.Module:
    """A copy of ``model`` with all parts but ``keep`` left out."""
    made = copy.deepcopy(model)
    for name in parts(model):
        if name not in keep:
            made.set_submodule(name, Absent())
    return made
