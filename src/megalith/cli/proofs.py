"""The verb that proves layouts."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

import megalith
from megalith.cli.frame import Overrides, RecipeFile, examples

if TYPE_CHECKING:
    from megalith.verify import Verdict

app = typer.Typer()


@app.command(
    epilog=examples(
        "megalith verify recipes/gpt-stdlib.toml layout.shard=2 layout.tensor=2",
        "megalith verify recipes/gpt-stdlib.toml --all 4",
        "megalith verify recipes/gpt-stdlib.toml --all 8 --json > proof.json",
    )
)
def verify(
    recipe: RecipeFile,
    overrides: Overrides = None,
    up_to: Annotated[
        int | None,
        typer.Option(
            "--all", metavar="N", min=2, help="Every layout of 2 to N ranks.", show_default=False
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the verdicts as JSON.")] = False,
) -> None:
    """Prove that a layout computes what one process computes: every gradient, in float64.

    Ranks are forked on this machine's CPU. The exit code is 1 if anything differs.
    """
    from megalith.verify import layouts

    loaded = megalith.load(recipe, *overrides or [])

    def show(verdict: Verdict) -> None:
        if as_json:
            return
        color, mark = ("green", "equal ") if verdict.right else ("red", "DIFFERS")
        name = layouts.label(verdict.layout)
        number = f"{verdict.error:.1e}" if verdict.error < float("inf") else "-"
        typer.echo(
            f"{typer.style(mark, fg=color)}  {verdict.layout.ranks:>2} ranks  {number:>8}  "
            f"{verdict.seconds:5.1f} s  {verdict.precision}  {name}"
        )
        for line in _explained(verdict):
            typer.echo(f"         {line}")

    verdicts = megalith.verify(loaded, up_to=up_to, report=show)
    wrong = [verdict for verdict in verdicts if not verdict.right]
    if as_json:
        print(json.dumps([_plain(verdict) for verdict in verdicts], indent=1))
    else:
        worst = max((v.error for v in verdicts if v.precision == "float64"), default=0.0)
        typer.echo(
            f"{len(verdicts) - len(wrong)} of {len(verdicts)} equal to one process; "
            f"largest relative difference in float64: {worst:.1e}"
        )
    if wrong:
        raise typer.Exit(1)


def _explained(verdict: Verdict) -> list[str]:
    if verdict.right:
        return []
    said = [f"brought in by {' x '.join(verdict.axes)}"] if verdict.axes else []
    lines = verdict.lines()
    more = [f"and {len(lines) - 6} more"] if len(lines) > 6 else []
    return [*said, *lines[:6], *more]


def _plain(verdict: Verdict) -> dict[str, Any]:
    from megalith.verify import layouts

    return {
        "layout": layouts.label(verdict.layout),
        "ranks": verdict.layout.ranks,
        "precision": verdict.precision,
        "equal": verdict.right,
        "error": verdict.error if verdict.error < float("inf") else None,
        "seconds": round(verdict.seconds, 2),
        "axes": list(verdict.axes),
        "failure": verdict.failure,
        "differences": [
            {
                "kind": d.kind,
                "name": d.name,
                "error": d.error if d.error < float("inf") else None,
                "factor": d.factor,
                "line": d.line(verdict.layout, verdict.micros, verdict.axes),
            }
            for d in verdict.differences
        ],
    }
