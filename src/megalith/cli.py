"""The command line: each verb parses, calls, prints and exits; the work is done elsewhere.

Modules that import torch are imported inside the verbs, so that ``megalith --help`` is quick.
"""

from __future__ import annotations

import itertools
import json
import sys
import textwrap
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import typer.core

import megalith
from megalith.core.errors import MegalithError

if TYPE_CHECKING:
    from collections.abc import Callable


class _Verbs(typer.core.TyperGroup):
    """The verbs, with one place where errors become a line and an exit code."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        # --debug is for the whole command: it counts wherever it stands.
        if "--debug" in args:
            args = ["--debug", *(word for word in args if word != "--debug")]
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        debug = bool(ctx.params.get("debug"))
        try:
            return super().invoke(ctx)
        except (typer.Exit, typer.Abort, BrokenPipeError):
            raise
        except KeyboardInterrupt:
            _fail("interrupted", debug)
            raise typer.Exit(130) from None
        except MegalithError as error:
            _fail(f"error: {error}", debug)
            raise typer.Exit(2) from None
        except Exception as error:
            if type(error).__module__.startswith(("click", "typer")):
                raise  # how the command line was used: typer explains it
            said = " ".join(f"{type(error).__name__}: {error}".split())
            _fail(f"error: unexpected {said} (add --debug to see where)", debug)
            raise typer.Exit(1) from None


def _fail(line: str, debug: bool) -> None:
    if debug:
        traceback.print_exc()
    typer.secho(line, fg=typer.colors.RED, err=True)


app = typer.Typer(
    cls=_Verbs,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Plan, train, shrink and ship large PyTorch models. One recipe file says what to do.",
)
_recipe_app = typer.Typer(no_args_is_help=True, help="Look at a recipe before it runs.")
_data_app = typer.Typer(no_args_is_help=True, help="Make data ready before a run.")
_checkpoint_app = typer.Typer(no_args_is_help=True, help="See what a run has saved.")
app.add_typer(_recipe_app, name="recipe")
app.add_typer(_data_app, name="data")
app.add_typer(_checkpoint_app, name="checkpoint")

RecipeFile = Annotated[
    str, typer.Argument(metavar="RECIPE", help="A TOML file.", show_default=False)
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="FIELD=VALUE",
        help="Fields to change, such as train.steps=200.",
        show_default=False,
    ),
]
RunFolderPath = Annotated[
    Path, typer.Argument(metavar="RUN", help="A run's folder.", show_default=False)
]


def _examples(*lines: str) -> str:
    return "\n".join(["[bold]Examples[/bold]", *(f"  {line}" for line in lines)])


def _print_version(asked: bool) -> None:
    if asked:
        print(f"megalith {megalith.__version__}")
        raise typer.Exit


@app.callback(
    epilog=_examples(
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


@app.command(
    epilog=_examples(
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
    loaded = megalith.load(recipe, *overrides or [])
    with _Preparation() as progress:
        run = megalith.train(loaded, resume=resume, overwrite=overwrite, progress=progress)
    if run.sample is not None:
        print(f"sample:\n{textwrap.indent(_printable(run.sample), '  ')}")
    print(f"{run.status.replace('_', ' ')} at update {run.step}; report: {run.report}")
    if run.signal:
        raise typer.Exit(128 + run.signal)


@_recipe_app.command(
    epilog=_examples(
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


@_recipe_app.command(
    epilog=_examples(
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


@_recipe_app.command(
    epilog=_examples(
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


@_recipe_app.command(epilog=_examples("megalith recipe schema > recipe.schema.json"))
def schema() -> None:
    """Print the recipe's JSON Schema, with which editors complete and check a recipe."""
    from megalith.recipe.explain import schema as made

    print(json.dumps(made(), indent=2))


@_data_app.command(
    epilog=_examples(
        "megalith data prepare recipes/gpt-stdlib.toml",
        "megalith data prepare recipes/gpt-stdlib.toml data.tokenizer=bpe-8192",
    )
)
def prepare(recipe: RecipeFile, overrides: Overrides = None) -> None:
    """Read the sources, train the tokenizer if need be, and write the token shards."""
    loaded = megalith.load(recipe, *overrides or [])
    from megalith.data.prepare import prepare as prepared

    with _Preparation() as progress:
        splits = prepared(loaded.data, loaded.train.seed, progress=progress)
    for name, value in {**splits.facts, **splits.description}.items():
        print(f"{name}: {value}")


@app.command(
    epilog=_examples(
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
    shown = _printable if sys.stdout.isatty() else str
    for piece in itertools.chain([prompt], pieces):
        print(shown(piece), end="", flush=True)
    print()


def _printable(text: str) -> str:
    return "".join(
        c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text
    )


@app.command(
    epilog=_examples(
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


@app.command(epilog=_examples("megalith report runs/gpt-stdlib"))
def report(run: RunFolderPath) -> None:
    """Write report.html again, also while the run goes on."""
    from megalith.core.runs import existing_run
    from megalith.train.report import write_report

    print(write_report(existing_run(run)))


@_checkpoint_app.command(name="ls", epilog=_examples("megalith checkpoint ls runs/gpt-stdlib"))
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


@app.command(epilog=_examples("megalith doctor", "megalith doctor --json"))
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


class _Preparation:
    """Shows the preparation of data: a bar on a terminal, a line for each task in a pipe."""

    def __init__(self) -> None:
        self._last = ""
        self._bar: Any = None

    def __enter__(self) -> Callable[[str, int, int], None]:
        return self._show

    def __exit__(self, *error: object) -> None:
        self._close()

    def _show(self, what: str, done: int, total: int) -> None:
        if what != self._last:
            self._close()
            self._last = what
            if sys.stderr.isatty() and total:
                self._open(what)
            else:
                print(what, file=sys.stderr, flush=True)
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=done, total=total)

    def _open(self, what: str) -> None:
        from rich.console import Console
        from rich.progress import Progress

        self._bar = Progress(console=Console(stderr=True))
        self._bar.add_task(what)
        self._bar.start()

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def main() -> None:
    """The command ``megalith``."""
    app()
