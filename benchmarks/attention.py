"""Speed and memory of the attention cores against the length of the sequence.

    python benchmarks/attention.py [device]

Causal attention with GPT-2 small's heads, one sequence, forward and backward, the core alone. Each
measurement runs in a process of its own; memory is the growth of the peak (of the device's
allocator, or of the resident set on a CPU) over inputs and their gradients.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import torch

from megalith.core import devices, environment
from megalith.models.decoder.attention import core
from megalith.recipe.families import DecoderConfig

HEADS, HEAD_DIM, ROUNDS = 12, 64, 3
LENGTHS = (256, 512, 1024, 2048, 4096)
CORES = ("sdpa", "reference")


def measure(name: str, seq: int, device: torch.device) -> dict[str, float]:
    """Best time of three rounds, and memory above inputs and gradients."""
    torch.manual_seed(0)
    config = DecoderConfig(width=HEADS * HEAD_DIM, heads=HEADS, attention=name)
    attend = core(config, 0)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16

    def leaf(length: int) -> torch.Tensor:
        shape = (1, HEADS, length, HEAD_DIM)
        return torch.randn(shape, device=device, dtype=dtype).requires_grad_()

    def run(*inputs: torch.Tensor) -> None:
        attend(*inputs, mask=None, causal=True, dropout=0.0).sum().backward()
        devices.synchronize(device)

    run(leaf(32), leaf(32), leaf(32))  # libraries are loaded
    inputs = leaf(seq), leaf(seq), leaf(seq)
    for tensor in inputs:
        tensor.grad = torch.zeros_like(tensor)
    devices.reset_peak_memory(device)
    before, best = devices.peak_memory(device), float("inf")
    for _ in range(ROUNDS):
        start = time.perf_counter()
        run(*inputs)
        best = min(best, time.perf_counter() - start)
    return {"seconds": best, "bytes": devices.peak_memory(device) - before}


def main() -> None:
    """Compare the cores and keep the result."""
    if len(sys.argv) == 4:
        name, seq, device = sys.argv[1:]
        print(json.dumps(measure(name, int(seq), torch.device(device))))
        return
    device = devices.pick(sys.argv[1] if len(sys.argv) > 1 else "auto")
    rows = []
    for seq in LENGTHS:
        found = {}
        for name in CORES:
            command = [sys.executable, __file__, name, str(seq), str(device)]
            found[name] = json.loads(subprocess.check_output(command))
        rows.append({"sequence": seq, **found})
        print(
            f"{seq} tokens: "
            + ", ".join(
                f"{name} {value['seconds'] * 1e3:.1f} ms {value['bytes'] / 2**20:.1f} MiB"
                for name, value in found.items()
            )
            + f" (sdpa {found['reference']['seconds'] / found['sdpa']['seconds']:.1f}x as fast)"
        )
    result = {
        "machine": environment.describe(device),
        "load_average": os.getloadavg()[0],  # above the number of cores: others ran beside it
        "what": "causal attention core alone, batch 1, forward and backward",
        "heads": HEADS,
        "head_dim": HEAD_DIM,
        "dtype": "float32" if device.type == "cpu" else "bfloat16",
        "rows": rows,
    }
    folder = Path(__file__).parent / "results"
    folder.mkdir(exist_ok=True)
    (folder / "attention.json").write_text(json.dumps(result, indent=1, default=str) + "\n")


if __name__ == "__main__":
    main()
