"""Memory and time of the head and its loss: chunked against logits in one piece.

    python benchmarks/cross_entropy.py

Each form runs in a process of its own: forward and backward of the head and the cross-entropy, as
in a step, with GPT-2's width and vocabulary. Memory is the growth of the peak resident set.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch.nn import functional as F

from megalith.core import environment
from megalith.tasks.cross_entropy import linear_cross_entropy

WIDTH, VOCAB, ROUNDS = 768, 50257, 3
TOKENS = (512, 2048, 4096)


def plain(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Logits of all tokens, then the loss."""
    return F.cross_entropy(F.linear(hidden, weight).float(), targets, reduction="sum")


def peak_bytes() -> int:
    """This process's peak resident set."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def measure(form: str, tokens: int) -> dict[str, float]:
    """Run one form; best time of three, and memory above the inputs and their gradients."""
    torch.manual_seed(0)
    hidden = torch.randn(tokens, WIDTH, requires_grad=True)
    weight = (torch.randn(VOCAB, WIDTH) * 0.02).requires_grad_()
    targets = torch.randint(VOCAB, (tokens,))
    loss = {"plain": plain, "chunked": linear_cross_entropy}[form]
    loss(hidden[:32], weight, targets[:32]).backward()  # libraries loaded, gradients allocated
    before, best = peak_bytes(), float("inf")
    for _ in range(ROUNDS):
        start = time.perf_counter()
        loss(hidden, weight, targets).backward()
        best = min(best, time.perf_counter() - start)
    return {"seconds": best, "bytes": peak_bytes() - before}


def main() -> None:
    """Compare the forms and keep the result."""
    if len(sys.argv) == 3:
        print(json.dumps(measure(sys.argv[1], int(sys.argv[2]))))
        return
    rows = []
    for tokens in TOKENS:
        found = {}
        for form in ("plain", "chunked"):
            command = [sys.executable, __file__, form, str(tokens)]
            found[form] = json.loads(subprocess.check_output(command))
        rows.append({"tokens": tokens, **found})
        memory = found["chunked"]["bytes"] / found["plain"]["bytes"]
        seconds = found["chunked"]["seconds"] / found["plain"]["seconds"]
        print(
            f"{tokens} tokens: plain {found['plain']['bytes'] / 2**20:.0f} MiB "
            f"{found['plain']['seconds']:.2f} s, chunked "
            f"{found['chunked']['bytes'] / 2**20:.0f} MiB {found['chunked']['seconds']:.2f} s "
            f"(memory x{memory:.2f}, time x{seconds:.2f})"
        )
    result = {"machine": environment.describe(), "width": WIDTH, "vocab": VOCAB, "rows": rows}
    folder = Path(__file__).parent / "results"
    folder.mkdir(exist_ok=True)
    (folder / "cross_entropy.json").write_text(json.dumps(result, indent=1, default=str) + "\n")


if __name__ == "__main__":
    main()
