"""From a recipe to a run that is ready for its next update."""

from __future__ import annotations

import fcntl
import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megalith import checkpoint, models, step
from megalith.core import devices, environment
from megalith.core.errors import CheckpointError, TrainingError
from megalith.core.runs import RunFolder, write_whole
from megalith.data import Splits
from megalith.data.corpus import Progress
from megalith.data.loader import validation_batches
from megalith.data.prepare import check_sources, prepare
from megalith.layout.mesh import Mesh, single
from megalith.layout.units import models as parts_of
from megalith.layout.units import named_parameters
from megalith.recipe import Recipe
from megalith.recipe.check import check
from megalith.recipe.dump import dump
from megalith.train.evaluate import Improvement
from megalith.train.flops import model_flops
from megalith.train.resume import changes
from megalith.train.sample import check_sampling


@dataclass
class Session:
    """A run between two updates.

    Attributes:
        resumed: the checkpoint it came from, if it was resumed from one.
        notes: what to tell the user about the start.
        flops: of one update, or ``None`` where they could not be counted.
        peak: the device's measured matmul rate in the recipe's precision, FLOP/s; on a rank that
            does not speak, infinite.
    """

    recipe: Recipe
    folder: RunFolder
    device: torch.device
    splits: Splits
    step: step.Step
    improvement: Improvement
    resumed: checkpoint.Entry | None
    notes: list[str]
    flops: int | None
    peak: float

    @property
    def accumulation(self) -> int:
        """Micro-batches of this rank per update."""
        train = self.recipe.train
        return train.global_batch // (train.micro_batch * self.mesh.data_ranks)

    @property
    def mesh(self) -> Mesh:
        """Where this rank stands."""
        return self.step.mesh


def check_recipe(recipe: Recipe) -> torch.device:
    """Refuse what can be refused before any work; returns the device to train on."""
    check(recipe)
    check_sources(recipe.data)
    return devices.pick(recipe.train.device)


@contextmanager
def claimed(folder: RunFolder, *, resume: bool, overwrite: bool) -> Iterator[None]:
    """Hold the run folder for this process alone.

    Raises:
        TrainingError: it holds a run that is neither resumed nor overwritten, or another process
            is at work in it.
    """
    if folder.holds_a_run() and not resume and not overwrite:
        raise TrainingError(
            f"run.dir: {folder.path} holds a run; add --resume to go on, --overwrite to start "
            "over, or choose another run.dir"
        )
    folder.path.mkdir(parents=True, exist_ok=True)
    with (folder.path / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise TrainingError(f"run.dir: another process trains in {folder.path}") from error
        if overwrite and not resume:
            _clear(folder)
        yield


def open_session(
    recipe: Recipe,
    device: torch.device,
    *,
    resume: bool,
    progress: Progress | None = None,
    mesh: Mesh | None = None,
    notes: Sequence[str] = (),
) -> Session:
    """Prepare data, build the step, and restore the newest whole checkpoint if ``resume``.

    Args:
        mesh: left out: one process. All its ranks call this.
        notes: what to tell the user besides.
    """
    mesh = mesh or single()
    folder = RunFolder(Path(recipe.run.dir))
    splits = prepare(recipe.data, recipe.train.seed, progress)
    config = models.resolve(recipe.model, splits.facts)
    recipe = recipe.model_copy(update={"model": config})
    entry = checkpoint.newest_whole(folder.checkpoints, mesh) if resume else None
    notes = [*notes, *(_check_same_run(entry, recipe, splits) if entry else [])]
    built = step.build(recipe, splits.facts, device, mesh)
    check_sampling(recipe, parts_of(built.model)[0], splits.tokenizer)
    section = recipe.evaluate
    improvement = Improvement(section.patience, section.min_delta)
    if entry is not None:
        checkpoint.restore(built, entry, mesh)
        improvement.best = entry.state["best"] if entry.state["best"] is not None else float("inf")
        improvement.since = entry.state["since"]
        notes.insert(0, f"resumed from {entry.path} at update {entry.step}")
    elif resume:
        notes.append("no whole checkpoint yet: starting from the beginning")
    if built.precision.widened:
        notes.append(
            f"this device has no {recipe.train.precision} matmul: computing in float32 on "
            "rounded values"
        )
    batch = next(iter(validation_batches(splits.validation, recipe.train.micro_batch)))
    flops = model_flops(config, recipe.task, batch)
    per_update = flops and flops * recipe.train.global_batch // len(batch["sample"])
    session = Session(
        recipe=recipe,
        folder=folder,
        device=device,
        splits=splits,
        step=built,
        improvement=improvement,
        resumed=entry,
        notes=notes,
        flops=per_update,
        # One rank measures: together they would slow each other down, and one figure is needed.
        peak=devices.matmul_peak(device, built.precision.computing_dtype)
        if mesh.main
        else float("inf"),
    )
    _write_description(session)
    return session


def saved_state(session: Session, validation_loss: float | None) -> dict[str, Any]:
    """The numbers of a checkpoint of this run."""
    best = session.improvement.best
    return {
        **checkpoint.numbers(session.step),
        "validation_loss": validation_loss,
        "best": best if best != float("inf") else None,
        "since": session.improvement.since,
        "data": session.splits.fingerprint,
        "recipe": session.recipe.model_dump(mode="json"),
    }


def _check_same_run(entry: checkpoint.Entry, recipe: Recipe, splits: Splits) -> list[str]:
    notes = [f"changed since the checkpoint: {c}" for c in changes(entry.state["recipe"], recipe)]
    if entry.state["data"] != splits.fingerprint:
        raise CheckpointError(
            f"data: the samples are not those of {entry.path} (a source has changed); "
            "restore them, or start another run (run.dir=...)"
        )
    return notes


def _write_description(session: Session) -> None:
    count = _parameters(session.step)
    if not session.mesh.main:
        return
    facts = {
        **environment.describe(session.device),
        "parameters": count,
        "ranks": session.mesh.size,
        "flops_per_update": session.flops,
        "matmul_peak_flops": session.peak,
        "item": session.step.task.item,
        "data": session.splits.description,
    }
    write_whole(session.folder.recipe, dump(session.recipe))
    write_whole(session.folder.environment, json.dumps(facts, indent=1, default=str) + "\n")
    if hasattr(session.splits.tokenizer, "to_json"):  # a factory's may be of any kind
        write_whole(session.folder.tokenizer, session.splits.tokenizer.to_json())


def _parameters(built: step.Step) -> int:
    """Numbers in the parameters of the whole model, each counted once; all ranks call it."""
    owned = built.pieces()["model"]
    count = sum(
        owned[name].tensor.numel() for name, _ in named_parameters(built.model) if owned[name].owned
    )
    return int(built.mesh.sum_(torch.tensor(count)))


def _clear(folder: RunFolder) -> None:
    """Remove what a run wrote, and nothing else that may lie in the folder."""
    for path in (
        folder.recipe,
        folder.environment,
        folder.tokenizer,
        folder.metrics,
        folder.samples,
        folder.report,
    ):
        path.unlink(missing_ok=True)
    for path in (folder.checkpoints, folder.logs, folder.path / "tensorboard"):
        if path.exists():
            shutil.rmtree(path)
