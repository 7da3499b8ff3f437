"""Rows with pipelines as recipes of ours: the planner's own looks at first and last stage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from planner_published.rows import Described, Row, described, machine
from planner_published.times import Timed

from megalith.plan import extrapolate
from megalith.plan.estimate import question
from megalith.plan.worker import Pool
from megalith.recipe import Recipe, parse


def recipe(row: Row, wanted: Described) -> Recipe:
    """A GPT under tensor and pipeline parallelism."""
    layout: dict[str, Any] = {"tensor": row.tensor, "pipeline": row.pipeline}
    return parse(
        {
            "model": {
                "layers": wanted.layers,
                "width": wanted.width,
                "heads": wanted.heads,
                "vocab": wanted.vocab,
                "context": row.sequence,
                "dropout": 0.1,
            },
            "data": {"sequence": row.sequence},
            "train": {
                "global_batch": row.whole,
                "micro_batch": row.batch,
                "precision": "bf16",
                "checkpointing": wanted.recompute,
            },
            "layout": layout | {"sequence_parallel": wanted.sequence_parallel},
        }
    )


def see(rows: Sequence[Row], pool: Pool) -> list[Timed]:
    """Each row's stages, and the layout by whose timetable they run.

    A stage is traced as one of a plain pipeline; how many stages a rank has changes when its passes
    run, not what they do.
    """
    found: list[Timed] = []
    for row in rows:
        wanted = described(row)
        assert wanted is not None
        asked = question(recipe(row, wanted), machine(row))
        chosen = extrapolate.parts(asked.recipe, asked.recipe.model, ends_only=True)
        looks = extrapolate.look(pool, asked, chosen, full=False, say=_silent)
        layout = asked.recipe.layout
        if wanted.stages > 1:
            changed = {"schedule": "interleaved", "stages": wanted.stages}
            layout = layout.model_copy(update=changed)
        parts = [(look.part, look.seen) for look in looks]
        found.append(Timed(row, parts, layout, row.micros))
    return found


def _silent(what: str) -> None:
    pass
