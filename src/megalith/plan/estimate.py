"""Will it fit, how long will it take, what would be better: a plan of one recipe on one machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from megalith import models, tasks
from megalith.core import units
from megalith.core.errors import PlanError
from megalith.layout import check
from megalith.plan import advice, constants, extrapolate, flops, samples
from megalith.plan.advice import Change, Traced
from megalith.plan.closed import overhead
from megalith.plan.extrapolate import Look
from megalith.plan.machine import HERE, Machine
from megalith.plan.time import StepTime, fused, step_time
from megalith.plan.worker import Asked, Pool, Seen
from megalith.recipe import Recipe
from megalith.recipe.families import DecoderConfig

Say = Callable[[str], None]

_INFERRED = 0.07
"""How far reserved memory that was inferred lay from a full trace's at most (in the tests)."""

NOT_MODELLED = (
    "workspaces of cuBLAS, cuDNN and attention kernels beyond the constant for the device",
    "buffers of the collective library beyond the constant for the device",
    "retries of the allocator close to the limit, and other processes on the device",
    "torch.compile: a compiled step keeps and frees other tensors",
    "loading data, checkpoints, evaluation, and slow or failing nodes",
)
"""What no number here contains."""


@dataclass(frozen=True)
class Rank:
    """Memory of a distinct rank, bytes.

    Attributes:
        stage: its place in the pipeline.
        like: how many places of the pipeline are like it.
        needed: what the device must have: reserved memory, and ``overhead``.
        overhead: driver, libraries and collective buffers: constants of the device.
        curve: bytes by kind over the update; of the deepest trace, if it was not traced in full.
        traced: layers and micro-batches of the traces; empty: traced in full.
    """

    stage: int
    like: int
    parameters: int
    allocated: int
    reserved: int
    reserved_expandable: int
    overhead: int
    needed: int
    kinds: dict[str, int]
    most: dict[str, int]
    moment: dict[str, str]
    largest: list[dict[str, Any]]
    curve: dict[str, list[float]]
    traced: list[tuple[int, int, int]]


@dataclass(frozen=True)
class Whole:
    """The whole run: seconds, device-hours, dollars and kWh (at board power)."""

    seconds: float
    device_hours: float
    dollars: float
    kwh: float


@dataclass(frozen=True)
class Plan:
    """What is to be expected of a recipe on a machine.

    Attributes:
        recipe: with its model resolved.
        ranks: the distinct ones, the fullest first.
        tokens: items (tokens or samples) per second and device.
        mfu: model FLOP utilisation: needed operations per second over the devices' peak.
        why: in words, whether it fits.
        changes: if it does not, what would, the cheapest first.
        notes: what else a user should know.
    """

    recipe: Recipe
    machine: Machine
    ranks: list[Rank]
    time: StepTime
    tokens: float
    item: str
    mfu: float | None
    run: Whole
    limit: int
    fits: bool
    why: str
    changes: list[Change] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def needed(self) -> int:
        """Bytes on the fullest rank."""
        return self.ranks[0].needed

    def as_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        return {
            "machine": {
                "asked": self.machine.asked,
                "device": self.machine.device.key,
                "devices": self.machine.count,
                "nodes": self.machine.nodes,
                "network": self.machine.network.name,
                "memory": self.limit,
            },
            "layout": self.recipe.layout.model_dump(mode="json", exclude_defaults=True),
            "fits": self.fits,
            "why": self.why,
            "ranks": [asdict(rank) for rank in self.ranks],
            "time": asdict(self.time),
            f"{self.item}_per_second_and_device": self.tokens,
            "model_flop_utilisation": self.mfu,
            "run": asdict(self.run),
            "changes": [asdict(change) for change in self.changes],
            "notes": self.notes,
            "not_modelled": list(NOT_MODELLED),
        }


def plan(
    recipe: Recipe,
    on: str | Machine = HERE,
    *,
    full: bool = False,
    advise: bool = True,
    ends_only: bool = False,
    confirm: bool = True,
    pool: Pool | None = None,
    say: Say | None = None,
) -> Plan:
    """What ``recipe`` takes on a machine, without it: its own step is traced on fake tensors.

    Args:
        on: such as ``64xH100``; left out: this machine, its accelerator where it has one.
        full: trace all layers and micro-batches.
        advise: look for changes that fit, if it does not.
        ends_only: of a pipeline, look at the first and last stage only.
        confirm: of a deep model, make the trace that confirms the others.
        say: is told what is being done.

    Raises:
        PlanError: the machine is not known, too small for the layout, or the step cannot be traced.
        RecipeError: the recipe is refused.
    """
    pool, say = pool or Pool(), say or _silent
    whole, fitted = constants.machine(on, recipe.train)
    asked = question(recipe, whole)
    machine, notes = seated(asked.recipe, whole)
    looks = traces(asked, pool, full=full, ends_only=ends_only, say=say, confirm=confirm)
    found = judged(asked.recipe, machine, looks, [*fitted, *notes])
    if found.fits or not advise:
        return found

    def judge(other: Recipe) -> Traced:
        tried = plan(other, whole, full=full, advise=False, ends_only=True, pool=pool, say=say)
        return Traced(tried.needed, tried.fits, tried.time.seconds)

    own = Traced(found.needed, found.fits, found.time.seconds)
    return replace(found, changes=advice.changes(asked.recipe, own, machine, judge, say))


def question(recipe: Recipe, machine: Machine) -> Asked:
    """What to trace for a recipe, as its rank 0.

    Raises:
        RecipeError: the recipe is refused.
    """
    facts, sample = samples.facts_and_sample(recipe)
    config = models.resolve(recipe.model, facts)
    recipe = recipe.model_copy(update={"model": config})
    if recipe.layout.ranks > 1:
        check.check(recipe, config, tasks.build(recipe.task))
    target = machine.device.target()
    packed = None if target is None else (target.capability, target.attention, target.memory)
    return Asked(recipe, facts, sample, 0, packed)


def traces(
    asked: Asked, pool: Pool, *, full: bool, ends_only: bool, say: Say, confirm: bool = True
) -> list[Look]:
    """The distinct ranks of a question, looked at."""
    chosen = extrapolate.parts(asked.recipe, asked.recipe.model, ends_only=ends_only)
    return extrapolate.look(pool, asked, chosen, full=full, say=say, confirm=confirm)


def judged(
    recipe: Recipe, machine: Machine, looks: Sequence[Look], notes: Sequence[str] = ()
) -> Plan:
    """The plan that follows from what was traced."""
    limit = machine.device.memory
    ranks = sorted((_rank(look, machine) for look in looks), key=lambda rank: -rank.needed)
    fits, why = _fits(ranks[0], limit, recipe.layout.pipeline)
    took = time_of(recipe, machine, looks)
    item, each = _items(recipe)
    per_second = recipe.train.global_batch * each / took.seconds
    needed = operations(recipe, [look.seen for look in looks])
    dtype = {"fp32": "float32", "fp16": "float16"}.get(recipe.train.precision, "bfloat16")
    peak = machine.device.peak(dtype) * machine.count
    return Plan(
        recipe=recipe,
        machine=machine,
        ranks=ranks,
        time=took,
        tokens=per_second / machine.count,
        item=item,
        mfu=needed / took.seconds / peak if needed else None,
        run=whole_run(recipe, machine, took.seconds),
        limit=limit,
        fits=fits,
        why=why,
        notes=[*notes, *_remarks(recipe, took), *_close(ranks[0], limit)],
    )


def time_of(recipe: Recipe, machine: Machine, looks: Sequence[Look]) -> StepTime:
    """An update's time from what was traced, as it runs: eager or compiled."""
    compiled = recipe.train.compile
    pairs = [(look.part, fused(look.seen) if compiled else look.seen) for look in looks]
    return step_time(pairs, recipe.layout, extrapolate.micros(recipe), machine)


def whole_run(recipe: Recipe, machine: Machine, step: float) -> Whole:
    """``train.steps`` updates of ``step`` seconds."""
    seconds = step * recipe.train.steps
    hours = seconds * machine.count / 3600
    device = machine.device
    return Whole(seconds, hours, hours * device.price, hours * device.power / 1000)


def operations(recipe: Recipe, seen: Sequence[Seen]) -> float | None:
    """FLOPs that an update of the model needs, without recomputation; ``None``: not known."""
    config, sequence = recipe.model, getattr(recipe.data, "sequence", None)
    if isinstance(config, DecoderConfig) and sequence is not None:
        return flops.per_sample(config, sequence) * recipe.train.global_batch
    if recipe.train.checkpointing != "none" or recipe.layout.pipeline > 1:
        return None
    rank = sum(values[1] for values in seen[0].computed.values())
    return rank * recipe.layout.ranks or None


def _rank(look: Look, machine: Machine) -> Rank:
    seen, beside = look.seen, overhead(machine)
    memory = {name: round(value) for name, value in seen.memory.items()}
    # In segments is torch's default; a growing segment is an option of its allocator.
    return Rank(
        stage=look.part.stage,
        like=look.part.ranks,
        parameters=round(seen.parameters),
        **memory,
        overhead=beside,
        needed=memory["reserved"] + beside,
        kinds={name: round(value) for name, value in seen.kinds.items()},
        most={name: round(value) for name, value in seen.most.items()},
        moment=seen.moment,
        largest=seen.largest,
        curve=seen.curve,
        traced=[(p.layers, p.kept, p.micros) for p in look.points],
    )


def _fits(rank: Rank, limit: int, stages: int) -> tuple[bool, str]:
    need, have = units.size(rank.needed), units.size(limit)
    where = f"a rank of stage {rank.stage} needs" if stages > 1 else "a rank needs"
    if rank.needed <= limit:
        spare = units.size(limit - rank.needed)
        return True, f"fits: {where} {need} of {have}, {spare} are left"
    expandable = rank.reserved_expandable + rank.overhead
    if expandable <= limit:
        return True, (
            f"fits with PYTORCH_ALLOC_CONF=expandable_segments:True: {where} "
            f"{units.size(expandable)} of {have} then, and {need} without"
        )
    most = max(rank.kinds, key=lambda kind: rank.kinds[kind])
    return False, (
        f"does not fit: {where} {need} of {have}; the most at the peak is {most}, "
        f"{units.size(rank.kinds[most])}"
    )


def seated(recipe: Recipe, machine: Machine) -> tuple[Machine, list[str]]:
    """The part of the machine that the layout takes, and what to say about it."""
    ranks = recipe.layout.ranks
    if machine.device.key == "cpu" and ranks > machine.count:
        return _shared(machine, ranks), [f"{ranks} ranks share this machine's processors"]
    if ranks > machine.count:
        raise PlanError(
            f"layout: needs {ranks} devices, and {machine.asked} has {machine.count}; "
            "add --search for layouts that fit on it"
        )
    if ranks == machine.count:
        return machine, []
    if ranks == 1:
        note = f"[layout] says one device of {machine.count}; --search finds layouts for all"
    else:
        note = f"[layout] takes {ranks} of {machine.count} devices"
    return machine.part(ranks), [note]


def _shared(machine: Machine, ranks: int) -> Machine:
    device = machine.device
    split = replace(
        device,
        memory=device.memory // ranks,
        bandwidth=device.bandwidth / ranks,
        flops={name: rate / ranks for name, rate in device.flops.items()},
    )
    return replace(machine, count=ranks, device=split)


def _items(recipe: Recipe) -> tuple[str, int]:
    """What throughput counts, and how many of them a sample has."""
    sequence = getattr(recipe.data, "sequence", None)
    return ("samples", 1) if sequence is None else ("tokens", sequence)


def _remarks(recipe: Recipe, took: StepTime) -> list[str]:
    found = []
    if recipe.train.compile:
        found.append(
            "train.compile: the time is that of fewer, fused operators; memory is the eager step's"
        )
    if took.starts:
        found.append("the host starts operators slower than the device runs them: larger ones help")
    if recipe.layout.expert > 1:
        found.append("each expert is taken to get an equal share of the tokens")
    if recipe.layout.offload:
        found.append("layout.offload: traffic to the host and the host's memory are not modelled")
    return found


def _close(rank: Rank, limit: int) -> list[str]:
    """A word of caution where what is inferred of reserved memory may decide."""
    if not rank.traced or abs(rank.needed - limit) > _INFERRED * rank.reserved:
        return []
    return ["a close call: what is reserved is inferred from few layers; --full traces all"]


def _silent(what: str) -> None:
    pass
