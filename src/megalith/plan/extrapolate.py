"""What a rank of a deep model does, from traces of shallow ones.

Memory grows by the same bytes with every layer alike, and with every micro-batch that a stage of a
pipeline keeps; operations and traffic with every layer and micro-batch. So a few small traces tell
what a large one would. Which moment is the peak may change with depth: each one that a trace knows
(phase, module, operator) is followed by itself, and the highest counts. It is believed only if one
more trace lies where the others say; else the rank is traced in full.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from megalith import models
from megalith.layout import stages
from megalith.plan.worker import Asked, Pool, Seen, refused
from megalith.recipe import Recipe
from megalith.recipe.families import DecoderConfig
from megalith.recipe.schema import LayoutSection

_TOTAL = re.compile("total/").match
_OFF = 2e-3
"""How far the confirming trace may lie from where the others say."""


@dataclass(frozen=True)
class Part:
    """Ranks of a pipeline that do the same: one of them is looked at.

    Attributes:
        stage: place in the pipeline of the first of them.
        ranks: how many places are like it.
        layers: of the model, on it.
    """

    stage: int
    ranks: int
    layers: int


@dataclass(frozen=True)
class Point:
    """A small trace: layers, micro-batches in flight, and micro-batches of the update."""

    layers: int
    kept: int
    micros: int


@dataclass(frozen=True)
class Look:
    """What is known of a part: by how many traces, of how many layers; empty: traced in full."""

    part: Part
    seen: Seen
    points: tuple[Point, ...] = ()


def micros(recipe: Recipe) -> int:
    """Micro-batches of a rank in an update."""
    train = recipe.train
    return train.global_batch // (train.micro_batch * recipe.layout.data_ranks)


def parts(recipe: Recipe, config: models.ModelConfig, *, ends_only: bool = False) -> list[Part]:
    """The distinct ranks: of a pipeline the first, the last, and of those between one of each kind.

    Args:
        config: resolved.
        ends_only: leave out those between, which need no more than the first.
    """
    layout = recipe.layout
    layers = getattr(config, "layers", 0)
    if layout.pipeline == 1:
        return [Part(0, 1, layers)]
    count = _blocks(config, layout)
    if layout.schedule == "interleaved":
        return [Part(place, 1, 0) for place in range(layout.pipeline)]
    found = [Part(0, 1, count[0])]
    between = count[1:-1]
    for size in dict.fromkeys(between):
        if not ends_only or size > count[0]:
            found.append(Part(1 + between.index(size), between.count(size), size))
    return [*found, Part(layout.pipeline - 1, 1, count[-1])]


def look(
    pool: Pool,
    asked: Asked,
    chosen: Sequence[Part],
    *,
    full: bool,
    say: Callable[[str], None],
    confirm: bool = True,
) -> list[Look]:
    """Each part's update, traced in small or in full.

    Args:
        asked: the whole recipe, resolved, as rank 0.
        confirm: make the trace that confirms the others.

    Raises:
        PlanError: a trace failed.
    """
    grids = [[] if full else _grid(asked.recipe, part, confirm) for part in chosen]
    if any(not grid for grid in grids):
        say("tracing in full")
    jobs = [
        [_small(asked, part, point) for point in grid] or [_whole(asked, part)]
        for part, grid in zip(chosen, grids, strict=True)
    ]
    found = refused(pool.see(job for row in jobs for job in row))
    looks: list[Look] = []
    for part, grid in zip(chosen, grids, strict=True):
        mine, found = found[: max(1, len(grid))], found[max(1, len(grid)) :]
        if not grid:
            looks.append(Look(part, mine[0]))
            continue
        seen = extend(grid, mine, _goal(asked.recipe, part))
        if seen is None:
            say(f"stage {part.stage}: its peak moves with depth, tracing it in full")
            looks.append(Look(part, pool.one(_whole(asked, part))))
        else:
            looks.append(Look(part, seen, tuple(grid)))
    return looks


def extend(points: Sequence[Point], seen: Sequence[Seen], goal: Point) -> Seen | None:
    """What a trace at ``goal`` would have seen; ``None`` if the last point belies the others.

    Points with fewer micro-batches than it takes to fill memory count for work only. The curve
    and the largest tensors stay those of the deepest trace.
    """
    pairs = zip(points, seen, strict=True)
    held = [(p, s) for p, s in pairs if p.micros >= min(goal.micros, p.kept + 1)]
    known = set.intersection(*(set(s.candidates) for _, s in held))
    if not known:
        return None
    at = np.array([(p.layers, p.kept) for p, _ in held], float)
    memory = _fitted(at, [_memory(s, known) for _, s in held], (goal.layers, goal.kept))
    at = np.array([(p.layers, p.micros) for p in points], float)
    work = _fitted(at, [_work(s) for s in seen], (goal.layers, goal.micros))
    if memory is None or work is None:
        return None
    deepest = held[-1][1]
    highest = max(known, key=lambda name: memory[f"total/{name}"])
    phase, module, operator, _ = highest.split("|")
    read = _named(memory, "memory") | {"allocated": memory[f"total/{highest}"]}
    return replace(
        deepest,
        memory=_with_reserved(read, deepest.memory),
        kinds=dict.fromkeys(deepest.kinds, 0.0) | _named(memory, f"kinds/{highest}"),
        moment={"phase": phase, "module": module, "operator": operator},
        most=_named(memory, "most"),
        computed=_triples(work, "computed", 3),
        sent=_triples(work, "sent", 2),
        parameters=work["parameters"],
        operators=work["operators"],
    )


def _fitted(
    at: np.ndarray, rows: Sequence[dict[str, float]], goal: tuple[int, int]
) -> dict[str, float] | None:
    """Values at ``goal``, bilinear in the coordinates that vary, or ``None``."""
    names = sorted(set().union(*rows))
    values = np.array([[row.get(name, 0.0) for name in names] for row in rows])

    def basis(points: np.ndarray) -> np.ndarray:
        columns = [np.ones(len(points))]
        varies = [len(set(at[:, n])) > 1 for n in (0, 1)]
        columns += [points[:, n] for n in (0, 1) if varies[n]]
        if all(varies):
            columns.append(points[:, 0] * points[:, 1])
        return np.stack(columns, 1)

    wanted = basis(at)
    if len(wanted) <= wanted.shape[1]:
        wanted_goal = np.linalg.lstsq(wanted, values, rcond=None)[0]
    else:
        # The last point is not used, but must lie where the others say.
        wanted_goal = np.linalg.lstsq(wanted[:-1], values[:-1], rcond=None)[0]
        said = wanted[-1:] @ wanted_goal
        scale = np.abs(values[-1]).max()
        top = max((v for n, v in zip(names, values[-1], strict=True) if _TOTAL(n)), default=0.0)
        for name, a, b in zip(names, said[0], values[-1], strict=True):
            # Of the moments, those that come near the peak.
            near = _TOTAL(name) and b >= 0.9 * top
            checked = near or name.startswith(("computed/", "sent/"))
            if checked and abs(a - b) > _OFF * max(abs(b), 1e-3 * scale):
                return None
    found = (basis(np.array([goal], float)) @ wanted_goal)[0]
    return {name: float(value) for name, value in zip(names, found, strict=True)}


def _with_reserved(memory: dict[str, float], deepest: dict[str, float]) -> dict[str, float]:
    """Reserved memory lies above allocated memory by what fragments: hardly more with more layers.

    It is not linear itself, since segments and best fits jump: the gap of the deepest trace is
    within 7 per cent of a full trace's total where that was tried.
    """
    for name in ("reserved", "reserved_expandable"):
        memory[name] = memory["allocated"] + deepest[name] - deepest["allocated"]
    return memory


def _memory(seen: Seen, moments: Collection[str]) -> dict[str, float]:
    found = {f"memory/{name}": value for name, value in seen.memory.items()}
    for moment in moments:
        kinds = seen.candidates[moment]
        found[f"total/{moment}"] = sum(kinds.values())
        found |= {f"kinds/{moment}/{name}": value for name, value in kinds.items()}
    found |= {f"most/{name}": value for name, value in seen.most.items()}
    return found


def _work(seen: Seen) -> dict[str, float]:
    found: dict[str, float] = {"parameters": seen.parameters, "operators": seen.operators}
    for kind in ("computed", "sent"):
        for name, values in getattr(seen, kind).items():
            found |= {f"{kind}/{name}|{n}": float(value) for n, value in enumerate(values)}
    return found


def _named(values: dict[str, float], kind: str) -> dict[str, float]:
    begin = f"{kind}/"
    return {
        name.removeprefix(begin): max(0.0, value)
        for name, value in values.items()
        if name.startswith(begin)
    }


def _triples(values: dict[str, float], kind: str, size: int) -> dict[str, list[float]]:
    flat = _named(values, kind)
    names = sorted({name.rpartition("|")[0] for name in flat})
    return {name: [flat[f"{name}|{n}"] for n in range(size)] for name in names}


def _blocks(config: Any, layout: LayoutSection) -> list[int]:
    """Repeated parts on each stage, as the step cuts them."""
    each = layout.stages if layout.schedule == "interleaved" else 1
    model = models.build(config, 0, "meta", filled=False)
    kept = stages.cut(model, stages.part_costs(model), layout.pipeline * each, layout.cuts)
    return [sum(name.startswith("blocks.") for name in names) for names in kept]


def _kept(layout: LayoutSection, stage: int, updates: int) -> int:
    """Micro-batches whose activations a stage keeps at once."""
    if layout.pipeline == 1:
        return 1
    return updates if layout.schedule == "gpipe" else min(layout.pipeline - stage, updates)


def _goal(recipe: Recipe, part: Part) -> Point:
    many = micros(recipe)
    return Point(part.layers, _kept(recipe.layout, part.stage, many), many)


def _grid(recipe: Recipe, part: Part, confirm: bool) -> list[Point]:
    """The small traces of a part, the confirming one last; empty: only a full one will do."""
    config, layout, goal = recipe.model, recipe.layout, _goal(recipe, part)
    if not isinstance(config, DecoderConfig):
        return []
    if layout.pipeline > 1 and (layout.schedule == "interleaved" or layout.cuts):
        return []
    if config.window is not None and 0 < config.window_from < config.layers:
        return []  # layers of two kinds
    if config.experts and config.dense_layers and layout.pipeline > 1:
        return []
    # A first, a last and one between; and ZeRO-3 holds whole weights of three at once.
    first = config.dense_layers + 3
    deep = part.layers > first + 3
    depths = [first, first + 1, first + 2][: 3 if confirm else 2] if deep else [part.layers]
    pipeline = layout.pipeline > 1
    if not pipeline:
        update = min(2, goal.micros)
        grid = [Point(n, 1, update) for n in depths]
        if goal.micros > 2:
            grid = [Point(n, 1, 1) for n in depths[:2]] + grid
        return grid if len(grid) > 1 else []
    few = goal.kept > 4
    keeps = [2, 3, 4] if few else [goal.kept]

    def point(layers: int, kept: int, more: int = 0) -> Point:
        spare = 0 if layout.schedule == "gpipe" else 1
        return Point(layers, kept, min(goal.micros, max(3, kept + spare) + more))

    grid = [point(n, k) for k in keeps[:2] for n in depths[:2]]
    if not few and point(depths[0], keeps[0]).micros < goal.micros:
        grid = [point(n, keeps[0], 1) for n in depths[:2]] + grid
    if confirm and (few or deep):
        grid.append(point(depths[-1], keeps[-1]))
    whole = goal.layers * goal.micros
    return grid if sum(p.layers * p.micros for p in grid) < 0.7 * whole else []


def _small(asked: Asked, part: Part, point: Point) -> Asked:
    """The trace of a model with few layers, in a pipeline with few stages."""
    recipe, layout = asked.recipe, asked.recipe.layout
    train = recipe.train.model_copy(
        update={"global_batch": point.micros * recipe.train.micro_batch * layout.data_ranks}
    )
    first, last = part.stage == 0, part.stage == layout.pipeline - 1
    if layout.pipeline == 1:
        sizes, place = [point.layers], 0
    elif layout.schedule == "gpipe":
        sizes = [point.layers, 1] if first else [1, point.layers] if last else [1, point.layers, 1]
        place = 0 if first else 1
    else:
        before = [] if first else [1]
        sizes = [*before, point.layers, *[1] * (point.kept - 1)]
        if first and len(sizes) == 1:
            sizes.append(1)  # a pipeline of one stage would be none
        place = len(before)
    edges = np.cumsum(sizes)[:-1]
    columns = layout.ranks // layout.pipeline
    changed = layout.model_copy(
        update={"pipeline": len(sizes), "cuts": [f"blocks.{edge}" for edge in edges]}
    )
    model = recipe.model.model_copy(update={"layers": sum(sizes)})
    smaller = recipe.model_copy(update={"model": model, "train": train, "layout": changed})
    return replace(asked, recipe=smaller, rank=place * columns)


def _whole(asked: Asked, part: Part) -> Asked:
    layout = asked.recipe.layout
    return replace(asked, rank=part.stage * (layout.ranks // layout.pipeline))
