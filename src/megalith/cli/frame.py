"""What the verbs share: how errors end, common arguments, examples, and bars of progress."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import typer.core

from megalith.core.errors import MegalithError

if TYPE_CHECKING:
    from collections.abc import Callable


class Verbs(typer.core.TyperGroup):
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


def examples(*lines: str) -> str:
    """The end of a verb's help: command lines that work."""
    return "\n".join(["[bold]Examples[/bold]", *(f"  {line}" for line in lines)])


def printable(text: str) -> str:
    return "".join(
        c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text
    )


class Preparation:
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
