"""The verb about this machine."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from megalith.cli.frame import examples

app = typer.Typer()


@app.command(epilog=examples("megalith doctor", "megalith doctor --json"))
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print the rows as JSON.")] = False,
) -> None:
    """Try what works on this machine, and say how to get what does not."""
    from dataclasses import asdict

    from megalith.core.doctor import examine

    rows = []
    for row in examine():  # one by one, for some take a second
        rows.append(row)
        if not as_json:
            color = "green" if row.works else "red" if row.needed else "yellow"
            mark = typer.style("yes" if row.works else "no ", fg=color)
            typer.echo(f"{mark}  {row.what:<15}  {row.detail}")
            if row.remedy:
                typer.echo(f"{'':<22}{row.remedy}")
    if as_json:
        print(json.dumps([asdict(row) for row in rows], indent=1))
    if any(row.needed and not row.works for row in rows):
        raise typer.Exit(1)
