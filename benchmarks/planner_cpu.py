"""Predicted memory of real updates on this CPU, beside what they take.

    python benchmarks/planner_cpu.py              # all cases
    python benchmarks/planner_cpu.py gpt-10m      # cases whose name holds this

Rows are kept in benchmarks/results. Each prediction, each count of the allocator's events and each
resident set has a process of its own. Layouts run on gloo ranks; their rank 0 is compared. At load
4 on 2 cores the whole table takes a quarter of an hour.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import platform
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from megalith.core.launch import start
from megalith.plan import accuracy, memory
from megalith.plan.trace import Job, trace
from megalith.recipe import parse

RESULTS = Path(__file__).parent / "results" / "planner_cpu.json"
_HERE = "planner_models"
_NAMES = {
    "small-10m": "gpt-10m",
    "small-llama-10m": "llama-10m",
    "small-30m": "gpt-30m",
    "gpt2-small": "gpt-124m",
}
_HEAD = [
    "| case | predicted MiB | allocator MiB | error | resident MiB | error |",
    "|---|---|---|---|---|---|",
]
_LIMITS = {"transformer": (0.5, 5.0), "convolution": (4.0, 8.0)}  # per cent


@dataclass(frozen=True)
class Case:
    """A model, its samples, and what is different from the plain run."""

    name: str
    kind: str
    model: dict[str, Any]
    sample: dict[str, tuple[tuple[int, ...], str]]
    facts: dict[str, int]
    task: dict[str, Any] = field(default_factory=dict)
    train: dict[str, Any] = field(default_factory=dict)
    optim: dict[str, Any] = field(default_factory=dict)
    layout: dict[str, Any] = field(default_factory=dict)

    def job(self) -> Job:
        """What is traced, and what is run."""
        length = self.sample["tokens"][0][0] if "tokens" in self.sample else 0
        data = {"sequence": length} if length else {"source": "digits"}
        recipe = parse(
            {
                "model": self.model,
                "data": data,
                "task": self.task,
                "train": {"steps": 10, **self.train},
                "optim": self.optim,
                "layout": self.layout,
            }
        )
        return Job(recipe, self.facts, self.sample)


@dataclass(frozen=True)
class Row:
    """Bytes of one case."""

    case: str
    kind: str
    predicted: int
    allocated: int
    resident: int | None

    @property
    def error(self) -> float:
        """Per cent of what the allocator's events say."""
        return 100 * (self.predicted / self.allocated - 1)

    @property
    def resident_error(self) -> float | None:
        """Per cent of what the resident set says."""
        return None if self.resident is None else 100 * (self.predicted / self.resident - 1)

    @property
    def within(self) -> bool:
        """Both errors are within the limits that the project sets itself."""
        limit, loose = _LIMITS[self.kind]
        return abs(self.error) <= limit and abs(self.resident_error or 0) <= loose


def _text(length: int) -> dict[str, tuple[tuple[int, ...], str]]:
    return {"tokens": ((length,), "int64"), "targets": ((length,), "int64"), "bytes": ((), "int64")}


def _image(size: int) -> dict[str, tuple[tuple[int, ...], str]]:
    return {"image": ((3, size, size), "float32"), "target": ((), "int64")}


def cases() -> list[Case]:
    """Every case of the table."""
    found = []

    def gpt(preset: str, what: str, length: int = 256, **sections: dict[str, Any]) -> None:
        model = {"preset": preset, "context": length, **sections.pop("model", {})}
        train = {"global_batch": 4, **sections.pop("train", {})}
        optim = {"name": "adamw", **sections.pop("optim", {})}
        facts = {"vocab": 50257 if preset == "gpt2-small" else 8192}
        found.append(
            Case(
                f"{_NAMES[preset]} {what}", "transformer", model, _text(length), facts,
                train=train, optim=optim, **sections,
            )
        )  # fmt: skip

    half, full = {"precision": "bf16"}, {"checkpointing": "full"}
    selective, four = {"checkpointing": "selective"}, {"micro_batch": 1}
    gpt("small-10m", "fp32")
    gpt("small-10m", "bf16", train=half)
    gpt("small-10m", "fp32, checkpointing selective", train=selective)
    gpt("small-10m", "bf16, checkpointing selective", train={**selective, **half})
    gpt("small-10m", "fp32, checkpointing full", train=full)
    gpt("small-10m", "bf16, checkpointing full", train={**full, **half})
    gpt("small-10m", "fp32, 4 micro-batches", train=four)
    gpt("small-10m", "bf16, 4 micro-batches", train={**four, **half})
    gpt("small-10m", "fp32, dropout", model={"dropout": 0.1})
    gpt("small-10m", "fp32, sgd", optim={"name": "sgd"})
    gpt("small-10m", "fp32, averaged weights", train={"ema": 0.99})
    gpt("small-llama-10m", "bf16", train=half)
    gpt("small-30m", "fp32")
    gpt("small-30m", "bf16, dropout, checkpointing full",
        model={"dropout": 0.1}, train={**full, **half})  # fmt: skip
    gpt("gpt2-small", "fp32", 128, train={"global_batch": 2})
    gpt("gpt2-small", "bf16, checkpointing full",
        128, train={"global_batch": 2, **full, **half})  # fmt: skip
    two = {"micro_batch": 2}
    for precision in ({}, half):
        word = precision.get("precision", "fp32")
        gpt("small-10m", f"{word}, shard 2, zero 2",
            train={**two, **precision}, layout={"shard": 2, "zero": 2})  # fmt: skip
        gpt("small-10m", f"{word}, shard 2, zero 3",
            train={**two, **precision}, layout={"shard": 2})  # fmt: skip
        gpt("small-10m", f"{word}, tensor 2",
            train={**two, **precision}, layout={"tensor": 2})  # fmt: skip
        gpt("small-10m", f"{word}, pipeline 2",
            train={**four, **precision}, layout={"pipeline": 2})  # fmt: skip
    gpt("small-10m", "fp32, replicate 2", train=two, layout={"replicate": 2})
    gpt("small-30m", "bf16, shard 2, zero 3, checkpointing full",
        train={**two, **half, **full}, layout={"shard": 2})  # fmt: skip
    return found + _others()


def _others() -> list[Case]:
    """Models that are no decoders of ours."""

    def case(name: str, kind: str, model: Any, sample: Any, facts: Any, **sections: Any) -> Case:
        train = {"global_batch": 2, **sections.pop("train", {})}
        return Case(name, kind, model, sample, facts, train=train, **sections)

    half = {"precision": "bf16"}
    sgd, classify = {"name": "sgd", "lr": 0.1}, {"name": "classify"}
    bert = ("transformer", {"factory": f"{_HERE}:bert"}, _text(128), {"vocab": 30522})
    vit = ("transformer", {"factory": f"{_HERE}:vit"}, _image(224), {"classes": 1000})
    resnet = {"family": "resnet", "preset": "resnet50"}
    residual = ("convolution", resnet, _image(224), {"classes": 1000, "channels": 3})
    return [
        case("bert-base fp32", *bert),
        case("bert-base bf16", *bert, train=half),
        case("vit-base fp32", *vit, task=classify),
        case("vit-base bf16, sgd", *vit, task=classify, optim=sgd, train=half),
        case("resnet-50 fp32, sgd", *residual, task=classify, optim=sgd,
             train={"global_batch": 4}),
        case("resnet-50 bf16, sgd", *residual, task=classify, optim=sgd,
             train={"global_batch": 4, **half}),
        case("resnet-50 fp32, adamw, 2 micro-batches", *residual, task=classify,
             train={"global_batch": 8, "micro_batch": 4}),
        case("resnet-50 fp32, sgd, checkpointing full", *residual, task=classify, optim=sgd,
             train={"global_batch": 4, "checkpointing": "full"}),
    ]  # fmt: skip


def predicted(job: Job) -> int:
    """In a process of its own: the peak of the second update as it is traced."""
    return memory.read(trace(job).record, None).allocated


def fresh(work: Callable[..., Any], *args: Any) -> Any:
    """``work(*args)`` in a process that has imported everything and run nothing."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "megalith.plan.accuracy", "megalith.plan.memory"])
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(work, *args).result()


def measure(case: Case) -> Row:
    """Predict a case, run it twice, compare."""
    job = case.job()
    told = fresh(predicted, job)
    ranks = job.recipe.layout.ranks
    if ranks > 1:
        taken, resident = (start(ranks, f, (job,)) for f in (accuracy.allocated, accuracy.resident))
        return Row(case.name, case.kind, told, taken, resident)
    return Row(
        case.name, case.kind, told, fresh(accuracy.allocated, job), fresh(accuracy.resident, job)
    )


def _line(row: Row) -> str:
    mib = [f"{one / 2**20:.1f}" if one else "" for one in (row.predicted, row.allocated)]
    resident = f"{row.resident / 2**20:.1f}" if row.resident else ""
    error = "" if row.resident_error is None else f"{row.resident_error:+.1f} %"
    mark = "" if row.within else " (!)"
    return f"| {row.case} | {mib[0]} | {mib[1]} | {row.error:+.2f} %{mark} | {resident} | {error} |"


def main(wanted: str) -> None:
    """Measure and print every case that is wanted; keep the rows beside those of other cases."""
    os.environ |= {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    known = json.loads(RESULTS.read_text())["rows"] if RESULTS.exists() else []
    rows = {row["case"]: Row(**row) for row in known}
    print("\n".join(_HEAD), flush=True)
    for case in cases():
        if wanted in case.name:
            rows[case.name] = measure(case)
            print(_line(rows[case.name]), flush=True)
            _keep([rows[case.name] for case in cases() if case.name in rows])


def _keep(rows: list[Row]) -> None:
    machine = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "processor": _processor(),
        "threads": os.environ.get("OMP_NUM_THREADS", str(os.cpu_count())),
    }
    kept = {"machine": machine, "rows": [asdict(row) for row in rows]}
    RESULTS.write_text(json.dumps(kept, indent=1) + "\n")
    told = ", ".join(f"{name} {value}" for name, value in machine.items())
    limits = "; ".join(
        f"{kind}s: {exact} % of the allocator's events, {loose} % of the resident set"
        for kind, (exact, loose) in _LIMITS.items()
    )
    text = [
        "# Predicted memory on the CPU",
        "",
        told,
        "",
        f"Limits: {limits}",
        "",
        _words(rows),
        "",
        *_HEAD,
    ]
    RESULTS.with_suffix(".md").write_text("\n".join([*text, *map(_line, rows)]) + "\n")


def _words(rows: list[Row]) -> str:
    more = [(row.resident - row.allocated) / 2**20 for row in rows if row.resident]
    return (
        "Layouts are rank 0 of two on gloo, with the copies that gloo makes. Gloo's threads let go "
        "of a collective's tensors when they next have a processor; the allocator's column waits "
        "for that, so a busy machine may hold the last collective's tensors a little longer. The "
        f"resident set holds {min(more):.0f} to {max(more):.0f} MiB more than tensors do: what MKL "
        "and oneDNN keep, the heap's gaps, modules that are imported late. (!) marks a row beyond "
        "a limit."
    )


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [x.partition(":")[2].strip() for x in lines if x.startswith("model name")]
    return names[0] if names else platform.processor()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "")
