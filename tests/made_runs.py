"""Run folders with made-up numbers, for tests of what is read from them."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import tomli_w

from megalith.core.runs import RunFolder
from megalith.train.metrics import MetricsWriter

RECIPE = {
    "model": {"family": "decoder", "preset": "gpt2-small", "layers": 6, "width": 384},
    "data": {"source": "stdlib", "tokenizer": "bpe-4096", "sequence": 256},
    "task": {"name": "language"},
    "train": {"steps": 400, "global_batch": 32, "precision": "bf16"},
    "optim": {"name": "adamw", "schedule": "cosine"},
    "evaluate": {"prompt": "def "},
}
EVIL = "</script><script>document.title = 'owned'</script><b>&amp;</b> ${x} {{ x }} \ud83d"


def language_run(path: Path, steps: int = 400, every: int = 25) -> RunFolder:
    """A finished run of text with everything that a run can tell, and hostile samples."""
    noise = np.random.default_rng(0)
    folder = RunFolder(path)
    path.mkdir(parents=True)
    folder.recipe.write_text(tomli_w.dumps({**RECIPE, "run": {"dir": str(path)}}))
    folder.environment.write_text(json.dumps({"device": "cpu", "parameters": 12_345_678}))
    best = math.inf
    with MetricsWriter(folder) as metrics:
        for step in range(1, steps + 1):
            loss = 2.1 + 6.2 * math.exp(-7 * step / steps) + noise.normal(0, 0.05)
            metrics.write(
                "train",
                step,
                loss=math.nan if step == steps // 2 else loss,
                lr=6e-4 * min(1, 10 * step / steps),
                grad_norm=math.exp(noise.normal(0, 0.4)),
                tokens_per_s=12_300 + noise.normal(0, 200),
                mfu=0.46,
                peak_memory=3 * 2**30,
                skipped=0,
                seconds=0.66,
                seconds_data=0.02,
                seconds_compute=0.55,
                seconds_save=0.03,
                seconds_evaluate=0.05,
            )
            if step % every == 0:
                loss = 2.2 + 6.1 * math.exp(-7 * step / steps) + max(0, step / steps - 0.7)
                metrics.write(
                    "validation", step, loss=loss, bits_per_byte=loss / 2.4, best=loss < best
                )
                best = min(best, loss)
        metrics.write("event", steps // 2, event="nonfinite", message=f"loss nan {EVIL}")
        metrics.write("event", steps, event="done", message=f"{steps} updates")
    samples = [{"step": s, "prompt": "def ", "text": f"def f(x):\n  {EVIL}"} for s in (100, 200)]
    folder.samples.write_text("".join(json.dumps(s) + "\n" for s in samples))
    return folder
