"""Lightning: the hand-written GPT-2 as a ``LightningModule`` under ``Trainer``."""

from __future__ import annotations

import logging
from typing import Any

import lightning
import torch
from common import Clock, Job, peak_rss, report
from gpt2 import build, cross_entropy
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset


class Module(lightning.LightningModule):
    def __init__(self, job: Job) -> None:
        super().__init__()
        self.job = job
        self.model = build(job)
        self.losses: list[Tensor] = []
        if job.compile:
            self.model.compile()

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        tokens = batch[0]
        loss = cross_entropy(self.model(tokens[:, :-1]), tokens[:, 1:])
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), **self.job.optimizer)

    def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
        # Lightning's own clipping refuses a fused optimizer under mixed precision.
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.job.clip)


class Timed(lightning.Callback):
    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def on_train_epoch_start(self, *args: Any) -> None:
        self.clock.start()

    def on_train_batch_end(self, *args: Any) -> None:
        self.clock.tick()


def main() -> None:
    job = Job.given()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    data = TensorDataset(torch.from_numpy(job.batches()).flatten(0, 1))
    module = Module(job)
    clock = Clock()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        precision="bf16-mixed" if job.precision == "bf16" else "32-true",
        max_steps=job.steps,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Timed(clock)],
    )
    trainer.fit(module, DataLoader(data, batch_size=job.batch))
    report(job, clock.seconds, module.losses, peak_rss(), ["lightning"])


if __name__ == "__main__":
    main()
