"""A plan, a search and a sweep as tables to read."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from megalith.core import units
from megalith.core.errors import MegalithError
from megalith.layout.mesh import AXES
from megalith.plan.advice import overrides
from megalith.plan.calibrate import Calibration
from megalith.plan.estimate import NOT_MODELLED, Plan, Rank
from megalith.plan.search import Candidate, Found
from megalith.recipe import Recipe

_BARS = " ▁▂▃▄▅▆▇█"


def show(plan: Plan, console: Console) -> None:
    """Print a plan."""
    console.print(f"[bold]{plan.machine.describe()}[/bold]; {label(plan.recipe)}")
    color = "green" if plan.fits else "red"
    console.print(Text(plan.why, style=color))
    for note in plan.notes:
        console.print(Text(f"note: {note}", style="yellow"))
    console.print()
    console.print(_memory(plan))
    console.print(_moment(plan.ranks[0]))
    console.print()
    console.print(_time(plan))
    if plan.changes:
        console.print()
        console.print(_changes(plan))
    elif not plan.fits:
        console.print("no single change was found that fits; --search looks at all layouts")
    console.print()
    console.print(Text("not modelled: " + "; ".join(NOT_MODELLED), style="dim"))


def show_search(found: Found, console: Console, most: int = 10) -> None:
    """Print what a search found, and the sections of the best."""
    table = Table(title=f"{found.considered} layouts, ranked by {found.goal}", title_justify="left")
    for name in ("", "layout", "update", "memory", "known by"):
        table.add_column(name, justify="right" if name in ("update", "memory") else "left")
    for place, one in enumerate(found.ranked[:most], 1):
        table.add_row(str(place), *_candidate(one))
    console.print(table)
    if found.best is None or found.best.plan is None:
        console.print(Text("nothing that was traced fits", style="red"))
        return
    console.print("\n[bold]the best[/bold]\n")
    console.print(Text(toml(found.best.plan.recipe)))
    show(found.best.plan, console)


def show_sweep(
    field: str, rows: Sequence[tuple[str, Plan | MegalithError]], console: Console
) -> None:
    """Print a table over a field's values."""
    table = Table()
    table.add_column(field)
    for name in ("memory", "fits", "update", "per device", "utilisation", "run", "cost"):
        table.add_column(name, justify="right")
    for value, plan in rows:
        if isinstance(plan, Plan):
            table.add_row(value, *_row(plan))
        else:
            table.add_row(value, "", "refused", str(plan))
    console.print(table)


def show_fits(found: Calibration, console: Console) -> None:
    """Print what runs say about a device: their times, and its constants before and after."""
    runs = Table(title=f"an update on {found.device.name}", title_justify="left")
    for name in ("run", "measured", "predicted before", "after"):
        runs.add_column(name, justify="left" if name == "run" else "right")
    for fit in found.fits:
        cells = [
            f"{units.duration(s)} ({s / fit.measured - 1:+.1%})" for s in (fit.before, fit.after)
        ]
        runs.add_row(fit.name, units.duration(fit.measured), *cells)
    console.print(runs)
    shares = Table(title="share of the peak that is reached", title_justify="left")
    for name in ("", "before", "after"):
        shares.add_column(name, justify="right" if name else "left")
    for name, value in found.before.share.items():
        shares.add_row(name, f"{value:.3f}", f"{found.device.share[name]:.3f}")
    shares.add_row("links", f"{found.before.link_share:.3f}", f"{found.device.link_share:.3f}")
    console.print(shares)


def label(recipe: Recipe) -> str:
    """The layout, micro-batch and checkpointing in a few words."""
    layout, train = recipe.layout, recipe.train
    axes = [f"{axis} {getattr(layout, axis)}" for axis in AXES if getattr(layout, axis) > 1]
    if layout.shard > 1:
        axes.append(f"zero {layout.zero}")
    words = [
        " x ".join(axes) or "one process",
        f"micro-batch {train.micro_batch}",
        f"checkpointing {train.checkpointing}",
        train.precision,
    ]
    return ", ".join(words)


def toml(recipe: Recipe) -> str:
    """The sections that a search decides, as they stand in a recipe."""
    layout, train = recipe.layout, recipe.train
    lines = ["[layout]"]
    lines += [f"{axis} = {getattr(layout, axis)}" for axis in AXES if getattr(layout, axis) > 1]
    lines += [f"zero = {layout.zero}"] if layout.shard > 1 else []
    lines += ["", "[train]", f"micro_batch = {train.micro_batch}"]
    return "\n".join([*lines, f'checkpointing = "{train.checkpointing}"', ""])


def _memory(plan: Plan) -> Table:
    """Kinds by rank."""
    table = Table(title="memory at the peak", title_justify="left")
    table.add_column("")
    for rank in plan.ranks:
        table.add_column(_name(rank, plan), justify="right")
    kinds = [kind for kind in plan.ranks[0].kinds if any(rank.kinds[kind] for rank in plan.ranks)]
    kinds.sort(key=lambda kind: -plan.ranks[0].kinds[kind])
    for kind in kinds:
        table.add_row(kind, *(units.size(rank.kinds[kind]) for rank in plan.ranks))
    table.add_section()
    rows = {
        "allocated": lambda rank: rank.allocated,
        "reserved": lambda rank: rank.reserved,
        "reserved, expandable segments": lambda rank: rank.reserved_expandable,
        "driver, libraries, buffers": lambda rank: rank.overhead,
        "needed": lambda rank: rank.needed,
    }
    for name, value in rows.items():
        table.add_row(name, *(units.size(value(rank)) for rank in plan.ranks))
    table.add_row("over the update", *(_picture(rank) for rank in plan.ranks))
    return table


def _name(rank: Rank, plan: Plan) -> str:
    if plan.recipe.layout.pipeline == 1:
        return "every rank" if plan.recipe.layout.ranks > 1 else "the process"
    last = rank.stage + rank.like - 1
    return f"stage {rank.stage}" + (f" to {last}" if rank.like > 1 else "")


def _picture(rank: Rank) -> str:
    """Memory over the update, 32 columns."""
    curves = list(rank.curve.values())
    if not curves:
        return ""
    total = [sum(values) for values in zip(*curves, strict=True)]
    high = max(total) or 1.0
    steps = [max(total[n : n + 2]) for n in range(0, len(total), 2)]
    return "".join(_BARS[round(value / high * (len(_BARS) - 1))] for value in steps)


def _moment(rank: Rank) -> RenderableType:
    where = rank.moment["module"] or "the whole model"
    lines = [f"peak in {rank.moment['phase']}, {where}, {rank.moment['operator']}; largest there:"]
    for one in rank.largest[:5]:
        shape = "x".join(str(size) for size in one["shape"])
        lines.append(
            f"  {units.size(one['bytes']):>9}  {one['kind']:13} {one['dtype']} {shape}  "
            f"{one['module']} {one['operator']}"
        )
    if rank.traced:
        depths = sorted({layers for layers, _, _ in rank.traced})
        lines.append(
            f"from traces of {', '.join(map(str, depths))} layers, the last of which confirms the "
            "others; --full traces all"
        )
    return Text("\n".join(lines))


def _time(plan: Plan) -> RenderableType:
    took, run = plan.time, plan.run
    low, high = units.duration(took.low), units.duration(took.high)
    table = Table(title="an update", title_justify="left", show_header=False)
    table.add_column("")
    table.add_column("", justify="right")
    table.add_row("time", f"{units.duration(took.seconds)} ({low} to {high})")
    table.add_row("operators", units.duration(took.compute))
    for name, seconds in sorted(took.collectives.items(), key=lambda pair: -pair[1]):
        if seconds > 1e-3 * took.seconds:
            table.add_row(f"  {name}", units.duration(seconds))
    table.add_row("communication not hidden", units.duration(took.exposed))
    if took.bubble:
        table.add_row("pipeline bubble", units.duration(took.bubble))
    table.add_row(f"{plan.item} per second and device", units.quantity(plan.tokens))
    if plan.mfu is not None:
        table.add_row("model FLOP utilisation", units.percent(plan.mfu))
    cost = (
        f"{plan.recipe.train.steps:,} updates: {units.duration(run.seconds)}, "
        f"{units.quantity(run.device_hours)} device-hours"
    )
    if plan.machine.device.price:
        cost += f", ${units.quantity(run.dollars)} at ${plan.machine.device.price} (assumed)"
    if plan.machine.device.power:
        cost += f", {units.quantity(run.kwh)} kWh at board power"
    return Group(table, Text(cost))


def _changes(plan: Plan) -> Table:
    table = Table(title="what would fit", title_justify="left")
    table.add_column("change")
    table.add_column("memory", justify="right")
    table.add_column("time of an update", justify="right")
    for change in plan.changes:
        table.add_row(
            " ".join(change.overrides), units.size(change.needed), f"x {change.slower:.2f}"
        )
    return table


def _candidate(one: Candidate) -> list[str]:
    words = " ".join(word.partition(".")[2] for word in overrides(one.fields))
    if one.plan is None:
        size = units.size(one.rough.memory)
        return [words, f"~{units.duration(one.seconds)}", f"~{size}", "formula"]
    known = "trace" if one.plan.fits else "trace: does not fit"
    return [words, units.duration(one.seconds), units.size(one.plan.needed), known]


def _row(plan: Plan) -> list[str]:
    return [
        units.size(plan.needed),
        "yes" if plan.fits else "no",
        units.duration(plan.time.seconds),
        f"{units.quantity(plan.tokens)} {plan.item}/s",
        units.percent(plan.mfu) if plan.mfu is not None else "",
        units.duration(plan.run.seconds),
        f"${units.quantity(plan.run.dollars)}",
    ]
