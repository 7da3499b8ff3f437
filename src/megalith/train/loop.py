"""The training loop: data into the step, numbers out of it, state to disk."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from megalith import checkpoint
from megalith.core import devices
from megalith.core.energy import EnergyMeter
from megalith.core.errors import TrainingError
from megalith.core.runs import RunFolder
from megalith.data.corpus import Progress as DataProgress
from megalith.data.loader import Loader, validation_batches
from megalith.layout.compile import graphs_compiled
from megalith.optim.clip import nonfinite
from megalith.recipe import Recipe
from megalith.step import Measured
from megalith.tasks import Batch
from megalith.train.evaluate import evaluate
from megalith.train.metrics import MetricsWriter
from megalith.train.progress import Progress
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
        model: with the weights of the last update.
    """

    folder: Path
    status: Status
    step: int
    validation: dict[str, float]
    report: Path
    model: nn.Module
    tokenizer: Any = None
    sample: str | None = None
    signal: int | None = None


@dataclass
class _Window:
    """What happened since the last line of metrics."""

    loss: float = 0.0
    count: int = 0
    updates: int = 0
    seconds: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(("data", "compute", "save", "evaluate"), 0.0)
    )
    start: float = field(default_factory=time.perf_counter)

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[part] += time.perf_counter() - start


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
    with claimed(folder, resume=resume, overwrite=overwrite), stop_requests() as stop:
        session = open_session(recipe, device, resume=resume, progress=progress)
        return _Loop(session, stop).run()


class _Loop:
    """The loop's own state: where lines go, and what the current window holds."""

    def __init__(self, session: Session, stop: StopRequest) -> None:
        self.session, self.stop = session, stop
        self.step, self.recipe, self.folder = session.step, session.recipe, session.folder
        self.window = _Window()
        self.validation: dict[str, float] = {}
        self.sample: str | None = None
        self.bad_in_a_row = 0
        self.saved_at = session.resumed.step if session.resumed else -1
        self.graphs_before = graphs_compiled()
        self.energy = EnergyMeter(session.device)

    def run(self) -> Run:
        """Train to the end; the report is written however it ends."""
        try:
            status = self._train()
        finally:
            report = write_report(self.folder)
        return Run(
            folder=self.folder.path,
            status=status,
            step=self.step.done,
            validation=self.validation,
            report=report,
            model=self.step.model,
            tokenizer=self.session.splits.tokenizer,
            sample=self.sample,
            signal=int(self.stop.received) if self.stop.received else None,
        )

    def _train(self) -> Status:
        session, section = self.session, self.recipe.train
        start = self.step.done
        resume_from = start if session.resumed else None
        trim_samples(self.folder, start)
        with (
            MetricsWriter(
                self.folder, resume_from=resume_from, tensorboard=self.recipe.run.tensorboard
            ) as self.metrics,
            Progress(section.steps, start) as self.progress,
            self._loader() as batches,
        ):
            for note in session.notes:
                self._event("resume" if session.resumed else "start", note)
            devices.reset_peak_memory(session.device)
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
            workers=self.recipe.data.workers,
            pin=devices.is_accelerator(self.session.device),
        )

    def _update(self, batches: Iterator[Batch]) -> None:
        with self.window.timed("data"):
            micro_batches = [
                _to_device(next(batches), self.session.device)
                for _ in range(self.session.accumulation)
            ]
        with self.window.timed("compute"):
            measured = self.step.backward(micro_batches)
            finite = measured.finite()
            if finite:
                self.step.update(measured)
                self.bad_in_a_row = 0
                self.window.loss += float(measured.loss) * int(measured.count)
                self.window.count += int(measured.count)
            else:
                self._skip(measured, micro_batches)
        self.window.updates += 1
        done, every = self.step.done, self.recipe.run.log_every
        if done % every == 0 or done == self.recipe.train.steps:
            self._log(measured)

    def _skip(self, measured: Measured, micro_batches: list[Batch]) -> None:
        """Pass over an update that is not finite; too many in a row end the run."""
        self.bad_in_a_row += 1
        names = nonfinite(self.step.model.named_parameters())
        samples = [i for batch in micro_batches for i in batch["sample"].tolist()]
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
        window, step, session = self.window, self.step, self.session
        elapsed = time.perf_counter() - window.start
        compute = window.seconds["compute"]
        values: dict[str, Any] = {
            "loss": window.loss / window.count if window.count else float("nan"),
            "lr": self.recipe.optim.lr * step.schedule(step.done - 1),
            "grad_norm": float(measured.norm),
            f"{step.task.item}_per_s": window.count / (window.seconds["data"] + compute),
            "peak_memory": devices.peak_memory(session.device),
            "skipped": step.skipped,
            "seconds": elapsed,
            **{f"seconds_{part}": value for part, value in window.seconds.items()},
        }
        if session.flops:
            values["mfu"] = self._mfu(session.flops * window.updates / compute)
        if step.loss_scale is not None:
            values["loss_scale"] = step.loss_scale.scale
        if self.recipe.train.compile:
            values["recompiles"] = max(0, graphs_compiled() - self.graphs_before - 1)
        joules = self.energy.read()
        if joules is not None:
            values["energy_joules"] = joules
        self.metrics.write("train", step.done, **values)
        self.progress.update(step.done, values)
        self.window = _Window()

    def _mfu(self, rate: float) -> float:
        """``rate`` FLOP/s as a share of the device's peak, which other processes may have hidden.

        A peak below what was just reached was measured while the device was busy: once more, then.
        """
        if rate > self.session.peak:
            precision = self.step.precision
            again = devices.matmul_peak(self.session.device, precision.computing_dtype)
            self.session.peak = max(self.session.peak, again)
        return rate / self.session.peak

    def _evaluate(self) -> bool:
        """Evaluate; true if the validation loss is the best so far."""
        section = self.recipe.evaluate
        with self.window.timed("evaluate"):
            batches = validation_batches(
                self.session.splits.validation, self.recipe.train.micro_batch, section.batches
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
        if not all(p.isfinite().all() for p in self.step.model.parameters()):
            self._event("nonfinite", "weights are not finite: no checkpoint, the last one stays")
            return
        with self.window.timed("save"):
            path = checkpoint.save(
                self.folder.checkpoints,
                self.step.done,
                checkpoint.tensors(self.step),
                saved_state(self.session, validation_loss),
            )
            checkpoint.prune(self.folder.checkpoints, self.recipe.checkpoint.keep)
        self.saved_at = self.step.done
        self._event("checkpoint", f"saved {path}", show=False)

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

    def _event(self, event: str, message: str, *, show: bool = True, **values: Any) -> None:
        self.metrics.write("event", self.step.done, event=event, message=message, **values)
        if show:
            self.progress.note(message)


def _to_device(batch: Batch, device: torch.device) -> Batch:
    return {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
