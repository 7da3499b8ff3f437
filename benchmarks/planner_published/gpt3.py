"""GPT-3 175B in several layouts, with and without checkpointing; BERT-large with and without AMP.

All numbers are the planner's: nothing here was measured.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from planner_published.bert import SHAPE

from megalith.plan.estimate import plan
from megalith.plan.worker import Asked, Pool, refused
from megalith.recipe import Recipe, parse

HOW = ("none", "selective", "full")


@dataclass(frozen=True)
class Case:
    """A layout, and what else of the model and batch it is asked for with."""

    name: str
    layout: dict[str, int]
    batch: int = 1
    global_batch: int = 1536
    fused: bool = True


CASES = (
    Case("one device", {}, global_batch=1),
    Case("one device, attention not fused, dropout 0.1", {}, global_batch=1, fused=False),
    Case("ZeRO-3 over 1024", {"shard": 1024}, global_batch=1024),
    Case("tensor 8, ZeRO-3 over 128", {"tensor": 8, "shard": 128}, global_batch=128),
    Case(
        "tensor 8, pipeline 16, ZeRO-1 over 8", {"tensor": 8, "pipeline": 16, "shard": 8, "zero": 1}
    ),
    Case("tensor 8, pipeline 16, one copy", {"tensor": 8, "pipeline": 16}, global_batch=64),
)


def recipe(case: Case, how: str) -> Recipe:
    """GPT-3 175B (Brown et al. 2020) under a case's layout."""
    model: dict[str, Any] = {"preset": "gpt3-175b", "vocab": 50304}
    if not case.fused:
        model |= {"attention": "reference", "dropout": 0.1}
    return parse(
        {
            "model": model,
            "data": {"sequence": 2048},
            "train": {
                "global_batch": case.global_batch,
                "micro_batch": case.batch,
                "precision": "bf16",
                "checkpointing": how,
            },
            "layout": case.layout,
        }
    )


def table(pool: Pool) -> list[dict[str, Any]]:
    """Bytes of the fullest rank, and of all ranks together, by case and checkpointing."""
    found = []
    for case in CASES:
        for how in HOW:
            asked = recipe(case, how)
            ranks = asked.layout.ranks
            made = plan(asked, f"{ranks}xA100-80GB", advise=False, pool=pool)
            columns = ranks // asked.layout.pipeline
            total = sum(r.most["activations"] * r.like * columns for r in made.ranks)
            top = made.ranks[0]
            found.append(
                {
                    **asdict(case),
                    "checkpointing": how,
                    "ranks": ranks,
                    "allocated": top.allocated,
                    "reserved": top.reserved,
                    "activations": top.most["activations"],
                    "all_activations": total,
                    "all_allocated": sum(r.allocated * r.like * columns for r in made.ranks),
                    "seconds": made.time.seconds,
                    "moment": top.moment,
                }
            )
    return found


def amp(pool: Pool) -> list[dict[str, Any]]:
    """Peak of BERT-large on one GPU in float32 and under bfloat16 autocast."""
    cases = [
        (batch, sequence, fused)
        for sequence, batches in ((128, (64,)), (512, (2, 16)))
        for batch in batches
        for fused in (True, False)
    ]
    jobs = [_bert(*case, name) for case in cases for name in ("fp32", "bf16")]
    seen = refused(pool.see(jobs))
    return [
        {
            "batch": batch,
            "sequence": sequence,
            "fused": fused,
            "fp32": one.memory["allocated"],
            "bf16": two.memory["allocated"],
            "kinds_fp32": one.kinds,
            "kinds_bf16": two.kinds,
        }
        for (batch, sequence, fused), one, two in zip(cases, seen[::2], seen[1::2], strict=True)
    ]


def _bert(batch: int, sequence: int, fused: bool, precision: str) -> Asked:
    asked = parse(
        {
            "model": {"factory": "planner_published.bert:build", "args": {"fused": fused}},
            "data": {"factory": "planner_published.bert:data", "args": {"sequence": sequence}},
            "task": {"name": "language"},
            "train": {"global_batch": batch, "micro_batch": batch, "precision": precision},
        }
    )
    sample: dict[str, Any] = dict.fromkeys(("tokens", "targets"), ((sequence,), "int64"))
    target = ((8, 0), ("flash", "efficient", "math"), 80 << 30)
    return Asked(asked, {"vocab": SHAPE["vocab"]}, sample, 0, target)
