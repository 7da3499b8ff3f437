"""GPT rows as recipes of ours: what a rank does in an update, from four small traces.

Only throughput is published of these rows, so the traces are read for work and traffic. Both grow
by the same with every layer and with every token, the operations of attention also with the
sequence's length; a micro-batch's forward and backward are the same for any number of ranks and
micro-batches; what the update computes is shared out by the ranks of ``shard``. So all rows of one
model share the traces of one and two layers on one and two sequences. ``check`` holds some rows
against traces of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from planner_published.rows import Described, Row

from megalith.plan.machine import parse as device
from megalith.plan.worker import Asked, Pool, Seen, refused
from megalith.recipe import Recipe, parse

_SHARD, _SEQUENCE = 8, 2048
_POINTS = ((1, 1), (2, 1), (1, 2), (2, 2))
"""Layers, and sequences of a micro-batch."""


def recipe(
    wanted: Described, *, layers: int, sequence: int, batch: int, shard: int, micros: int = 1
) -> Recipe:
    """A GPT under ZeRO in the recipe's words."""
    return parse(
        {
            "model": {
                "layers": layers,
                "width": wanted.width,
                "heads": wanted.heads,
                "vocab": wanted.vocab,
                "context": sequence,
            },
            "data": {"sequence": sequence},
            "train": {
                "global_batch": batch * shard * micros,
                "micro_batch": batch,
                "precision": "bf16",
                "checkpointing": wanted.recompute,
            },
            "layout": {"shard": shard, "zero": wanted.zero},
        }
    )


def see(rows: Sequence[tuple[Row, Described]], pool: Pool) -> list[Seen]:
    """What a rank does in an update of each row."""
    models = list(dict.fromkeys(wanted for _, wanted in rows))
    jobs = [
        _asked(
            recipe(wanted, layers=layers, sequence=_SEQUENCE, batch=batch, shard=_SHARD),
            wanted.vocab,
        )
        for wanted in models
        for layers, batch in _POINTS
    ]
    found = refused(pool.see(jobs))
    size = len(_POINTS)
    traces = {model: found[size * n : size * (n + 1)] for n, model in enumerate(models)}
    return [_whole(traces[wanted], row, wanted) for row, wanted in rows]


def check(row: Row, wanted: Described, pool: Pool) -> float:
    """How far the operations and bytes of a row are from those of a trace of its own, as a share.

    Both have two layers, and one micro-batch on as many ranks as the row has.
    """
    small = replace(wanted, layers=2)
    alone = replace(row, whole=row.batch * row.gpus)
    own = recipe(small, layers=2, sequence=row.sequence, batch=row.batch, shard=row.shard)
    truth = pool.one(_asked(own, wanted.vocab))
    (shared,) = see([(alone, small)], pool)
    worst = 0.0
    for n in (1, 2):
        a, b = (sum(values[n] for values in one.computed.values()) for one in (shared, truth))
        worst = max(worst, abs(a / b - 1))
    return worst


def _asked(made: Recipe, vocab: int) -> Asked:
    length = made.model_dump()["data"]["sequence"]
    sample: dict[str, Any] = dict.fromkeys(("tokens", "targets"), ((length,), "int64"))
    target = device("A100-80GB").device.target()
    assert target is not None
    packed = (target.capability, target.attention, target.memory)
    return Asked(made, {"vocab": vocab}, sample, 0, packed)


def _whole(seen: Sequence[Seen], row: Row, wanted: Described) -> Seen:
    basis = np.array([[1, n, k, n * k] for n, k in _POINTS], float)
    tokens = row.batch * row.sequence / _SEQUENCE
    goal = np.array([1, wanted.layers, tokens, wanted.layers * tokens])
    weights = goal @ np.linalg.inv(basis)

    def grown(kind: str) -> dict[str, list[float]]:
        found: dict[str, list[float]] = {}
        for name, values in getattr(seen[-1], kind).items():
            zero = [0.0] * len(values)
            each = np.array([getattr(one, kind).get(name, zero) for one in seen], float)
            total = weights @ each
            group, phase = name.split("/")[:2]
            if kind == "computed" and group == "attention":
                total[1] *= row.sequence / _SEQUENCE
            if phase in ("forward", "backward"):
                total *= row.micros
            elif kind == "computed":
                total[1:] *= _SHARD / row.shard
            found[name] = total.tolist()
        if kind == "sent" and row.dtype.endswith("PURE"):
            for name in found:
                if "reduce_scatter" in name:
                    found[name][1] /= 2  # gradients are reduced in bfloat16
        return found

    return replace(seen[-1], computed=grown("computed"), sent=grown("sent"))
