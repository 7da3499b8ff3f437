"""Verbs of a run: train it, and use what it left."""

from __future__ import annotations

import itertools
import sys
import textwrap
from pathlib import Path
from typing import Annotated

import typer

import megalith
from megalith.cli.frame import (
    Overrides,
    Preparation,
    RecipeFile,
    RunFolderPath,
    examples,
    printable,
)

app = typer.Typer()


@app.command(
    epilog=examples(
        "megalith train recipes/gpt-stdlib.toml",
        "megalith train recipes/gpt-stdlib.toml train.steps=200 model.layers=4",
        "megalith train recipes/gpt-stdlib.toml --resume",
    )
)
def train(
    recipe: RecipeFile,
    overrides: Overrides = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest whole checkpoint.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Start over in a folder that holds a run.")
    ] = False,
) -> None:
    """Train a model and leave a run folder: checkpoints, metrics, samples and a report."""
    from megalith.core.world import speaks

    loaded = megalith.load(recipe, *overrides or [])
    with Preparation() as progress:
        run = megalith.train(loaded, resume=resume, overwrite=overwrite, progress=progress)
    if run.sample is not None:
        print(f"sample:\n{textwrap.indent(printable(run.sample), '  ')}")
    if speaks():
        print(f"{run.status.replace('_', ' ')} at update {run.step}; report: {run.report}")
    if run.signal:
        raise typer.Exit(128 + run.signal)


@app.command(
    epilog=examples(
        "megalith generate runs/gpt-stdlib --prompt 'def read('",
        "megalith generate runs/gpt-stdlib --prompt 'class ' --temperature 0.7 --seed 1",
        "megalith generate folder-with-config.json --prompt Once --stop '.' --max-tokens 64",
    )
)
def generate(
    run: Annotated[
        Path,
        typer.Argument(
            metavar="RUN",
            help="A run's folder, or one in Hugging Face's layout.",
            show_default=False,
        ),
    ],
    prompt: Annotated[str, typer.Option(help="The text to continue.")] = "",
    max_tokens: Annotated[int, typer.Option(help="The most tokens to write.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.")] = 1.0,
    top_k: Annotated[
        int | None, typer.Option(help="Draw from this many likeliest tokens.", show_default="all")
    ] = None,
    top_p: Annotated[float, typer.Option(help="Draw from tokens of this joint probability.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="Least share of the likeliest's probability.")] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1: repeat less.")] = 1.0,
    stop: Annotated[
        list[str] | None, typer.Option(help="End before this text; may be given several times.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the draws.")] = 0,
    step: Annotated[
        int | None, typer.Option(help="The checkpoint of this update.", show_default="the best")
    ] = None,
    device: Annotated[str, typer.Option(help="As in train.device.")] = "auto",
) -> None:
    """Continue a text with a trained decoder, and print it as it is written."""
    from megalith.generate import Sampling, load_for_generation, stream

    sampling = Sampling(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        stop=tuple(stop or ()),
        seed=seed,
    )
    model, tokenizer, _ = load_for_generation(run, step=step, device=device)
    pieces = stream(model, tokenizer, prompt, sampling)
    # What a model writes may hold escape codes, and a terminal obeys those.
    shown = printable if sys.stdout.isatty() else str
    for piece in itertools.chain([prompt], pieces):
        print(shown(piece), end="", flush=True)
    print()


@app.command(
    epilog=examples(
        "megalith export runs/gpt-stdlib exported",
        "megalith export runs/gpt-stdlib exported --step 200",
    )
)
def export(
    run: RunFolderPath,
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="Where to write.", show_default=False)
    ],
    step: Annotated[
        int | None, typer.Option(help="The checkpoint of this update.", show_default="the best")
    ] = None,
) -> None:
    """Write a run's weights in the layout that transformers or torchvision reads."""
    from megalith.hub import export as exported

    for path in exported(run, folder, step):
        print(path)


@app.command(epilog=examples("megalith report runs/gpt-stdlib"))
def report(run: RunFolderPath) -> None:
    """Write report.html again, also while the run goes on."""
    from megalith.core.runs import existing_run
    from megalith.train.report import write_report

    print(write_report(existing_run(run)))
