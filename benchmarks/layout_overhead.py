"""Time of an update: each layout on two ranks, one process on the same cores, and torch by hand.

    python benchmarks/layout_overhead.py                     # kept in benchmarks/results
    python benchmarks/layout_overhead.py --rounds 1 --steps 1 --only tensor --dry

Everyone trains the same model on the same batches: one process with two threads, or two ranks with
one thread each. In each round everyone runs once, in another order; ratios are taken within a
round. A first update warms up. That the losses agree is checked.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from layouts import bare, problem
from layouts.problem import Size

from megalith.core import environment
from megalith.core.launch import start

CORES = 2
ONE = "one process"
FORMS: dict[str, tuple[list[str], str | None]] = {
    ONE: ([], None),
    "replicate": (["layout.replicate=2"], "bare ddp"),
    "replicate (ddp)": (["layout.replicate=2", "layout.engine=ddp"], "bare ddp"),
    "shard (zero 1)": (["layout.shard=2", "layout.zero=1"], "bare fsdp2"),
    "shard (zero 2)": (["layout.shard=2", "layout.zero=2"], "bare fsdp2"),
    "shard (zero 3)": (["layout.shard=2"], "bare fsdp2"),
    "tensor": (["layout.tensor=2"], "bare tensor"),
    "tensor (no sequence)": (["layout.tensor=2", "layout.sequence_parallel=false"], "bare tensor"),
    "context (gather)": (["layout.context=2"], None),
    "context (all-to-all)": (["layout.context=2", "layout.exchange=all-to-all"], None),
    "pipeline (gpipe)": (["layout.pipeline=2", "layout.schedule=gpipe"], None),
    "pipeline (1f1b)": (["layout.pipeline=2"], None),
    "pipeline (interleaved)": (["layout.pipeline=2", "layout.schedule=interleaved"], None),
    "bare ddp": ([], None),
    "bare fsdp2": ([], None),
    "bare tensor": ([], None),
}
"""Layouts, and what to write by hand in their place; the bare ones are in ``layouts/bare.py``."""


def run(form: str, size: Size, steps: int) -> dict[str, Any]:
    """Run on every rank: seconds of each update, and the loss before the first and the last."""
    ranks = dist.get_world_size()
    torch.set_num_threads(CORES // ranks)
    kind = form.removeprefix("bare ")
    losses, seconds = [], []
    if kind != form:
        by_hand = bare.build(kind, size)
        built = None
    else:
        by_hand = None
        built = problem.build(size, FORMS[form][0])
    for number in range(steps + 1):
        batches = problem.update(size, number)
        dist.barrier()
        begin = time.perf_counter()
        if built is not None:
            measured = built.backward(problem.mine(built, batches))
            built.update(measured)
            loss = float(measured.loss)
        else:
            assert by_hand is not None
            mine = batches if kind == "tensor" else batches[dist.get_rank() :: ranks]
            loss = by_hand(mine)
        dist.barrier()
        seconds.append(time.perf_counter() - begin)
        losses.append(_over_ranks(loss) if by_hand and kind != "tensor" else loss)
    return {"seconds": seconds[1:], "losses": losses}


def _over_ranks(loss: float) -> float:
    value = torch.tensor(loss, dtype=torch.float64)
    dist.all_reduce(value)
    return float(value)


def ratios(rounds: list[dict[str, float]], form: str, other: str) -> dict[str, float]:
    """Median, least and most over the rounds of one form's time over another's."""
    found = [one[form] / one[other] for one in rounds]
    return {"median": statistics.median(found), "min": min(found), "max": max(found)}


def main() -> None:
    """Measure, print and keep the ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="updates that are timed")
    parser.add_argument("--only", default="", help="forms with this in their name")
    parser.add_argument("--width", type=int, default=Size.width)
    parser.add_argument("--layers", type=int, default=Size.layers)
    parser.add_argument("--dry", action="store_true", help="keep no result")
    asked = parser.parse_args()
    size = Size(layers=asked.layers, width=asked.width)
    chosen = [name for name in FORMS if asked.only in name or name == ONE]
    chosen += [o for o in {FORMS[n][1] for n in chosen} if o is not None and o not in chosen]
    load, rounds, losses = os.getloadavg(), [], {}
    for number in range(asked.rounds):
        order = random.Random(number).sample(chosen, len(chosen))
        one: dict[str, float] = {}
        for form in order:
            count = 1 if form == ONE else CORES
            found = start(count, run, (form, size, asked.steps), timeout=300, fork=True)
            one[form] = statistics.median(found["seconds"])
            losses[form] = found["losses"]
            print(f"round {number + 1} of {asked.rounds}: {form} {one[form]:.2f} s", flush=True)
        rounds.append(one)
    rows = []
    for form in chosen:
        row: dict[str, Any] = {
            "form": form,
            "seconds": statistics.median(one[form] for one in rounds),
            "over_one_process": ratios(rounds, form, ONE),
            "loss_differs_by": max(
                abs(a - b) for a, b in zip(losses[form], losses[ONE], strict=True)
            ),
        }
        peer = FORMS[form][1]
        if peer is not None:
            row |= {"peer": peer, "over_peer": ratios(rounds, form, peer)}
        rows.append(row)
        over = row.get("over_peer", {"median": float("nan")})["median"]
        print(
            f"{form:24} {row['seconds']:7.2f} s  {row['over_one_process']['median']:5.2f} of one "
            f"process  {over:5.2f} of {peer}  loss {row['loss_differs_by']:.0e}"
        )
    if asked.dry:
        return
    result = {
        "machine": environment.describe(),
        "load": {"before": load, "after": os.getloadavg()},
        "size": asdict(size),
        "rounds": rounds,
        "rows": rows,
    }
    folder = Path(__file__).parent / "results"
    (folder / "layout_overhead.json").write_text(json.dumps(result, indent=1, default=str) + "\n")


if __name__ == "__main__":
    main()
