"""The training loop: data into the step, numbers out of it, state to disk."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from megalith import checkpoint
from megalith.core import devices, launch
from megalith.core.errors import TrainingError
from megalith.core.runs import RunFolder
from megalith.core.world import World, found, join, leave, own_device
from megalith.data.corpus import Progress as DataProgress
from megalith.data.loader import Loader, validation_shares
from megalith.data.prepare import prepare
from megalith.layout.mesh import build as build_mesh
from megalith.layout.pieces import local
from megalith.layout.units import named_parameters
from megalith.optim.clip import nonfinite
from megalith.recipe import Recipe
from megalith.step import Measured
from megalith.tasks import Batch
from megalith.train.evaluate import evaluate, without_targets
from megalith.train.figures import Figures
from megalith.train.metrics import MetricsWriter
from megalith.train.predicted import Beside
from megalith.train.progress import Progress
from megalith.train.ranks import (
    Unheard,
    agree_to_stop,
    everyones,
    fitted,
    late_is_said,
    on_main,
)
from megalith.train.report import write_report
from megalith.train.sample import trim_samples, write_sample
from megalith.train.setup import Session, check_recipe, claimed, open_session, saved_state
from megalith.train.signals import StopRequest, stop_requests

Status = Literal["done", "early_stop", "interrupted"]


@dataclass(frozen=True)
class Run:
    """A run that has ended.

    Attributes:
        status: why it ended.
        signal: the signal's number when it was interrupted.
        validation: the last evaluation's metrics.
        sample: what the model wrote at the last evaluation, if the recipe has a prompt.
        model: with the weights of the last update; ``None`` after a run on several ranks, whose
            weights are in its checkpoints.
    """

    folder: Path
    status: Status
    step: int
    validation: dict[str, float]
    report: Path
    model: Any
    tokenizer: Any = None
    sample: str | None = None
    signal: int | None = None


def train(
    recipe: Recipe,
    *,
    resume: bool = False,
    overwrite: bool = False,
    progress: DataProgress | None = None,
) -> Run:
    """Train as ``recipe`` says, and return the run when it has ended.

    Args:
        resume: go on from the newest whole checkpoint in ``run.dir``; from the start if none.
        overwrite: start over in a folder that holds a run.
        progress: called as ``progress(what, done, total)`` while data is prepared.

    Raises:
        MegalithError: the recipe, its data or its run folder cannot be used, or training broke
            down; one line says what to do.
    """
    device = check_recipe(recipe)
    folder = RunFolder(Path(recipe.run.dir))
    world = found()
    if world is not None and max(world.size, recipe.layout.ranks) > 1:
        recipe, note = fitted(recipe, world.size)
        layout = recipe.layout
        device = join(world, device, layout.backend, layout.timeout)
        try:
            with late_is_said(world, layout.timeout):
                return _train_here(
                    recipe, device, world, resume, overwrite, progress, [note] if note else []
                )
        finally:
            leave()
    with claimed(folder, resume=resume, overwrite=overwrite):
        if recipe.layout.ranks > 1:
            return _start_ranks(recipe, device, resume, progress)
        with stop_requests() as stop:
            session = open_session(recipe, device, resume=resume, progress=progress)
            return _Loop(session, stop).run()


def _start_ranks(
    recipe: Recipe, device: torch.device, resume: bool, progress: DataProgress | None
) -> Run:
    """Start this machine's ranks, which find the data prepared, and wait for their end."""
    layout = recipe.layout
    splits = prepare(recipe.data, recipe.train.seed, progress)
    run = launch.start(
        layout.ranks,
        _started_rank,
        (recipe, resume),
        device=device.type,
        backend=layout.backend,
        timeout=layout.timeout,
        restarts=layout.restarts,
        logs=RunFolder(Path(recipe.run.dir)).logs,
        preload=("megalith.models.decoder", "megalith.models.resnet"),
    )
    return replace(run, tokenizer=splits.tokenizer)


def _started_rank(recipe: Recipe, resume: bool) -> Run | None:
    """What each rank does that :func:`_start_ranks` has started; the parent holds the folder."""
    world = found()
    assert world is not None
    device = own_device(world, devices.pick(recipe.train.device))
    return _train_here(recipe, device, world, resume)


def _train_here(
    recipe: Recipe,
    device: torch.device,
    world: World,
    resume: bool,
    overwrite: bool | None = None,
    progress: DataProgress | None = None,
    notes: Sequence[str] = (),
) -> Run:
    """Train as one of the ranks that have joined.

    Args:
        overwrite: ``None``: the run folder is held already.
    """
    mesh = build_mesh(recipe.layout, device)
    resume = resume or world.restart > 0
    hold = nullcontext()
    if overwrite is not None:
        hold = claimed(RunFolder(Path(recipe.run.dir)), resume=resume, overwrite=overwrite)
    with on_main(mesh, hold, "run.dir"), stop_requests() as stop:
        session = open_session(
            recipe,
            device,
            resume=resume,
            progress=progress if mesh.main else None,
            mesh=mesh,
            notes=notes,
        )
        run = _Loop(session, stop, world.local_rank).run()
    return run if mesh.size == 1 else replace(run, model=None, tokenizer=None)


class _Loop:
    """The loop's own state: where lines go, and what the current window holds."""

    def __init__(self, session: Session, stop: StopRequest, local_rank: int = 0) -> None:
        self.session, self.stop, self.mesh = session, stop, session.mesh
        self.step, self.recipe, self.folder = session.step, session.recipe, session.folder
        self.figures = Figures(session, local_rank)
        self.validation: dict[str, float] = {}
        self.sample: str | None = None
        self.bad_in_a_row = 0
        self.saved_at = session.resumed.step if session.resumed else -1

    def run(self) -> Run:
        """Train to the end; the report is written however it ends."""
        try:
            status = self._train()
        finally:
            if self.mesh.main:
                write_report(self.folder)
        return Run(
            folder=self.folder.path,
            status=status,
            step=self.step.done,
            validation=self.validation,
            report=self.folder.report,
            model=self.step.model,
            tokenizer=self.session.splits.tokenizer,
            sample=self.sample,
            signal=int(self.stop.received) if self.stop.received else None,
        )

    def _train(self) -> Status:
        session, section = self.session, self.recipe.train
        start = self.step.done
        resume_from = start if session.resumed else None
        if self.mesh.main:
            trim_samples(self.folder, start)
            metrics = MetricsWriter(
                self.folder, resume_from=resume_from, tensorboard=self.recipe.run.tensorboard
            )
            progress = Progress(section.steps, start)
        else:
            metrics, progress = Unheard(), Unheard()
        with (
            metrics as self.metrics,
            progress as self.progress,
            self._saver() as self.saver,
            self._loader() as batches,
        ):
            for note in session.notes:
                self._event("resume" if session.resumed else "start", note)
            devices.reset_peak_memory(session.device)
            self.beside = Beside(session.recipe, session.step, session.device)
            ending: Status | None = None if self.step.done < section.steps else "done"
            while ending is None:
                self._update(batches)
                last = self.step.done == section.steps
                improved = self._evaluate() if self._due(self.recipe.evaluate.every, last) else None
                ending = self._ending(last)
                if improved or ending or self._due(self.recipe.checkpoint.every, last):
                    self._save(self.validation["loss"] if improved is not None else None)
            self._finish(ending)
        return ending

    def _loader(self) -> Loader:
        section = self.recipe.train
        return Loader(
            self.session.splits.train,
            seed=section.seed,
            batch=section.micro_batch,
            start=self.step.done * section.global_batch,
            ranks=self.mesh.data_ranks,
            rank=self.mesh.data_rank,
            workers=self.recipe.data.workers,
            pin=devices.is_accelerator(self.session.device),
        )

    def _saver(self) -> checkpoint.Saver:
        section = self.recipe.checkpoint
        return checkpoint.Saver(
            self.folder.checkpoints,
            self.mesh,
            asynchronous=section.asynchronous,
            keep=section.keep,
        )

    def _update(self, batches: Iterator[Batch]) -> None:
        with self.figures.window.timed("data"):
            micro_batches = [
                _to_device(next(batches), self.session.device)
                for _ in range(self.session.accumulation)
            ]
        with self.figures.window.timed("compute"), self.beside.update():
            measured = self.step.backward(micro_batches)
            finite = measured.finite()
            if finite:
                self.step.update(measured)
                self.bad_in_a_row = 0
                self.figures.window.add(measured)
            else:
                self._skip(measured, micro_batches)
        self.figures.window.updates += 1
        agree_to_stop(self.mesh, self.stop)
        done, every = self.step.done, self.recipe.run.log_every
        if done % every == 0 or done == self.recipe.train.steps:
            self._log(measured)

    def _skip(self, measured: Measured, micro_batches: list[Batch]) -> None:
        """Pass over an update that is not finite; too many in a row end the run."""
        self.bad_in_a_row += 1
        names = everyones(self.mesh, nonfinite(named_parameters(self.step.model)))
        samples = everyones(
            self.mesh, [i for batch in micro_batches for i in batch["sample"].tolist()]
        )
        where = f"update {self.step.done + 1}: loss {float(measured.loss):g}, gradient norm " + (
            f"{float(measured.norm):g}"
        )
        if names:
            where += f", first in '{names[0]}' ({len(names)} parameters)"
        scaling = self.step.loss_scale is not None
        self._event(
            "nonfinite",
            f"{where}; skipped" + (" and the loss scale halved" if scaling else ""),
            show=not scaling,
            parameters=names[:20],
            samples=samples,
        )
        self.step.skip()
        if self.bad_in_a_row >= self.recipe.train.nonfinite_limit:
            newest = checkpoint.newest_whole(self.folder.checkpoints)
            kept = f"the last checkpoint is {newest.path}" if newest else "no checkpoint was made"
            raise TrainingError(
                f"train: {self.bad_in_a_row} updates in a row were not finite; {where}; "
                f"samples {samples[:8]}{'...' if len(samples) > 8 else ''}; {kept}"
            )

    def _log(self, measured: Measured) -> None:
        values = self.figures.line(measured)
        if values is not None:
            self.metrics.write("train", self.step.done, **values)
            self.progress.update(self.step.done, values)

    def _evaluate(self) -> bool:
        """Evaluate; true if the validation loss is the best so far."""
        section = self.recipe.evaluate
        with self.figures.window.timed("evaluate"):
            shares = validation_shares(
                self.session.splits.validation,
                self.recipe.train.micro_batch,
                section.samples,
                ranks=self.mesh.data_ranks,
                rank=self.mesh.data_rank,
            )
            batches = (
                batch if own else without_targets(batch, self.step.task) for batch, own in shares
            )
            self.validation = evaluate(
                self.step, (_to_device(batch, self.session.device) for batch in batches)
            )
            best = self.session.improvement.see(self.validation["loss"])
            self.metrics.write("validation", self.step.done, **self.validation, best=best)
            shown = {f"validation_{k}" if k == "loss" else k: v for k, v in self.validation.items()}
            self.progress.update(self.step.done, shown)
            if section.prompt is not None:
                self.sample = write_sample(self.session, section.prompt)
            if self.mesh.main:
                write_report(self.folder)
        return best

    def _due(self, every: int, last: bool) -> bool:
        return last or (every > 0 and self.step.done % every == 0)

    def _ending(self, last: bool) -> Status | None:
        if self.stop.received is not None:
            return "interrupted"
        if self.session.improvement.exhausted:
            return "early_stop"
        return "done" if last else None

    def _save(self, validation_loss: float | None) -> None:
        if self.saved_at == self.step.done:
            return
        if not self._weights_are_finite():
            self._event("nonfinite", "weights are not finite: no checkpoint, the last one stays")
            return
        with self.figures.window.timed("save"):
            self.saver.save(
                self.step.done, self.step.pieces(), saved_state(self.session, validation_loss)
            )
        self.saved_at = self.step.done
        path = self.folder.checkpoints / f"step-{self.step.done:08d}"
        self._event("checkpoint", f"saved {path}", show=False)

    def _weights_are_finite(self) -> bool:
        bad = sum(not local(p).isfinite().all() for p in self.step.model.parameters())
        return not float(self.mesh.sum_(torch.tensor(float(bad))))

    def _finish(self, status: Status) -> None:
        improvement = self.session.improvement
        if status == "interrupted" and self.stop.received is not None:
            self._event("interrupted", f"{self.stop.received.name}: saved update {self.step.done}")
        elif status == "early_stop":
            self._event(
                "early_stop",
                f"no improvement on {improvement.best:.4f} in {improvement.since} evaluations",
            )
        else:
            self._event("done", f"{self.step.done} updates", show=False)
            beside = self.beside.compared(self.figures.update_seconds)
            if beside is not None:
                self._event("plan", beside.line(), **asdict(beside))

    def _event(self, event: str, message: str, *, show: bool = True, **values: Any) -> None:
        self.metrics.write("event", self.step.done, event=event, message=message, **values)
        if show:
            self.progress.note(message)


def _to_device(batch: Batch, device: torch.device) -> Batch:
    return {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
