"""The verbs ``megalith checkpoint ...``."""

from __future__ import annotations

import typer

from megalith.cli.frame import RunFolderPath, examples

app = typer.Typer(no_args_is_help=True, help="See what a run has saved.")


@app.command(name="ls", epilog=examples("megalith checkpoint ls runs/gpt-stdlib"))
def checkpoint_ls(run: RunFolderPath) -> None:
    """List a run's checkpoints, oldest first."""
    from megalith import checkpoint
    from megalith.core import units
    from megalith.core.runs import existing_run

    found = checkpoint.entries(existing_run(run).checkpoints)
    best = checkpoint.best(found)
    for entry in found:
        loss = entry.validation_loss
        said = "" if loss is None else f"validation loss {units.number(loss, fixed=True)}"
        mark = "best" if best is not None and entry.step == best.step else ""
        row = f"update {entry.step:>8,}  {units.size(entry.bytes):>9}  {entry.path}  {said}  {mark}"
        print(row.rstrip())
    if not found:
        print(f"{run}: no checkpoint yet")
