"""Which layout is best: formulas choose a few of all that a recipe allows, traces judge those.

Also the largest model of the family that trains on a machine, and tables over one field's values.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

from megalith import tasks
from megalith.core.errors import MegalithError, PlanError
from megalith.layout import check
from megalith.layout.mesh import AXES
from megalith.plan import advice, closed, constants, estimate, flops
from megalith.plan.closed import Rough
from megalith.plan.estimate import Plan, Say
from megalith.plan.machine import Machine
from megalith.plan.worker import Pool
from megalith.recipe import Recipe
from megalith.recipe.families import DecoderConfig

Goal = Literal["time", "money", "energy"]

_MARGIN = 1.1
"""How much more memory than there is a formula may ask for and still be worth a trace."""


@dataclass(frozen=True)
class Candidate:
    """A layout that the recipe allows.

    Attributes:
        fields: what it changes, by path.
        rough: by formula, scaled to what traces said of others.
        plan: from a trace, of the few best.
    """

    fields: dict[str, Any]
    rough: Rough
    plan: Plan | None = None

    @property
    def seconds(self) -> float:
        """Of an update, as well as it is known."""
        return self.plan.time.seconds if self.plan is not None else self.rough.seconds


@dataclass(frozen=True)
class Found:
    """What a search found.

    Attributes:
        best: traced, and it fits; ``None``: nothing does.
        ranked: traced ones that fit first, then by formula.
        considered: layouts that the recipe allows on the machine.
    """

    goal: Goal
    best: Candidate | None
    ranked: list[Candidate]
    considered: int


def search(
    recipe: Recipe,
    on: str | Machine,
    goal: Goal = "time",
    *,
    traced: int = 3,
    pool: Pool | None = None,
    say: Say | None = None,
) -> Found:
    """Rank layouts on the whole machine, with micro-batch and checkpointing.

    On one machine time, money and energy rank alike, since all its devices are paid for; they
    differ in that ``money`` and ``energy`` also consider parts of it.

    Args:
        traced: how many are traced at least, from the best by formula; more while none fits.

    Raises:
        PlanError: the model is no decoder, or no layout is allowed.
    """
    pool, say = pool or Pool(), say or _silent
    machine, _ = constants.machine(on, recipe.train)
    asked = estimate.question(advice.changed(recipe, _alone(recipe)), machine)
    recipe = asked.recipe
    if not isinstance(recipe.model, DecoderConfig):
        raise PlanError("model.family: --search knows decoders; --sweep tabulates any field")
    counts = [machine.count] if goal == "time" else _parts_of(machine.count)
    rated = sorted(
        (
            Candidate(fields, rough)
            for count in counts
            for fields, rough in _rated(recipe, machine.part(count))
        ),
        key=lambda one: _score(one, machine, goal),
    )
    if not rated:
        raise PlanError(f"layout: nothing that the recipe allows takes {machine.count} devices")
    say(f"{len(rated)} layouts rated by formula")
    hopeful = [c for c in rated if c.rough.memory <= _MARGIN * machine.device.memory]
    # Where nothing seems to fit, what comes closest is tried.
    hopeful = hopeful or sorted(rated, key=lambda one: one.rough.memory)
    judged = _judged(recipe, machine, hopeful, traced, pool, say)
    fitting = [one for one in judged if one.plan is not None and one.plan.fits]
    fitting = _confirmed(recipe, machine, fitting, goal, pool, say)
    others = [one for one in judged if one.fields not in [best.fields for best in fitting]]
    seen = [one.fields for one in judged]
    rest = [one for one in hopeful if one.fields not in seen]
    return Found(goal, fitting[0] if fitting else None, [*fitting, *others, *rest], len(rated))


def sweep(
    make: Callable[[str], Recipe],
    values: Sequence[str],
    on: str | Machine,
    *,
    pool: Pool | None = None,
    say: Say | None = None,
) -> list[tuple[str, Plan | MegalithError]]:
    """A plan for the recipe that ``make`` makes of each value; an error where it is refused."""
    pool, say = pool or Pool(), say or _silent
    found: list[tuple[str, Plan | MegalithError]] = []
    for value in values:
        say(value)
        try:
            found.append((value, estimate.plan(make(value), on, advise=False, pool=pool, say=say)))
        except MegalithError as error:
            found.append((value, error))
    return found


def largest(
    recipe: Recipe, on: str | Machine, *, pool: Pool | None = None, say: Say | None = None
) -> tuple[DecoderConfig, Found]:
    """The largest model of the recipe's family that trains on a machine, and how.

    Width grows by whole heads and layers with it, in the proportions of the recipe's model.

    Raises:
        PlanError: the model is no decoder, or not even a narrow one fits.
    """
    pool, say = pool or Pool(), say or _silent
    machine, _ = constants.machine(on, recipe.train)
    asked = estimate.question(advice.changed(recipe, _alone(recipe)), machine)
    config = asked.recipe.model
    if not isinstance(config, DecoderConfig):
        raise PlanError("model.family: --max-params knows decoders")

    def least(heads: int) -> float:
        bigger = asked.recipe.model_copy(update={"model": scaled(config, heads)})
        return min((r.memory for _, r in _rated(bigger, machine, quick=True)), default=float("inf"))

    step = max(1, config.heads // config.kv_heads) * min(8, machine.count)
    low, high = 0, 1
    while least(high * step) <= machine.device.memory:
        low, high = high, 2 * high
        if high * step * config.head_dim > 1 << 17:
            break
    while high - low > max(1, low // 16):
        middle = (low + high) // 2
        fits = least(middle * step) <= machine.device.memory
        low, high = (middle, high) if fits else (low, middle)
    while low:
        model = scaled(config, low * step)
        say(f"{flops.parameters(model) / 1e9:.1f}B parameters")
        other = advice.changed(recipe, {**_alone(recipe), **_of(model)})
        found = search(other, machine, traced=2, pool=pool, say=say)
        if found.best is not None:
            return model, found
        low = min(low - 1, int(low * 0.92))
    raise PlanError(f"--max-params: not even {step} heads fit on {machine.describe()}")


def scaled(config: DecoderConfig, heads: int) -> DecoderConfig:
    """A model of the same proportions with so many heads of the same size."""
    width = heads * config.head_dim
    times = width / config.width
    return config.model_copy(
        update={
            "preset": None,
            "heads": heads,
            "width": width,
            "kv_heads": max(1, heads * config.kv_heads // config.heads),
            "hidden": -(-round(config.hidden * times) // 128) * 128,
            "layers": max(1, round(config.layers * times)),
        }
    )


def _of(model: DecoderConfig) -> dict[str, Any]:
    names = ("heads", "width", "kv_heads", "hidden", "layers", "head_dim")
    return {f"model.{name}": getattr(model, name) for name in names}


def _alone(recipe: Recipe) -> dict[str, Any]:
    """The recipe on one device, from where every layout can be reached."""
    return {
        **{f"layout.{axis}": 1 for axis in AXES},
        "layout.cuts": [],
        "layout.offload": False,
        "train.micro_batch": 1,
    }


def _rated(
    recipe: Recipe, machine: Machine, *, quick: bool = False
) -> Iterator[tuple[dict[str, Any], Rough]]:
    """Every layout of the machine that the recipe's rules allow, with its formulas."""
    config, train = recipe.model, recipe.train
    task = tasks.build(recipe.task)
    for layout in _layouts(recipe, machine):
        sections = recipe.layout.model_copy(update=layout)
        each = train.global_batch // sections.data_ranks
        if each * sections.data_ranks != train.global_batch:
            continue
        sizes = [size for size in (1, 2, 4, 8, 16) if each % size == 0]
        for size, way in itertools.product(
            sizes[:1] if quick else sizes,
            ["full"] if quick else ["none", "selective", "full"],
        ):
            changed = train.model_copy(update={"micro_batch": size, "checkpointing": way})
            other = recipe.model_copy(update={"layout": sections, "train": changed})
            fields = {
                f"layout.{name}": value
                for name, value in layout.items()
                if value != 1 or name == "zero"
            }
            fields |= {"train.micro_batch": size, "train.checkpointing": way}
            if _allowed(other, config, task):
                yield fields, closed.rough(other, machine)


def _layouts(recipe: Recipe, machine: Machine) -> Iterator[dict[str, Any]]:
    config = recipe.model
    assert isinstance(config, DecoderConfig)
    axes = ["pipeline", "replicate", "shard", "context", "tensor"]
    axes += ["expert"] if config.experts else []
    for sizes in _factors(machine.count, len(axes)):
        layout: dict[str, Any] = dict(zip(axes, sizes, strict=True))
        if layout["tensor"] > machine.node or (layout["context"] > 1 and layout["replicate"] > 1):
            continue  # what is waited for stays on a node's links
        if layout["pipeline"] > config.layers:
            continue
        zeros = (1, 2, 3) if layout["shard"] > 1 else (3,)
        for zero in zeros:
            yield {**layout, **({"zero": zero} if len(zeros) > 1 else {})}


def _allowed(recipe: Recipe, config: Any, task: Any) -> bool:
    try:
        check.check(recipe, config, task)
    except MegalithError:
        return False
    return True


def _varied(candidates: Sequence[Candidate]) -> Iterator[Candidate]:
    """The best of each kind first: formulas cannot tell near twins apart, and a trace costs."""
    shapes: set[tuple[Any, ...]] = set()
    later: list[Candidate] = []
    for one in candidates:
        names = ("tensor", "context", "expert")
        shape = tuple(one.fields.get(f"layout.{name}", 1) for name in names)
        if shape in shapes:
            later.append(one)
        else:
            shapes.add(shape)
            yield one
    yield from later


def _traced(
    recipe: Recipe, machine: Machine, candidate: Candidate, pool: Pool, say: Say, *, confirm: bool
) -> Candidate:
    other = advice.changed(recipe, candidate.fields)
    traced = estimate.plan(
        other,
        machine.part(other.layout.ranks),
        advise=False,
        ends_only=True,
        confirm=confirm,
        pool=pool,
        say=say,
    )
    return Candidate(candidate.fields, candidate.rough, traced)


def _judged(
    recipe: Recipe,
    machine: Machine,
    hopeful: Sequence[Candidate],
    traced: int,
    pool: Pool,
    say: Say,
) -> list[Candidate]:
    """The best by formula, traced; further ones while none of them fits."""

    def judge(candidate: Candidate) -> Candidate | None:
        say(f"tracing {' '.join(advice.overrides(candidate.fields))}")
        try:
            return _traced(recipe, machine, candidate, pool, say, confirm=False)
        except MegalithError as error:
            say(str(error))
            return None

    order = _varied(hopeful)
    judged: list[Candidate] = []
    with ThreadPoolExecutor(traced) as together:  # no processor waits for a candidate's last trace
        for _ in range(3):
            chosen = list(itertools.islice(order, traced))
            judged += [one for one in together.map(judge, chosen) if one is not None]
            if not chosen or any(one.plan is not None and one.plan.fits for one in judged):
                break
    return judged


def _confirmed(
    recipe: Recipe, machine: Machine, fitting: list[Candidate], goal: Goal, pool: Pool, say: Say
) -> list[Candidate]:
    """Those that fit, the best first, which one more trace confirms."""
    found = sorted(fitting, key=lambda one: _score(one, machine, goal))
    while found:
        say("confirming the best")
        best = _traced(recipe, machine, found[0], pool, say, confirm=True)
        if best.plan is not None and best.plan.fits:
            return sorted([best, *found[1:]], key=lambda one: _score(one, machine, goal))
        found = found[1:]
    return found


def _score(candidate: Candidate, machine: Machine, goal: Goal) -> float:
    if goal == "time":
        return candidate.seconds
    ranks = 1
    for axis in AXES:
        ranks *= candidate.fields.get(f"layout.{axis}", 1)
    # Price and power are the same for every device of a machine: both follow device-hours.
    return candidate.seconds * ranks


def _parts_of(count: int) -> list[int]:
    return [count // times for times in (1, 2, 4, 8) if count % times == 0]


def _factors(product: int, count: int) -> Iterator[tuple[int, ...]]:
    """All ways to write ``product`` as ``count`` factors in order."""
    if count == 1:
        yield (product,)
        return
    for first in (n for n in range(1, product + 1) if product % n == 0):
        for rest in _factors(product // first, count - 1):
            yield (first, *rest)


def _silent(what: str) -> None:
    pass
