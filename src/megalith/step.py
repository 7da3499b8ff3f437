"""The one training step: forward, loss, backward, clip, update.

Every driver runs this object: ``train`` feeds it data, ``plan`` traces it under fake tensors,
``verify`` compares it between layouts, ``profile`` measures it. It reads no value off the device,
keeps no hidden state, and it is the only place that divides the loss (contract 1).

```
measured = step.backward(micro_batches)   # gradients of the whole update, and their norm
step.update(measured)                     # clip, schedule, optimizer, average; or step.skip()
```
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from megalith import models, optim, tasks
from megalith.core import imports, seeds
from megalith.layout.apply import apply
from megalith.layout.precision import LossScale, Precision
from megalith.layout.units import norms_with_statistics
from megalith.optim import clip
from megalith.recipe import Recipe
from megalith.tasks import Batch, Task

Regularizer = Callable[[nn.Module], Tensor]


@dataclass
class Measured:
    """What one update's backward found; all scalars, on the device.

    Attributes:
        loss: mean over the whole global batch, float32, without the regularizer.
        count: what it is a mean over, int64.
        sums: the task's further sums over the global batch.
        norm: gradient norm before clipping, loss scale taken out.
    """

    loss: Tensor
    count: Tensor
    sums: dict[str, Tensor]
    norm: Tensor

    def finite(self) -> bool:
        """Whether loss and gradient are finite numbers; waits for the device."""
        return bool(torch.isfinite(self.loss) & torch.isfinite(self.norm))


@dataclass
class Step:
    """One rank's training step and all that it changes.

    Attributes:
        seed: of dropout; the masks of an update depend on (seed, update, micro-batch) alone.
        done: updates so far, skipped ones among them; schedule and data order follow it.
        skipped: updates whose gradients were not finite.
    """

    model: nn.Module
    task: Task
    optimizers: optim.Optimizers
    schedule: optim.Schedule
    precision: Precision
    clip: float | None = None
    regularizer: Regularizer | None = None
    ema: optim.Ema | None = None
    loss_scale: LossScale | None = None
    seed: int = 0
    done: int = 0
    skipped: int = 0
    _parameters: list[Tensor] = field(init=False, repr=False)
    _statistics: list[Tensor] = field(init=False, repr=False)
    _before: list[Tensor] = field(init=False, repr=False, default_factory=list)

    def __post_init__(self) -> None:
        self._parameters = [p for p in self.model.parameters() if p.requires_grad]
        self._statistics = [
            buffer
            for norm in norms_with_statistics(self.model)
            for buffer in norm.buffers(recurse=False)
        ]

    def backward(self, micro_batches: Sequence[Batch]) -> Measured:
        """Gradients of the mean loss over all ``micro_batches``, unclipped, in ``.grad``."""
        self.model.train()
        self._before = [buffer.clone() for buffer in self._statistics]
        scale = self.loss_scale.scale if self.loss_scale else 1.0
        count = torch.stack([self.task.count(batch) for batch in micro_batches]).sum()
        sums: dict[str, Tensor] = {}
        with self.precision.update():
            for index, batch in enumerate(micro_batches):
                seeds.set_default(self.seed, "dropout", self.done, index)
                with self.precision.forward():
                    loss = self.task.loss(self.model, batch)
                objective = loss.total / count.clamp(min=1)
                if self.regularizer is not None and index == 0:
                    objective = objective + self.regularizer(self.model)
                (objective * scale).backward()
                _add(sums, {"loss": loss.total, **loss.sums})
        if scale != 1.0:
            for parameter in self._parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(1 / scale)
        total = sums.pop("loss")
        return Measured(total / count.clamp(min=1), count, sums, clip.total_norm(self._parameters))

    def update(self, measured: Measured) -> None:
        """Clip, then update weights and their average from the gradients that ``backward`` left."""
        if self.clip:
            clip.clip_(self._parameters, measured.norm, self.clip)
        self.optimizers.set_factor(self.schedule(self.done))
        self.optimizers.step()
        self._finish(finite=True)
        if self.ema is not None:
            self.ema.update(self.done - self.skipped)

    def skip(self) -> None:
        """Leave the model as it was before ``backward``: the gradients are not finite."""
        for buffer, before in zip(self._statistics, self._before, strict=True):
            buffer.copy_(before)  # what is not finite would stay in a running mean for ever
        self.skipped += 1
        self._finish(finite=False)

    def _finish(self, *, finite: bool) -> None:
        self.optimizers.zero_grad()
        self.done += 1
        if self.loss_scale is not None:
            self.loss_scale.after(finite)

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> dict[str, Tensor]:
        """Sums over one batch in evaluation mode: ``loss``, ``count`` and the task's own."""
        self.model.eval()
        with self.precision.update(), self.precision.forward():
            loss = self.task.loss(self.model, batch)
        return {"loss": loss.total, "count": self.task.count(batch), **loss.sums}


def build(recipe: Recipe, facts: Mapping[str, int], device: torch.device) -> Step:
    """The step that ``recipe`` describes, with its initial weights.

    Args:
        facts: what the data knows, see ``megalith.data.Splits``.

    Raises:
        RecipeError: a part of the recipe does not fit the data, or a reference fails.
    """
    section = recipe.train
    model = models.build(models.resolve(recipe.model, facts), section.seed, device)
    apply(model, section)
    regularizer = recipe.task.regularizer
    return Step(
        model=model,
        task=tasks.build(recipe.task),
        optimizers=optim.build(recipe.optim, model),
        schedule=optim.build_schedule(recipe.optim, section.steps),
        precision=Precision(section.precision, device),
        clip=section.clip,
        regularizer=imports.resolve(regularizer, "task.regularizer") if regularizer else None,
        ema=optim.Ema(model, section.ema) if section.ema else None,
        loss_scale=LossScale() if section.precision == "fp16" else None,
        seed=section.seed,
    )


def _add(sums: dict[str, Tensor], more: Mapping[str, Tensor]) -> None:
    for name, value in more.items():
        value = value.detach()
        sums[name] = sums[name] + value if name in sums else value
