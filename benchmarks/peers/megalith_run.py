"""Megalith: ``megalith.train`` on a recipe, as a user runs it; numbers from its metrics."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any

from common import Job, report

import megalith
from megalith.recipe import parse
from megalith.train.metrics import read_metrics

SEED = 0


def recipe(job: Job) -> dict[str, Any]:
    """The job as a recipe: GPT-2's weights from a folder, the shared batches by a factory."""
    data = {"path": job.tokens, "samples": job.steps * job.batch, "vocab": job.vocab, "seed": SEED}
    return {
        "model": {"family": "decoder", "path": job.weights},
        "data": {"source": "factory", "factory": "shared_data:splits", "args": data},
        "task": {"name": "language"},
        "train": {
            "steps": job.steps,
            "global_batch": job.batch,
            "precision": job.precision,
            "compile": job.compile,
            "checkpointing": job.checkpointing,
            "clip": job.clip,
            "seed": SEED,
            "device": "cpu",
        },
        "optim": {
            "lr": job.lr,
            "betas": list(job.betas),
            "eps": job.eps,
            "weight_decay": job.weight_decay,
            "decay_all": True,
            "schedule": "constant",
        },
        "evaluate": {"every": 0},
        "checkpoint": {"every": 0},
        "run": {"dir": str(Path(job.scratch) / "run"), "log_every": 1},
    }


def main() -> None:
    job = Job.given()
    with contextlib.redirect_stdout(sys.stderr):
        run = megalith.train(parse(recipe(job)))
    lines = [line for line in read_metrics(run.folder) if line["kind"] == "train"]
    report(
        job,
        [line["seconds"] for line in lines],
        [line["loss"] for line in lines],
        max(line["peak_memory"] for line in lines),
        ["megalith"],
    )


if __name__ == "__main__":
    main()
