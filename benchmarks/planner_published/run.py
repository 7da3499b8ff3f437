"""Published GPU runs against the planner: ``python benchmarks/planner_published/run.py``.

Writes ``benchmarks/results/planner_published.json``, from which ``docs/write_accuracy.py`` makes
the pages. All of it takes some minutes on two cores; no GPU is used.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

from planner_published import gpt3, gpts, layers, loop, pipelines, rows, times  # noqa: E402
from planner_published.rows import Row  # noqa: E402
from planner_published.times import Timed  # noqa: E402

from megalith.plan.extrapolate import Part  # noqa: E402
from megalith.plan.worker import Pool, Seen  # noqa: E402
from megalith.recipe.schema import LayoutSection  # noqa: E402

RESULT = ROOT / "benchmarks" / "results" / "planner_published.json"


def main() -> None:
    """Predict every row that can be described, and write what came out."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cache", type=Path, default=Path(".cache/megalith/published"))
    parser.add_argument("--processes", type=int, default=2)
    chosen = parser.parse_args()
    begun = time.monotonic()
    table = rows.read()
    pool = Pool(chosen.cache / "recipes", chosen.processes)
    looked = _programs(table, chosen.cache / "programs", chosen.processes)
    memory = {row.number: _memory(row, seen) for row, seen in looked if row.memory}
    timed = [_timed(row, seen) for row, seen in looked if row.tokens]
    timed += [_timed(row, seen) for row, seen in _gpts(table, pool)]
    timed += pipelines.see([r for r in table if _pipelined(r)], pool)
    ordered = pipelines.see([r for r in table if _ordered(r)], pool)
    constants = times.fit([one for one in timed if one.fitted])
    found = {
        "date": datetime.date.today().isoformat(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "rows": [_told(row, memory, timed, constants) for row in table],
        "guessed": times.GUESSED,
        "constants": constants,
        "pairs": _pairs([*timed, *ordered], constants),
        "layers": layers.table(pool),
        "sharing": _sharing(table, pool),
        "gpt3": gpt3.table(pool),
        "amp": gpt3.amp(pool),
        "seconds": round(time.monotonic() - begun),
    }
    RESULT.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(f"{RESULT}: {len(table)} rows, {found['seconds']} s")


def _programs(table: list[Row], kept: Path, processes: int) -> list[tuple[Row, Seen]]:
    described = [(row, made) for row in table if (made := rows.program(row)) is not None]
    seen = loop.see([made for _, made in described], kept, processes)
    return [(row, one) for (row, _), one in zip(described, seen, strict=True)]


def _gpts(table: list[Row], pool: Pool) -> list[tuple[Row, Seen]]:
    described = [
        (row, made)
        for row in table
        if not _pipelined(row) and (made := rows.described(row)) is not None
    ]
    seen = gpts.see(described, pool)
    return [(row, one) for (row, _), one in zip(described, seen, strict=True)]


def _pipelined(row: Row) -> bool:
    return row.source.startswith("Korthikanti et al. 2022, table")


def _ordered(row: Row) -> bool:
    """Whether a row in float8 has another beside it that differs in nothing but the schedule."""
    return row.source.startswith("torchtitan 2024-12") and row.pipeline > 1 and row.sequence == 8192


def _timed(row: Row, seen: Seen) -> Timed:
    layout = LayoutSection(shard=row.shard, tensor=row.tensor)
    layers = 0  # of no use without a pipeline
    return Timed(row, [(Part(0, 1, layers), seen)], layout, row.micros)


def _memory(row: Row, seen: Seen) -> float:
    """GiB of what the row's source reports."""
    reserved = row.note.startswith("memory is peak reserved")
    name = "reserved_expandable" if reserved else "allocated"
    return seen.memory[name] / 2**30


def _told(
    row: Row,
    memory: dict[int, float],
    timed: list[Timed],
    constants: dict[str, dict[str, float]],
) -> dict[str, Any]:
    found = asdict(row) | {"layout": row.layout, "reason": rows.refusal(row)}
    found["memory_predicted"] = memory.get(row.number)
    one = next((t for t in timed if t.row.number == row.number), None)
    if one is not None:
        found["tokens_predicted"] = one.tokens(times.GUESSED[one.device])
        found["tokens_fitted"] = one.tokens(constants[one.device])
        found["fitted"], found["device"] = one.fitted, one.device
    return found


def _pairs(timed: list[Timed], constants: dict[str, dict[str, float]]) -> dict[str, Any]:
    return {
        name: [
            asdict(pair) | {"right": pair.right}
            for pair in times.pairs([(t.row, t.tokens(chosen[t.device])) for t in timed])
        ]
        for name, chosen in (("guessed", times.GUESSED), ("fitted", constants))
    }


def _sharing(table: list[Row], pool: Pool) -> list[dict[str, Any]]:
    """Some GPT rows against traces of their own: how exact it is to share traces."""
    described = [
        (row, made)
        for row in table
        if not _pipelined(row) and (made := rows.described(row)) is not None
    ]
    chosen = [described[n] for n in (20, 60, 150)]
    return [
        {"number": row.number, "off": gpts.check(row, replace(made), pool)} for row, made in chosen
    ]


if __name__ == "__main__":
    main()
