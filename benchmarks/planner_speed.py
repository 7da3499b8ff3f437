"""How long planning takes, and what watching the memory of a trace adds to it.

    python benchmarks/planner_speed.py

A plan of an 8B model and a search of layouts for a 175B one, as commands with an empty cache; then
one trace with the planner's tracker and without it, in turns, in processes of their own.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megalith.core import environment

ROOT = Path(__file__).parents[1]
COMMANDS = {
    "plan 8B on 64xH100": ["recipes/llama3-8b.toml", "--on", "64xH100"],
    "search 175B on 1024xA100-80GB": [
        "recipes/gpt3-175b.toml",
        "--on",
        "1024xA100-80GB",
        "--search",
    ],
}
LAYERS, ROUNDS = 5, 5


def main() -> None:
    found: dict[str, Any] = {"machine": environment.describe(), "commands": {}}
    for name, words in COMMANDS.items():
        found["commands"][name] = _command(words)
        print(name, found["commands"][name], flush=True)
    found["tracker"] = _tracker()
    print("tracker", found["tracker"])
    path = ROOT / "benchmarks/results/planner_speed.json"
    path.write_text(json.dumps(found, indent=1) + "\n")


def _command(words: list[str]) -> dict[str, float]:
    """Seconds, and the most memory that one process of the command held, MiB."""
    words = [str(ROOT / words[0]), *words[1:]]
    with tempfile.TemporaryDirectory() as folder:
        begin = time.perf_counter()
        subprocess.run(
            [sys.executable, "-c", "from megalith.cli import main; main()", "plan", *words],
            cwd=folder,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            check=True,
        )
        took = time.perf_counter() - begin
    most = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    return {"seconds": round(took, 1), "largest_process_mib": round(most)}


def _tracker() -> dict[str, Any]:
    """The ratio of a trace with the tracker to one without, medians of alternating runs."""
    context = multiprocessing.get_context("spawn")
    times: dict[str, list[float]] = {"with": [], "without": []}
    with context.Pool(1, maxtasksperchild=1) as pool:
        for _ in range(ROUNDS):
            for name, values in times.items():
                values.append(pool.apply(_seconds, (name == "with",)))
    medians = {name: statistics.median(values) for name, values in times.items()}
    return {
        "layers": LAYERS,
        "seconds": {name: round(value, 2) for name, value in medians.items()},
        "ratio": round(medians["with"] / medians["without"], 2),
    }


def _seconds(tracked: bool) -> float:
    import megalith
    from megalith.plan import estimate, machine, trace
    from megalith.plan.accelerator import Target

    os.environ["OMP_NUM_THREADS"] = "1"
    recipe = megalith.load(ROOT / "recipes/llama3-8b.toml", f"model.layers={LAYERS}")
    asked = estimate.question(recipe, machine.parse("64xH100", "bf16"))
    assert asked.target is not None
    job = trace.Job(asked.recipe, asked.facts, asked.sample, 0, Target(*asked.target))
    if not tracked:
        trace.Tracker = _Untracked  # pyright: ignore
        trace.Running = _Unnamed  # pyright: ignore
    begin = time.perf_counter()
    trace.trace(job)
    return time.perf_counter() - begin


class _Untracked:
    """Takes a tracker's place and sees nothing."""

    def __init__(self, *given: Any) -> None:
        self.record = None

    @contextlib.contextmanager
    def inside(self, **kinds: str) -> Iterator[None]:
        yield

    def name(self, *given: Any) -> None: ...

    def start_over(self) -> None: ...

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: object) -> None: ...


class _Unnamed(_Untracked):
    def path(self) -> str:
        return ""


if __name__ == "__main__":
    main()
