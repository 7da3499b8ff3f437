"""The verb that plans: will it fit, how long, what would be better."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import megalith
from megalith.cli.frame import Overrides, examples
from megalith.core.errors import MegalithError, PlanError

if TYPE_CHECKING:
    from collections.abc import Callable

    from megalith.recipe import Recipe

app = typer.Typer()

_GOALS = ("time", "money", "energy")


@app.command(
    epilog=examples(
        "megalith plan recipes/gpt-stdlib.toml",
        "megalith plan recipes/llama3-8b.toml --on 64xH100",
        "megalith plan recipes/gpt3-175b.toml --on 1024xA100-80GB --search",
        "megalith plan recipes/llama3-8b.toml --on 8xA100-40GB,price=1.1 --search --by money",
        "megalith plan recipes/llama3-8b.toml --on 8xL40S --max-params",
        "megalith plan recipes/llama3-8b.toml --on 64xH100 --sweep train.micro_batch=1,2",
        "megalith plan --calibrate runs/gpt-stdlib",
    )
)
def plan(
    recipe: Annotated[
        str | None, typer.Argument(metavar="RECIPE", help="A TOML file.", show_default=False)
    ] = None,
    overrides: Overrides = None,
    on: Annotated[
        str,
        typer.Option(
            metavar="MACHINE",
            help="Count and device, such as 64xH100; then ,network= ,node= ,price= ,memory= (GiB).",
        ),
    ] = "this machine",
    search: Annotated[
        bool, typer.Option("--search", help="Rank every layout that the recipe allows and fits.")
    ] = False,
    by: Annotated[
        str, typer.Option(metavar="GOAL", help="What --search ranks by: time, money or energy.")
    ] = "time",
    max_params: Annotated[
        bool,
        typer.Option("--max-params", help="The largest model of the family that trains there."),
    ] = False,
    sweep: Annotated[
        str | None,
        typer.Option(metavar="FIELD=A,B", help="A row for each value.", show_default=False),
    ] = None,
    calibrate: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="RUN",
            help="Fit the device's constants to a run, or several; plans made here then use them.",
            show_default=False,
        ),
    ] = None,
    full: Annotated[
        bool, typer.Option("--full", help="Trace every layer and micro-batch; nothing inferred.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, all ranks in it.")] = False,
) -> None:
    """Say whether a recipe fits a machine, how long it takes and what it costs; no GPU is needed.

    The recipe's own step is traced on tensors without data. The exit code is 1 if it does not fit.
    """
    from megalith.plan import worker

    if on != "this machine":  # whose rates are measured first, with nothing beside
        worker.start()  # imports torch beside this process, which does the same now
    if sum(map(bool, (search, max_params, sweep, calibrate))) > 1:
        raise PlanError("--search, --max-params, --sweep, --calibrate: one at a time")
    if by not in _GOALS:
        raise PlanError(f"--by: '{by}' is no goal; time, money or energy")
    if calibrate:
        more = [] if recipe is None else [recipe, *(overrides or [])]
        _calibrate([*calibrate, *map(Path, more)], on, as_json)
        return
    if recipe is None:
        raise PlanError("RECIPE: which recipe to plan is missing; see megalith plan --help")
    loaded = megalith.load(recipe, *overrides or [])
    if search or max_params:
        fits = _search(loaded, on, by if search else None, as_json)
    elif sweep is not None:
        fits = _sweep(
            lambda word: megalith.load(recipe, *overrides or [], word), on, sweep, as_json
        )
    else:
        found = megalith.plan(loaded, on, full=full, say=_say)
        _print(found.as_dict(), as_json, lambda console, report: report.show(found, console))
        fits = found.fits
    if not fits:
        raise typer.Exit(1)


def _calibrate(folders: list[Path], on: str, as_json: bool) -> None:
    from megalith.plan import constants
    from megalith.plan.calibrate import calibrate

    found = calibrate(folders, None if on == "this machine" else on, say=_say)
    constants.keep(found.device, [fit.name for fit in found.fits])
    _print(found.as_dict(), as_json, lambda console, report: report.show_fits(found, console))
    _say(f"kept in {constants.FILE}")


def _search(loaded: Any, on: str, goal: str | None, as_json: bool) -> bool:
    from megalith.plan import search

    model = None
    if goal is None:
        model, found = search.largest(loaded, on, say=_say)
    else:
        found = search.search(loaded, on, goal, say=_say)  # pyright: ignore[reportArgumentType]
    best = found.best.plan if found.best is not None else None
    plain: dict[str, Any] = {
        "goal": found.goal,
        "considered": found.considered,
        "best": found.best.fields if found.best is not None else None,
        "plan": best.as_dict() if best is not None else None,
        "ranked": [
            {
                "fields": one.fields,
                "seconds": one.seconds,
                "memory": one.plan.needed if one.plan is not None else int(one.rough.memory),
                "traced": one.plan is not None,
                "fits": one.plan.fits if one.plan is not None else None,
            }
            for one in found.ranked[:50]
        ],
    }
    if model is not None:
        names = ("layers", "width", "heads", "kv_heads", "hidden")
        plain["model"] = {name: getattr(model, name) for name in names}

    def show(console: Any, report: Any) -> None:
        if model is not None:
            from megalith.plan.flops import parameters

            sizes = ", ".join(f"{name} {size}" for name, size in plain["model"].items())
            console.print(f"[bold]{parameters(model) / 1e9:.2f}B parameters[/bold]: {sizes}")
        report.show_search(found, console)

    _print(plain, as_json, show)
    return best is not None


def _sweep(load: Callable[[str], Recipe], on: str, asked: str, as_json: bool) -> bool:
    from megalith.plan.search import sweep

    field, equals, values = asked.partition("=")
    if not equals or not values:
        raise PlanError(f"--sweep: '{asked}' is not FIELD=A,B, such as train.micro_batch=1,2,4")
    rows = sweep(lambda value: load(f"{field}={value}"), values.split(","), on, say=_say)
    plain = [
        {field: value, **({"error": str(p)} if isinstance(p, MegalithError) else p.as_dict())}
        for value, p in rows
    ]
    _print(plain, as_json, lambda console, report: report.show_sweep(field, rows, console))
    return any(not isinstance(p, MegalithError) and p.fits for _, p in rows)


def _print(plain: Any, as_json: bool, show: Any) -> None:
    if as_json:
        print(json.dumps(plain, indent=1))
        return
    from rich.console import Console

    from megalith.plan import report

    show(Console(), report)


def _say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)
