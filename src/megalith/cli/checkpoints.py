"""The verbs ``megalith checkpoint ...``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from megalith.cli.frame import RunFolderPath, examples

app = typer.Typer(no_args_is_help=True, help="See, check and convert what a run has saved.")

CheckpointStep = Annotated[
    int | None, typer.Option(help="The run's checkpoint of this update.", show_default="the newest")
]


@app.command(name="ls", epilog=examples("megalith checkpoint ls runs/gpt-stdlib"))
def checkpoint_ls(run: RunFolderPath) -> None:
    """List a run's checkpoints, oldest first, and the layout each was saved under."""
    from megalith import checkpoint
    from megalith.core import units
    from megalith.core.runs import existing_run

    found = checkpoint.entries(existing_run(run).checkpoints)
    best = checkpoint.best(found)
    for entry in found:
        loss = entry.validation_loss
        said = "" if loss is None else f"validation loss {units.number(loss, fixed=True)}"
        mark = "best" if best is not None and entry.step == best.step else ""
        columns = (
            f"update {entry.step:>8,}",
            f"{units.size(entry.bytes):>9}",
            _layout(entry.state),
            str(entry.path),
            said,
            mark,
        )
        print("  ".join(columns).rstrip())
    if not found:
        print(f"{run}: no checkpoint yet")


@app.command(
    epilog=examples(
        "megalith checkpoint verify runs/gpt-stdlib",
        "megalith checkpoint verify runs/gpt-stdlib/checkpoints/step-00000100",
    )
)
def verify(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="PATH", help="A run's folder, or one checkpoint's.", show_default=False
        ),
    ],
) -> None:
    """Check every byte, and that the files make up every tensor; names what is damaged."""
    from megalith.checkpoint import consolidate
    from megalith.core.errors import CheckpointError
    from megalith.core.runs import existing_run

    one = path.name.startswith("step-") or (path / "manifest.json").exists()
    paths = [path] if one else sorted(existing_run(path).checkpoints.glob("step-*"))
    damaged = []
    for folder in paths:
        try:
            tensors = consolidate.check(folder)
        except CheckpointError as error:
            damaged.append(str(error))
            continue
        counts = ", ".join(f"{part} {len(named)}" for part, named in tensors.items())
        print(f"{folder}: whole; tensors: {counts}")
    if not paths:
        print(f"{path}: no checkpoint yet")
    for line in damaged[:-1]:
        typer.secho(line, fg=typer.colors.RED, err=True)
    if damaged:
        raise CheckpointError(damaged[-1])


@app.command(
    epilog=examples(
        "megalith checkpoint convert runs/gpt-stdlib exported",
        "megalith checkpoint convert runs/big big-hf --step 2000 --shard-gb 2",
        "megalith checkpoint convert downloaded/Qwen3-0.6B runs/qwen",
    )
)
def convert(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="SRC",
            help="A run, one of its checkpoints, or a folder in Hugging Face's layout.",
            show_default=False,
        ),
    ],
    target: Annotated[
        Path, typer.Argument(metavar="DST", help="A new folder.", show_default=False)
    ],
    step: CheckpointStep = None,
    shard_gb: Annotated[
        float, typer.Option(help="Largest file of a folder in Hugging Face's layout, GB.", min=1e-6)
    ] = 5.0,
) -> None:
    """Turn a checkpoint into Hugging Face's layout, or such a folder into a run.

    One tensor is in memory at a time. From a run go the model's weights, averaged ones where there
    are any; to a run come the weights as its checkpoint of update 0.
    """
    from megalith.checkpoint import consolidate, hugging_face
    from megalith.core.errors import CheckpointError

    if (source / hugging_face.CONFIG).is_file():
        if step is not None:
            raise CheckpointError(f"{source}: has no steps to choose from, it is not a run folder")
        print(hugging_face.from_hugging_face(source, target))
        return
    found = consolidate.find(source, step)
    hugging_face.to_hugging_face(found, target, int(shard_gb * 1e9))
    print(f"{found} -> {target}")


@app.command(
    epilog=examples(
        "megalith checkpoint consolidate runs/gpt-stdlib whole",
        "megalith checkpoint consolidate runs/gpt-stdlib/checkpoints/step-00000100 whole",
    )
)
def consolidate(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="RUN_OR_CHECKPOINT",
            help="A run's folder, or one checkpoint's.",
            show_default=False,
        ),
    ],
    target: Annotated[
        Path, typer.Argument(metavar="OUT", help="A new folder.", show_default=False)
    ],
    step: CheckpointStep = None,
) -> None:
    """Write a checkpoint of many ranks as one process would have saved it, tensor by tensor."""
    from megalith.checkpoint import consolidate as one_process

    found = one_process.find(source, step)
    one_process.consolidate(found, target)
    print(f"{found} -> {target}")


def _layout(state: dict[str, Any]) -> str:
    """The axes that were spread, such as ``pipeline 2 x shard 4``."""
    from megalith.layout.mesh import AXES

    section = state.get("recipe", {}).get("layout", {})
    spread = [f"{axis} {section[axis]}" for axis in AXES if section.get(axis, 1) > 1]
    return " x ".join(spread) or "1 process"
