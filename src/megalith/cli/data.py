"""The verbs ``megalith data ...``."""

from __future__ import annotations

import typer

import megalith
from megalith.cli.frame import Overrides, Preparation, RecipeFile, examples

app = typer.Typer(no_args_is_help=True, help="Make data ready before a run.")


@app.command(
    epilog=examples(
        "megalith data prepare recipes/gpt-stdlib.toml",
        "megalith data prepare recipes/gpt-stdlib.toml data.tokenizer=bpe-8192",
    )
)
def prepare(recipe: RecipeFile, overrides: Overrides = None) -> None:
    """Read the sources, train the tokenizer if need be, and write the token shards."""
    loaded = megalith.load(recipe, *overrides or [])
    from megalith.data.prepare import prepare as prepared

    with Preparation() as progress:
        splits = prepared(loaded.data, loaded.train.seed, progress=progress)
    for name, value in {**splits.facts, **splits.description}.items():
        print(f"{name}: {value}")
