"""The verbs ``megalith recipe ...``."""

from __future__ import annotations

import json
from typing import Annotated

import typer

import megalith
from megalith.cli.frame import Overrides, RecipeFile, examples

app = typer.Typer(no_args_is_help=True, help="Look at a recipe before it runs.")


@app.command(
    epilog=examples(
        "megalith recipe show recipes/gpt-stdlib.toml",
        "megalith recipe show recipes/gpt-stdlib.toml model.layers=4 --comments",
        "megalith recipe show --comments > mine.toml",
    )
)
def show(
    recipe: Annotated[
        str | None,
        typer.Argument(metavar="RECIPE", help="A TOML file; left out: the defaults."),
    ] = None,
    overrides: Overrides = None,
    comments: Annotated[
        bool, typer.Option("--comments", help="Put each field's meaning and unit above it.")
    ] = False,
) -> None:
    """Print the whole recipe: every field with the value it will have."""
    from megalith.recipe import dump

    print(dump(megalith.load(recipe, *overrides or []), comments=comments), end="")


@app.command(
    epilog=examples(
        "megalith recipe check recipes/gpt-stdlib.toml",
        "megalith recipe check recipes/gpt-stdlib.toml train.precision=bf16",
    )
)
def check(recipe: RecipeFile, overrides: Overrides = None) -> None:
    """Refuse what would fail later: names, types, combinations, files, the device."""
    loaded = megalith.load(recipe, *overrides or [])
    from megalith.data.prepare import check_sources
    from megalith.recipe.check import check as check_recipe

    check_recipe(loaded)
    check_sources(loaded.data)
    print(f"{recipe}: nothing wrong found")


@app.command(
    epilog=examples(
        "megalith recipe explain",
        "megalith recipe explain train",
        "megalith recipe explain optim.schedule",
    )
)
def explain(
    field: Annotated[
        str,
        typer.Argument(metavar="FIELD", help="A section or section.field.", show_default=False),
    ] = "",
) -> None:
    """Say what a field means: its type, unit, default and limits."""
    from megalith.recipe.explain import explain as explained

    print(explained(field))


@app.command(epilog=examples("megalith recipe schema > recipe.schema.json"))
def schema() -> None:
    """Print the recipe's JSON Schema, with which editors complete and check a recipe."""
    from megalith.recipe.explain import schema as made

    print(json.dumps(made(), indent=2))
