"""A plain PyTorch loop: autocast, clip, fused AdamW."""

from __future__ import annotations

import torch
from common import Clock, Job, peak_rss, report
from gpt2 import build, cross_entropy
from torch import Tensor


def main() -> None:
    job = Job.given()
    batches = torch.from_numpy(job.batches())
    model = build(job).train()
    optimizer = torch.optim.AdamW(model.parameters(), **job.optimizer)
    forward = torch.compile(model) if job.compile else model
    losses: list[Tensor] = []
    clock = Clock()
    clock.start()
    for batch in batches:
        with torch.autocast("cpu", torch.bfloat16, enabled=job.precision == "bf16"):
            loss = cross_entropy(forward(batch[:, :-1]), batch[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), job.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
        clock.tick()
    report(job, clock.seconds, losses, peak_rss(), [])


if __name__ == "__main__":
    main()
