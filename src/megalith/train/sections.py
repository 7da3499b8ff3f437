"""The parts of the report: what each says about a run, as texts, numbers and curves."""

from __future__ import annotations

import math
import os
import shlex
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megalith.checkpoint.store import best, entries
from megalith.core import units
from megalith.train import charts
from megalith.train.charts import Chart, Form, Line
from megalith.train.history import History, Values, column, is_number

_SAMPLES = 40  # texts on the page; a long run's are thinned evenly
_EVENTS = 200
_MARKS = 50
_MARKED = {"resume", "early_stop", "interrupted", "nonfinite"}
_NAMES = {"nonfinite": "Not finite"}
_PARTS = {
    "compute": "Forward, backward, update",
    "data": "Waiting for data",
    "evaluate": "Evaluating",
    "save": "Saving checkpoints",
}
_FIRST = ("bits_per_byte", "accuracy")
_SHARES = ("accuracy", "top1", "top5", "f1", "precision", "recall")
_NOT_METRICS = {"kind", "step", "time", "loss", "best", "nonfinite", "count", "seconds"}


@dataclass(frozen=True)
class Part:
    """One part of the step time: its share is of the whole, from 0 to 1."""

    label: str
    colour: str
    seconds: str
    share: float
    percent: str
    per_update: str


def verdict(run: History) -> str:
    """How the run went, in a line or two."""
    steps = run.setting("train.steps", run.step)
    took = run.total("seconds")
    during = f" in {units.duration(took)}" if took else ""
    state = f"At {run.step:,} of {steps:,} updates{during}."
    ends = {e["event"] for e in run.events if e["step"] == run.step and "event" in e}
    if run.step >= steps and "done" in ends:
        state = f"Finished {run.step:,} updates{during}."
    elif "early_stop" in ends:
        state = f"Stopped early at {run.step:,} of {steps:,} updates{during}."
    elif "interrupted" in ends:
        state = f"Interrupted at {run.step:,} of {steps:,} updates{during}."
    top, known = run.best, [e for e in run.validation if is_number(e.get("loss"))]
    if top is None:
        losses = [e["loss"] for e in run.train if is_number(e.get("loss"))]
        if not losses:
            return f"{state} Nothing is measured yet."
        return f"{state} Training loss {_loss(losses[-1])}; no validation yet."
    text = f"{state} Best validation loss {_loss(top['loss'])} at step {top['step']:,}"
    if known[-1]["step"] == top["step"]:
        return f"{text}, the last one."
    return f"{text}; the last, at step {known[-1]['step']:,}, is {_loss(known[-1]['loss'])}."


def about(run: History) -> str:
    """The recipe in one line."""
    get = run.setting
    model = [get("model.factory") or get("model.family", "")]
    model += [get("model.preset") or get("model.path") or ""]
    if get("model.layers"):
        model += [f"{get('model.layers')} layers of {get('model.width')}"]
    data = [get("data.factory") or get("data.source", ""), get("data.tokenizer", "")]
    if get("data.sequence"):
        data += [f"{get('data.sequence')} tokens a sample"]
    optim = [get("optim.factory") or get("optim.name", ""), get("optim.schedule", "")]
    train = [get("train.precision", ""), run.environment.get("device", "")]
    if is_number(count := run.environment.get("parameters")):
        model += [f"{units.quantity(count)} parameters"]
    groups = [[str(part) for part in group if part] for group in (model, data, optim, train)]
    return " · ".join(", ".join(group) for group in groups if group)


def tiles(run: History) -> list[tuple[str, str, str]]:
    """Label, value and note of each figure that the run knows."""
    found: list[tuple[str, str, str]] = []
    top = run.best
    if top is not None:
        found.append(("Best validation loss", _loss(top["loss"]), f"step {top['step']:,}"))
        for name in _task_metrics(run)[:2]:
            if is_number(top.get(name)):
                value = charts.show(top[name], _form(name))
                found.append((_words(name), value, "at the best step"))
    if len(losses := _finite(column(run.train, "loss"))):
        found.append(("Training loss", _loss(losses[-1]), f"from {_loss(losses[0])}"))
    if len(rates := _finite(_rates(run))):
        value = units.quantity(float(np.median(rates)))
        found.append(("Throughput", value, f"median {run.item}/s"))
    if len(used := _finite(column(run.train, "mfu"))):
        value = units.percent(float(np.median(used)))
        found.append(("MFU", value, "of the matmul peak"))
    if len(memory := _finite(column(run.train, "peak_memory"))):
        found.append(("Peak memory", units.size(memory.max()), "largest seen"))
    if (took := run.total("seconds")) and run.step:
        found.append(("Time", units.duration(took), f"{units.duration(took / run.step)} an update"))
    if (batch := run.setting("train.global_batch")) and run.step:
        length = run.setting("data.sequence")
        value = units.quantity(run.step * batch * (length or 1))
        what = "tokens" if length else "samples"
        found.append(("Seen", value, f"{what} in {run.step:,} updates"))
    if joules := run.total("energy_joules"):
        found.append(("Energy", f"{units.number(joules / 3600, 3)} Wh", "by the machine's meter"))
    for name, label, note in (
        ("skipped", "Skipped updates", "not finite"),
        ("recompiles", "Recompiles", "by torch.compile"),
    ):
        counts = _finite(column(run.train, name))
        if len(counts) and counts.max():
            found.append((label, f"{counts.max():,.0f}", note))
    return found


def curves(run: History) -> list[Chart]:
    """Every curve that the run has numbers for; the loss comes first."""
    end = run.step
    found = [_loss_chart(run)]
    for name in _task_metrics(run):
        if name == "perplexity":  # the exponential of the loss: the same curve once more
            continue
        lines = [
            Line("training", *column(run.train, name), "c1"),
            Line("validation", *column(run.validation, name), "c2", "dots"),
        ]
        found.append(charts.chart(_words(name), lines, end=end, form=_form(name)))

    def add(title: str, label: str, values: Values, colour: str, form: Form = "number") -> None:
        line = Line(label, *values, colour)
        log = title == "Gradient norm"
        found.append(charts.chart(title, [line], end=end, form=form, log=log, from_zero=True))

    add("Learning rate", "base rate", column(run.train, "lr"), "c3")
    add("Gradient norm", "before clipping", column(run.train, "grad_norm"), "c4")
    add("Loss scale", "fp16", column(run.train, "loss_scale"), "c4", "quantity")
    add("Throughput", f"{run.item} per second", _rates(run), "c1", "quantity")
    add("Model FLOP utilisation", "of the matmul peak", column(run.train, "mfu"), "c1", "percent")
    add("Peak memory", "so far", column(run.train, "peak_memory"), "c3", "size")
    return [chart for chart in found if chart is not None]


def _loss_chart(run: History) -> Chart | None:
    steps, losses = column(run.train, "loss")
    window = max(5, len(losses) // 40)
    if len(losses) > 2 * window:
        lines = [
            Line("training", steps, losses, "c1", "faint"),
            Line("smoothed", steps, charts.smooth(losses, window), "c1"),
        ]
    else:
        lines = [Line("training", steps, losses, "c1")]
    lines.append(Line("validation", *column(run.validation, "loss"), "c2", "dots"))
    if run.best is not None and len(run.validation) > 1:
        at, value = np.array([run.best["step"]]), np.array([float(run.best["loss"])])
        lines.append(Line("best", at, value, "c2", "best"))
    marks = [
        (e["step"], f"{_words(e['event'])} at step {e['step']:,}")
        for e in run.events
        if e.get("event") in _MARKED
    ]
    return charts.chart("Loss", lines, end=run.step, form="loss", log=True, marks=marks[-_MARKS:])


def time_split(run: History) -> list[Part]:
    """Where the wall time of training went; empty when the run did not tell."""
    spent = {label: run.total(f"seconds_{name}") for name, label in _PARTS.items()}
    if not any(spent.values()):
        return []
    whole = max(run.total("seconds"), sum(spent.values()))
    spent["Everything else"] = whole - sum(spent.values())
    return [
        Part(
            label=label,
            colour=f"c{i + 1}",
            seconds=units.duration(seconds),
            share=seconds / whole,
            percent=f"{seconds / whole:.1%}".replace("%", " %"),
            per_update=units.duration(seconds / max(run.step, 1)),
        )
        for i, (label, seconds) in enumerate(spent.items())
        if seconds > 0
    ]


@dataclass(frozen=True)
class Planned:
    """A quantity that was planned and measured.

    Attributes:
        planned: bars that together make the planned one: label, colour and share of the longest.
        measured: share of the longest.
    """

    name: str
    planned: list[tuple[str, str, float]]
    measured: float
    words: tuple[str, str, str]


def planned(run: History) -> list[Planned]:
    """What the planner said beside what happened; empty for a run that was not planned."""
    told = next((e for e in reversed(run.events) if e.get("event") == "plan"), {})
    kinds = told.get("kinds")
    parts = sorted(kinds.items(), key=lambda kind: -kind[1]) if isinstance(kinds, dict) else []
    rows = (
        ("Memory of a rank", "memory", units.size, parts),
        ("Time of an update", "seconds", units.duration, []),
    )
    found = []
    for name, field, show, inside in rows:
        said, saw = told.get(f"predicted_{field}"), told.get(f"measured_{field}")
        if not (is_number(said) and is_number(saw) and min(said, saw) > 0):
            continue
        longest = max(said, saw)
        bars = [
            (f"{k}, {show(v)}", f"c{1 + n % 4}", v / longest) for n, (k, v) in enumerate(inside)
        ]
        found.append(
            Planned(
                name=name,
                planned=bars or [(show(said), "c1", said / longest)],
                measured=saw / longest,
                words=(show(said), show(saw), f"{said / saw - 1:+.1%}".replace("%", " %")),
            )
        )
    return found


def texts(run: History) -> list[tuple[str, str, str]]:
    """Step, prompt and continuation of the samples, the newest first."""
    chosen = run.samples
    if len(chosen) > _SAMPLES:
        index = np.linspace(0, len(chosen) - 1, _SAMPLES).round().astype(int)
        chosen = [chosen[i] for i in index]
    found = []
    for sample in reversed(chosen):
        prompt = str(sample.get("prompt") or "")
        step = sample.get("step")
        where = f"{step:,}" if isinstance(step, int) else "?"
        found.append((where, prompt, sample["text"].removeprefix(prompt)))
    return found


def events(run: History) -> list[tuple[str, str, str, str]]:
    """Step, time, name and message of the newest events, oldest first.

    Checkpoints and the plan are left out: they have a place of their own.
    """
    rows = []
    shown = [e for e in run.events if e.get("event") not in ("checkpoint", "plan")]
    for event in shown[-_EVENTS:]:
        known = {"kind", "step", "time", "event", "message"}
        rest = [f"{k} = {v}" for k, v in event.items() if k not in known]
        message = "; ".join([*filter(None, [str(event.get("message") or "")]), *rest])
        at = event.get("time")
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at)) if is_number(at) else ""
        rows.append((f"{event['step']:,}", when, _words(str(event.get("event", "event"))), message))
    return rows


def checkpoints(run: History) -> list[tuple[str, str, str, str, bool]]:
    """Name, step, size, validation loss and whether it is the best, oldest first."""
    losses = {e["step"]: e["loss"] for e in run.validation if is_number(e.get("loss"))}
    found = entries(run.folder.checkpoints)
    top = best(found)
    rows = []
    for entry in found:
        loss = entry.validation_loss
        loss = losses.get(entry.step) if loss is None else loss
        try:
            weight = units.size(entry.bytes)
        except FileNotFoundError:  # a run that goes on has just removed it
            continue
        shown = "" if loss is None else _loss(loss)
        rows.append((entry.path.name, f"{entry.step:,}", weight, shown, entry is top))
    return rows


def commands(run: History) -> list[tuple[str, str]]:
    """What each command does, and the command, to be run where the run was started."""
    where = _here(run)
    recipe = shlex.quote(str(Path(where) / "recipe.toml"))
    moved = [] if run.setting("run.dir") in (None, where) else [f"run.dir={shlex.quote(where)}"]
    further = 2 * run.setting("train.steps", max(run.step, 1))

    def train(*overrides: str) -> str:
        return " ".join(["megalith train", recipe, *moved, *overrides, "--resume"])

    found = [("Resume after an interruption", train())]
    if run.step >= run.setting("train.steps", math.inf):  # nothing is left to resume
        found = []
    found.append(("Continue for as long again", train(f"train.steps={further}")))
    if run.setting("task.name", "language") == "language" and run.setting("data.tokenizer"):
        prompt = shlex.quote(run.setting("evaluate.prompt") or "def ")
        found.append(("Generate text", f"megalith generate {shlex.quote(where)} --prompt {prompt}"))
    return found


def flat(value: Any, path: str = "") -> list[tuple[str, str]]:
    """Nested values as dotted names and texts."""
    if isinstance(value, dict):
        return [row for k, v in value.items() for row in flat(v, f"{path}.{k}" if path else str(k))]
    if isinstance(value, list):
        return [(path, ", ".join(str(v) for v in value))]
    if is_number(value):
        if path.endswith("bytes"):
            return [(path, units.size(value))]
        if "flops" in path:
            return [(path, units.quantity(value))]
        return [(path, f"{value:,}")]
    return [(path, "" if value is None else str(value))]


def _here(run: History) -> str:
    """The run folder as a command should name it."""
    path = run.folder.path
    recorded = run.setting("run.dir")
    if isinstance(recorded, str) and Path(recorded).resolve() == path.resolve():
        return recorded
    relative = os.path.relpath(path)
    return str(path.resolve()) if relative.startswith("..") else relative


def _finite(values: Values) -> np.ndarray:
    return values[1][np.isfinite(values[1])]


def _rates(run: History) -> Values:
    return column(run.train, f"{run.item}_per_s")


def _task_metrics(run: History) -> list[str]:
    """Names of the numbers on validation lines that only this task has, in their order."""
    names = {
        name: None
        for entry in run.validation
        for name, value in entry.items()
        if name not in _NOT_METRICS and is_number(value)
    }
    return sorted(names, key=lambda name: name not in _FIRST)[:6]


def _form(name: str) -> Form:
    return "percent" if name.endswith(_SHARES) else "number"


def _words(name: str) -> str:
    return _NAMES.get(name) or name.replace("_", " ").strip().capitalize()


def _loss(value: float) -> str:
    return charts.show(value, "loss")
