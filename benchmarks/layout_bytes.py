"""Bytes that each layout sends per rank and update, against the least that it must.

    python benchmarks/layout_bytes.py            # the table, kept in benchmarks/results

Counted, not timed (see ``layouts/traffic.py``); the least is in ``layouts/minimum.py``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist
from layouts import problem
from layouts.minimum import above, minimum, part
from layouts.problem import Size
from layouts.traffic import Traffic

from megalith.core import environment
from megalith.core.launch import start

SIZE = Size(8, width=64, heads=4, vocab=256, sequence=64, micro_batch=2, micros=8)
"""Small: bytes follow from shapes, so that their ratios to the least hold for larger models too."""

LAYOUTS = {
    "replicate {n}": ["layout.replicate={n}"],
    "replicate {n} (ddp)": ["layout.replicate={n}", "layout.engine=ddp"],
    "shard {n} (zero 1)": ["layout.shard={n}", "layout.zero=1"],
    "shard {n} (zero 2)": ["layout.shard={n}", "layout.zero=2"],
    "shard {n} (zero 3)": ["layout.shard={n}", "layout.zero=3"],
    "tensor {n}": ["layout.tensor={n}"],
    "tensor {n} (no sequence)": ["layout.tensor={n}", "layout.sequence_parallel=false"],
    "context {n} (gather)": ["layout.context={n}"],
    "context {n} (all-to-all)": ["layout.context={n}", "layout.exchange=all-to-all"],
    "pipeline {n} (1f1b)": ["layout.pipeline={n}"],
    "pipeline {n} (interleaved)": ["layout.pipeline={n}", "layout.schedule=interleaved"],
}
"""Each axis alone, on ``n`` ranks."""

JOINED = {
    "replicate 2 x shard 2 (zero 3)": ["layout.replicate=2", "layout.shard=2"],
    "replicate 2 x shard 2 (zero 1)": ["layout.replicate=2", "layout.shard=2", "layout.zero=1"],
    "replicate 2 x tensor 2": ["layout.replicate=2", "layout.tensor=2"],
    "replicate 2 x context 2": ["layout.replicate=2", "layout.context=2"],
    "shard 2 (zero 3) x tensor 2": ["layout.shard=2", "layout.tensor=2"],
    "shard 2 (zero 3) x context 2": ["layout.shard=2", "layout.context=2"],
    "pipeline 2 x replicate 2": ["layout.pipeline=2", "layout.replicate=2"],
    "pipeline 2 x shard 2 (zero 1)": ["layout.pipeline=2", "layout.shard=2", "layout.zero=1"],
    "pipeline 2 x tensor 2": ["layout.pipeline=2", "layout.tensor=2"],
    "context 2 x tensor 2": ["layout.context=2", "layout.tensor=2"],
}
"""Pairs of axes, on 4 ranks."""


def alone(ranks: int) -> dict[str, list[str]]:
    """Layouts of one axis."""
    return {
        name.format(n=ranks): [override.format(n=ranks) for override in overrides]
        for name, overrides in LAYOUTS.items()
    }


def count(size: Size, layouts: Sequence[Sequence[str]]) -> list[list[dict[str, Any]]]:
    """Run on every rank: of each layout, and of each rank, bytes of its second update and least."""
    return [_count(size, layout) for layout in layouts]


def _count(size: Size, layout: Sequence[str]) -> list[dict[str, Any]]:
    built = problem.build(size, layout)
    traffic = Traffic(built.mesh.sizes)
    for number in range(2):  # in the first, ranks tell each other shapes that they then know
        batches = problem.mine(built, problem.update(size, number))
        traffic.bytes.clear()
        traffic.calls.clear()
        with traffic:
            built.update(built.backward(batches))
    where = (size, built.spread.section, built.mesh, part(built))
    sent = [
        {**asdict(what), "calls": traffic.calls[what], "bytes": bytes_}
        for what, bytes_ in traffic.bytes.items()
    ]
    own = {"sent": sent, "bytes": sum(traffic.bytes.values())}
    own |= {"least": minimum(*where), "known_above": above(*where)}
    found: list[Any] = [None] * built.mesh.size
    dist.all_gather_object(found, own)
    return found


def measure(
    size: Size, ranks: int, layouts: Mapping[str, Sequence[str]], *, fork: bool = False
) -> list[dict[str, Any]]:
    """A row for each layout, of its rank that sends the most over its least."""
    rows = []
    counted = start(ranks, count, (size, list(layouts.values())), timeout=120, fork=fork)
    for name, found in zip(layouts, counted, strict=True):
        worst = max(found, key=lambda rank: rank["bytes"] / sum(rank["least"].values()))
        least = sum(worst["least"].values())
        more = {"least_bytes": least, "ratio": worst["bytes"] / least}
        rows.append({"layout": name, "ranks": ranks, **worst, **more})
    return rows


def main() -> None:
    """Count every layout and keep the result."""
    size = SIZE
    rows = measure(size, 2, alone(2), fork=True)
    rows += measure(size, 4, {**alone(4), **JOINED}, fork=True)
    for row in rows:
        print(f"{row['layout']:34} {row['bytes'] / 2**20:8.2f} MiB  {row['ratio']:.4f}")
    folder = Path(__file__).parent / "results"
    result = {"machine": environment.describe(), "size": asdict(size), "rows": rows}
    (folder / "layout_bytes.json").write_text(json.dumps(result, indent=1, default=str) + "\n")


if __name__ == "__main__":
    main()
