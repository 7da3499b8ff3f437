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
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megalith import models, optim, tasks
from megalith.core import imports
from megalith.layout import check, context, vocabulary
from megalith.layout.apply import Spread, apply, fill
from megalith.layout.mesh import Mesh, single
from megalith.layout.pieces import Piece
from megalith.layout.precision import LossScale, Precision
from megalith.layout.units import named_parameters, norms_with_statistics
from megalith.models.decoder import moe
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
        seed: of dropout; the masks of an update depend on (seed, update, micro-batch of all ranks)
            and on the part of the activations that a rank holds.
        done: updates so far, skipped ones among them; schedule and data order follow it.
        skipped: updates whose gradients were not finite.
        there: in a pipeline, the names of the sums, once they are known.
    """

    spread: Spread
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
    there: list[str] | None = None
    _statistics: list[Tensor] = field(init=False, repr=False)
    _before: list[Tensor] = field(init=False, repr=False, default_factory=list)

    def __post_init__(self) -> None:
        self._statistics = [
            buffer
            for norm in norms_with_statistics(self.model)
            for buffer in norm.buffers(recurse=False)
        ]

    @property
    def model(self) -> nn.Module:
        """This rank's part of the model."""
        return self.spread.model

    @property
    def mesh(self) -> Mesh:
        """Where this rank stands."""
        return self.spread.mesh

    def backward(self, micro_batches: Sequence[Batch]) -> Measured:
        """Gradients of the mean loss over the micro-batches of all ranks, unclipped, in ``.grad``.

        Args:
            micro_batches: this rank's, with as many samples as its data ranks' neighbours have or
                not; every rank has the same number of them.
        """
        self.model.train()
        self._before = [buffer.clone() for buffer in self._statistics]
        scale = self.loss_scale.scale if self.loss_scale else 1.0
        batches = [self.part(batch) for batch in micro_batches]
        count = self._count(batches)
        sums: dict[str, Tensor] = {}

        def objective(model: nn.Module, micro: int) -> Tensor:
            self.spread.draw(model, micro, self.seed, self.done)
            with self.precision.forward():
                loss = self.task.loss(model, batches[micro])
            objective = loss.total / count.clamp(min=1)
            if self.regularizer is not None and micro == 0 and self.mesh.rank == 0:
                objective = objective + self.regularizer(self.model)
            _add(sums, {"loss": loss.total, **loss.sums})
            return objective * scale

        with self.precision.update():
            self.spread.run(
                len(batches),
                objective,
                partial(self._hidden, batches),
                lambda micro: shape_key(batches[micro]),
            )
        grads = self.spread.gradients()
        if scale != 1.0 and grads:
            torch._foreach_mul_([grad for grad, _ in grads], 1 / scale)  # pyright: ignore
        sums, norm = self._total(sums, clip.total_norm(grad for grad, owned in grads if owned))
        total = sums.pop("loss")
        return Measured(total / count.clamp(min=1), count, sums, norm)

    def update(self, measured: Measured) -> None:
        """Clip, then update weights and their average from the gradients that ``backward`` left."""
        if self.clip:
            clip.clip_((grad for grad, _ in self.spread.gradients()), measured.norm, self.clip)
        self.optimizers.set_factor(self.schedule(self.done))
        self.optimizers.step()
        moe.update_bias(self.model, self._sum_loads)
        self._finish(finite=True)
        if self.ema is not None:
            self.ema.update(self.done - self.skipped)

    def skip(self) -> None:
        """Leave the model as it was before ``backward``: the gradients are not finite."""
        for buffer, before in zip(self._statistics, self._before, strict=True):
            buffer.copy_(before)  # what is not finite would stay in a running mean for ever
        moe.forget_load(self.model)
        self.skipped += 1
        self._finish(finite=False)

    def _finish(self, *, finite: bool) -> None:
        self.optimizers.zero_grad()
        self.done += 1
        if self.loss_scale is not None:
            self.loss_scale.after(finite)

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> dict[str, Tensor]:
        """Sums over the batches of all ranks in evaluation mode: ``loss``, ``count``, the task's.

        Args:
            batch: this rank's; one without valid targets if there is none left for it.
        """
        self.model.eval()
        batches = [self.part(batch)]
        sums: dict[str, Tensor] = {}

        def objective(model: nn.Module, micro: int) -> Tensor:
            with self.precision.forward():
                loss = self.task.loss(model, batches[micro])
            _add(sums, {"loss": loss.total, **loss.sums})
            return loss.total

        with self.precision.update():
            self.spread.forward(
                1, objective, partial(self._hidden, batches), lambda _: shape_key(batches[0])
            )
        count = self._count(batches)
        sums, _ = self._total(sums, None)
        return {**sums, "count": count}

    def pieces(self) -> dict[str, dict[str, Piece]]:
        """Every tensor that decides how the step goes on, as this rank's pieces."""
        parts = {"model": self.spread.pieces(), "optimizer": {}}
        like = dict(named_parameters(self.model))
        for path, value in self.optimizers.state_tensors().items():
            name = path.rpartition("/")[0]
            alike = value.shape == like[name].shape
            if alike:
                parts["optimizer"][path] = self.spread.piece(name, value)
            else:  # such as a counter: alike on all ranks, the first part of a parameter has it
                first = not any(parts["model"][name].start) and parts["model"][name].owned
                parts["optimizer"][path] = Piece(
                    value, tuple(value.shape), (0,) * value.ndim, first
                )
        if self.ema is not None:
            parts["ema"] = {n: self.spread.piece(n, t) for n, t in self.ema.average.items()}
        return parts

    def part(self, batch: Batch) -> Batch:
        """This rank's part of a batch whose sequences are divided."""
        axis = "context"
        return context.part(
            batch,
            getattr(self.task, "sequences", ()),
            self.mesh.sizes[axis],
            self.mesh.place[axis],
            self.spread.section.exchange,
        )

    def _count(self, batches: Sequence[Batch]) -> Tensor:
        """Terms of the loss over all ranks, each counted once."""
        count = torch.stack([self.task.count(batch) for batch in batches]).sum()
        if self.mesh.size == 1:
            return count
        counted = self.mesh.place["tensor"] == 0 and self.mesh.first_stage
        return self.mesh.sum_(count if counted else torch.zeros_like(count))

    def _total(
        self, sums: dict[str, Tensor], norm: Tensor | None
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Sums and gradient norm over all ranks, in one collective."""
        if self.mesh.size == 1:
            return sums, norm if norm is not None else torch.zeros(())
        counted = self.mesh.place["tensor"] == 0 and self.mesh.last_stage
        names = ["loss", *getattr(self.task, "sums", sorted(sums.keys() - {"loss"}))]
        device = self.precision.device
        values = torch.zeros(2 * len(names) + 1, dtype=torch.float64, device=device)
        for index, name in enumerate(names):
            if name in sums and counted:
                values[index] = sums[name]
                values[len(names) + index] = 1  # there is such a sum
        if norm is not None:
            values[-1] = norm.double().square()
        self.mesh.sum_(values)
        if self.there is None and self.spread.pipeline is not None:
            # The first update tells every stage which sums the last one makes.
            self.there = [n for n, one in zip(names, values[len(names) :], strict=False) if one]
        there = sums.keys() if self.there is None else self.there
        found = {name: values[index] for index, name in enumerate(names) if name in there}
        return found, values[-1].sqrt()

    def _hidden(self, batches: Sequence[Batch], model: nn.Module, micro: int) -> Tensor:
        """What a stage of a pipeline hands to the next one."""
        if model.training:
            self.spread.draw(model, micro, self.seed, self.done)
        args, options = self.task.inputs(batches[micro])  # pyright: ignore
        with self.precision.forward():
            return model(*args, **options)

    def _sum_loads(self, loads: Tensor) -> Tensor:
        """Experts' loads over all ranks that saw other tokens."""
        group = self.mesh.group("replicate", "shard", "expert", "context")
        if group is not None:
            torch.distributed.all_reduce(loads, group=group)
        return loads


def build(
    recipe: Recipe,
    facts: Mapping[str, int],
    device: torch.device,
    mesh: Mesh | None = None,
    dtype: torch.dtype = torch.float32,
    inside: AbstractContextManager[Any] | None = None,
) -> Step:
    """The step that ``recipe`` describes, with its initial weights, or one rank's part of it.

    Args:
        facts: what the data knows, see ``megalith.data.Splits``.
        mesh: left out: one process.
        dtype: of weights and optimizer state; float64 for comparisons.
        inside: of a trace: where everything that needs memory is made; weights get no values.

    Raises:
        RecipeError: a part of the recipe does not fit the data, or a reference fails.
    """
    section, mesh = recipe.train, mesh or single()
    config = models.resolve(recipe.model, facts)
    task = _task(recipe, mesh, config)
    if mesh.size > 1:
        check.check(recipe, config, task)
    precision = Precision(section.precision, device)
    regularizer = recipe.task.regularizer
    with inside or nullcontext():
        spread = _spread(recipe, config, precision, mesh, dtype, inside is not None)
        return Step(
            spread=spread,
            task=task,
            optimizers=optim.build(recipe.optim, spread.model),
            schedule=optim.build_schedule(recipe.optim, section.steps),
            precision=precision,
            clip=section.clip,
            regularizer=imports.resolve(regularizer, "task.regularizer") if regularizer else None,
            ema=optim.Ema(named_parameters(spread.model), section.ema) if section.ema else None,
            loss_scale=LossScale() if section.precision == "fp16" else None,
            seed=section.seed,
        )


def _task(recipe: Recipe, mesh: Mesh, config: Any) -> Task:
    """The task, with the loss of a vocabulary that may be divided."""
    task = tasks.build(recipe.task)
    # A module of the user's keeps its head whole: its table names columns and rows only.
    if mesh.spread("tensor") and hasattr(task, "head_loss") and hasattr(config, "vocab"):
        group: Any = mesh.group("tensor")
        divided = partial(vocabulary.linear_cross_entropy, group=group, vocab=config.vocab)
        task.head_loss = divided  # pyright: ignore
    return task


def _spread(
    recipe: Recipe,
    config: models.ModelConfig,
    precision: Precision,
    mesh: Mesh,
    dtype: torch.dtype,
    traced: bool,
) -> Spread:
    """The model with its weights, spread.

    A family of ours never takes more memory than this rank's part of it.
    """
    section, device = recipe.train, precision.device
    late = mesh.size > 1 and not traced and not models.brings_weights(config)
    model = models.build(config, section.seed, "meta" if late else device, filled=not traced)
    model = model if dtype == torch.float32 else model.to(dtype)
    spread = apply(model, recipe.layout, mesh, precision, section)
    return spread.settle(device, partial(fill, seed=section.seed) if late else None)


def shape_key(batch: Batch) -> tuple[tuple[int, ...], ...]:
    """Equal for two micro-batches whose hidden states have one shape."""
    return tuple(tuple(tensor.shape) for tensor in batch.values())


def _add(sums: dict[str, Tensor], more: Mapping[str, Tensor]) -> None:
    for name, value in more.items():
        value = value.detach()
        sums[name] = sums[name] + value if name in sums else value
