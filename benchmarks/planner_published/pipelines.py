"""Rows with pipelines as recipes of ours: the planner's own looks at first and last stage.

torchtitan's pipelines compute in float8, which is not modelled: of them only the order is
predicted, as if they computed in bfloat16.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from planner_published.rows import Described, Row, described, llama, machine
from planner_published.times import Timed

from megalith.plan import extrapolate
from megalith.plan.estimate import question
from megalith.plan.worker import Pool, Seen
from megalith.recipe import Recipe, parse
from megalith.recipe.schema import LayoutSection

_ADDED = {"bfloat16": 2 + 4, "float32": 4 + 4 + 4}
"""Bytes to cast an element of a gradient to float32, and to add it to the one that is there, by the
dtype that is read."""


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


def titan(row: Row) -> Recipe:
    """A Llama of torchtitan's under four kinds of parallelism, in bfloat16.

    A batch is cut into as many micro-batches as the pipeline has ranks, its default; weights stay
    gathered from forward to backward.
    """
    shape = llama(row)
    return parse(
        {
            "model": {
                "layers": shape.layers,
                "width": shape.width,
                "heads": shape.heads,
                "kv_heads": shape.kv_heads,
                "hidden": shape.hidden,
                "vocab": shape.vocab,
                "context": row.sequence,
                "activation": "swiglu",
                "norm": "rmsnorm",
                "positions": "rope",
                "mlp_bias": False,
                "tied": False,
            },
            "data": {"sequence": row.sequence},
            "train": {
                "global_batch": row.whole,
                "micro_batch": row.batch // row.pipeline,
                "precision": "bf16",
                "checkpointing": row.recompute,
            },
            "layout": {
                "shard": row.shard,
                "tensor": row.tensor,
                "pipeline": row.pipeline,
                "zero": 2,
            },
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
        made = titan(row) if wanted is None else recipe(row, wanted)
        asked = question(made, machine(row))
        chosen = extrapolate.parts(asked.recipe, asked.recipe.model, ends_only=True)
        looks = extrapolate.look(pool, asked, chosen, full=False, say=_silent)
        layout = asked.recipe.layout
        stages = 1 + row.interleaved if wanted is None else wanted.stages
        if stages > 1:
            changed = {"schedule": "interleaved", "stages": stages}
            layout = layout.model_copy(update=changed)
        micros = extrapolate.micros(made)
        parts = [(look.part, look.seen) for look in looks]
        if wanted is not None:
            parts = [(part, megatron(seen, micros, made.layout)) for part, seen in parts]
        found.append(Timed(row, parts, layout, micros))
    return found


def megatron(seen: Seen, micros: int, layout: LayoutSection) -> Seen:
    """What Megatron-LM does another way than our step, taken off or put in its place.

    Its products add weight gradients to float32 ones themselves, where ours are cast and then
    added. And each rank of a tensor group sends its own part of the hidden states to the next
    stage, which gathers them (Narayanan et al. 2021, section 4.1).
    """
    computed = {name: list(values) for name, values in seen.computed.items()}
    for dtype, size in _ADDED.items():
        computed[f"memory/backward/{dtype}"][2] -= size * seen.parameters * micros
    cut = 1 if layout.sequence_parallel else layout.tensor
    sent = {
        name: [times, size / cut] if name.startswith(("send/", "recv_/")) else [times, size]
        for name, (times, size) in seen.sent.items()
    }
    return replace(seen, computed=computed, sent=sent)


def _silent(what: str) -> None:
    pass
