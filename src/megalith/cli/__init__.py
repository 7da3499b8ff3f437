"""The command line: each verb parses, calls, prints and exits; the work is done elsewhere.

One file per group of verbs, each with an ``app`` of its own; this one puts them together. Modules
that import torch are imported inside the verbs, so that ``megalith --help`` is quick.
"""

from __future__ import annotations

from typing import Annotated

import typer

import megalith
from megalith.cli import checkpoints, data, machine, plans, proofs, recipes, runs
from megalith.cli.frame import Verbs, examples

app = typer.Typer(
    cls=Verbs,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Plan, train, shrink and ship large PyTorch models. One recipe file says what to do.",
)
# Without a name: their verbs stand beside each other at the top.
app.add_typer(runs.app)
app.add_typer(plans.app)
app.add_typer(proofs.app)
app.add_typer(machine.app)
app.add_typer(recipes.app, name="recipe")
app.add_typer(data.app, name="data")
app.add_typer(checkpoints.app, name="checkpoint")


def _print_version(asked: bool) -> None:
    if asked:
        print(f"megalith {megalith.__version__}")
        raise typer.Exit


@app.callback(
    epilog=examples(
        "megalith doctor",
        "megalith train recipes/gpt-stdlib.toml train.steps=200",
        "megalith recipe explain optim.schedule",
    )
)
def _main(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            help="Print the version and exit.",
            is_eager=True,
            callback=_print_version,
        ),
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Options of every verb."""


def main() -> None:
    """The command ``megalith``."""
    app()
