"""Hugging Face: ``GPT2LMHeadModel`` under ``Trainer``."""

from __future__ import annotations

from typing import Any

import torch
from common import Clock, Job, peak_rss, report
from torch import Tensor
from torch.utils.data import Dataset
from transformers import GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments


class Samples(Dataset[dict[str, Tensor]]):
    """Rows of tokens; ``shift_labels`` says that the targets are already moved by one."""

    def __init__(self, tokens: Tensor) -> None:
        self.tokens = tokens

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = self.tokens[index]
        return {"input_ids": row[:-1], "labels": row[1:], "shift_labels": row[1:]}


class Timed(TrainerCallback):
    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.clock.start()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.clock.tick()


class Remembering(Trainer):
    """Keeps each loss, which costs less than logging it."""

    losses: list[Tensor]

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        loss = super().training_step(*args, **kwargs)
        self.losses.append(loss)
        return loss


def main() -> None:
    job = Job.given()
    tokens = torch.from_numpy(job.batches()).flatten(0, 1)
    model = GPT2LMHeadModel.from_pretrained(job.weights, dtype=torch.float32)
    clock = Clock()
    arguments = TrainingArguments(
        output_dir=job.scratch,
        use_cpu=True,
        bf16=job.precision == "bf16",
        torch_compile=job.compile,
        per_device_train_batch_size=job.batch,
        max_steps=job.steps,
        max_grad_norm=job.clip,
        lr_scheduler_type="constant",
        train_sampling_strategy="sequential",
        logging_strategy="no",
        save_strategy="no",
        eval_strategy="no",
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    trainer = Remembering(
        model=model,
        args=arguments,
        train_dataset=Samples(tokens),
        callbacks=[Timed(clock)],
        # The library's own groups spare norms and biases from decay; here all peers decay all.
        optimizers=(torch.optim.AdamW(model.parameters(), **job.optimizer), None),
    )
    trainer.losses = []
    trainer.train()
    report(job, clock.seconds, trainer.losses, peak_rss(), ["transformers", "accelerate"])


if __name__ == "__main__":
    main()
