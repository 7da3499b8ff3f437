"""A model of your own, spread over the ranks, for a training loop of your own.

```
spread = megalith.spread(model, shard=4)
optimizer = torch.optim.AdamW(spread.model.parameters())
found = spread.backward([lambda: loss_of(spread.model, batch)], count)
spread.clip_(found.norm, 1.0)
optimizer.step()
```
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from pydantic import ValidationError
from torch import Tensor, nn

from megalith.core.errors import MegalithError, RecipeError
from megalith.layout import mesh as meshes
from megalith.layout.apply import Spread, apply
from megalith.layout.gather import gather
from megalith.layout.mesh import Mesh
from megalith.layout.precision import Precision
from megalith.optim import clip
from megalith.recipe import parse
from megalith.recipe.schema import LayoutSection, TrainSection


@dataclass(frozen=True)
class Found:
    """What one update's backward found over all ranks; scalars on the device.

    Attributes:
        loss: mean over the global batch, float64.
        count: what it is a mean over, float64.
        norm: Euclidean norm of all gradients before clipping, float64.
    """

    loss: Tensor
    count: Tensor
    norm: Tensor


@dataclass
class OwnLoop:
    """A spread model and what a loop needs beside it.

    Attributes:
        updates: calls of :meth:`backward` so far; dropout depends on it.
        seed: of dropout, which :meth:`backward` seeds anew for each micro-batch.
    """

    spread: Spread
    precision: Precision
    seed: int = 0
    updates: int = 0

    @property
    def model(self) -> nn.Module:
        """This rank's part; call it like the whole model, and give its parameters to an optimizer.

        With ``shard`` the parameters are ``DTensor`` objects.
        """
        return self.spread.model

    @property
    def mesh(self) -> Mesh:
        """Where this rank stands: ``mesh.data_rank`` of ``mesh.data_ranks`` picks its samples."""
        return self.spread.mesh

    def backward(self, losses: Sequence[Callable[[], Tensor]], count: Tensor | float) -> Found:
        """Put the gradient of the mean loss over all ranks' samples into ``.grad``, unclipped.

        It adds to what ``.grad`` holds only on one process: drop the gradients after each update,
        as ``optimizer.zero_grad()`` does.

        Args:
            losses: for each of this rank's micro-batches, a function that runs the model and
                returns the *sum* of the loss, a scalar. Every rank has the same number of them.
            count: what this rank's losses are a sum over, such as valid tokens; 0 is possible.

        Raises:
            MegalithError: the ranks have different numbers of micro-batches, or gradients are left
                over from the update before.
        """
        if any(parameter.grad is not None for parameter in self.model.parameters()):
            raise MegalithError(
                "backward: gradients of the update before are still there; call "
                "optimizer.zero_grad() after each step"
            )
        total = self._count(len(losses), count)
        loss = torch.zeros((), dtype=torch.float64, device=self.precision.device)

        def objective(model: nn.Module, micro: int) -> Tensor:
            self.spread.draw(model, micro, self.seed, self.updates)
            with self.precision.forward():
                value = losses[micro]()
            loss.add_(value.detach())
            return value / total.clamp(min=1)

        self.model.train()
        with self.precision.update():
            self.spread.run(len(losses), objective, objective, lambda micro: ())
        self.updates += 1
        own = clip.total_norm(grad for grad, owned in self.spread.gradients() if owned)
        if self.mesh.place["tensor"]:
            loss.zero_()  # another rank has counted it
        found = self.mesh.sum_(torch.stack([loss, own.to(loss).square()]))
        return Found(found[0] / total.clamp(min=1), total, found[1].sqrt())

    def clip_(self, norm: Tensor, limit: float) -> None:
        """Scale all gradients in place by ``min(1, limit / norm)``."""
        clip.clip_((grad for grad, _ in self.spread.gradients()), norm, limit)

    def rest(self) -> None:
        """After evaluation: give back the weights that a forward pass has gathered (``shard``)."""
        for sync in self.spread.syncs:
            sync.rest()

    def whole(self) -> dict[str, Tensor]:
        """The whole model's state dict, on the host of rank 0, and an empty one on the others.

        All ranks call it.
        """
        return gather(self.spread.pieces(), self.mesh)

    def _count(self, micros: int, count: Tensor | float) -> Tensor:
        """The count over all ranks, float64; one collective, also for the number of losses."""
        own = torch.as_tensor(count, dtype=torch.float64, device=self.precision.device).detach()
        counted = own if self.mesh.place["tensor"] == 0 else torch.zeros_like(own)
        numbers = torch.stack([counted, *(own.new_tensor(micros**power) for power in (1, 2))])
        total, first, second = self.mesh.sum_(numbers).unbind()
        if float(second) * self.mesh.size != float(first) ** 2 or not micros:
            raise MegalithError(
                f"backward: {micros} losses on rank {self.mesh.rank}, and another number on other "
                "ranks; every rank needs as many, at least one (a loss with count 0 is possible)"
            )
        return total


def spread(
    model: nn.Module,
    layout: LayoutSection | Mapping[str, Any] | None = None,
    *,
    precision: str = "fp32",
    checkpointing: str = "none",
    seed: int = 0,
    **fields: Any,
) -> OwnLoop:
    """Spread a module over the ranks that have joined; all of them call it.

    The weights are rank 0's everywhere, whatever the others have drawn.

    Args:
        model: whole, on the device it is to train on; changed in place.
        layout: a recipe's section; left out: ``fields`` are its fields, such as ``shard=2`` or
            ``tensor=2, split={"blocks.*.up": "column", "blocks.*.down": "row"}``.
        precision: ``fp32`` or ``bf16``.
        checkpointing: ``none``, ``selective`` or ``full``, of the model's repeated parts.
        seed: of dropout.

    Raises:
        RecipeError: a field is wrong, a pattern matches no layer, a size does not divide, or the
            ranks have not joined.
    """
    section = _section(layout, fields)
    _refuse(section, precision)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    joined = dist.is_available() and dist.is_initialized()
    if section.ranks > 1 and not joined:
        raise RecipeError(
            f"layout: {section.ranks} ranks are needed, and this process has joined none; start it "
            "with torchrun and call torch.distributed.init_process_group() first"
        )
    found = meshes.build(section, device)
    train = parse({"train": {"precision": precision, "checkpointing": checkpointing}}).train
    return _spread(model, section, found, train, device, seed)


def _spread(
    model: nn.Module,
    section: LayoutSection,
    mesh: Mesh,
    train: TrainSection,
    device: torch.device,
    seed: int,
) -> OwnLoop:
    if mesh.size > 1:
        for tensor in {id(t): t for t in model.state_dict(keep_vars=True).values()}.values():
            dist.broadcast(tensor.detach(), 0)
    exact = Precision(train.precision, device)
    return OwnLoop(apply(model, section, mesh, exact, train).settle(exact.device), exact, seed)


def _section(
    layout: LayoutSection | Mapping[str, Any] | None, fields: dict[str, Any]
) -> LayoutSection:
    if isinstance(layout, LayoutSection):
        if fields:
            raise RecipeError(f"layout.{next(iter(fields))}: is given beside a whole section")
        return layout
    given = {**(layout or {}), **fields}
    try:
        return LayoutSection.model_validate(given)
    except ValidationError:
        parse({"layout": given})  # says it in one line, with the field's path
        raise


def _refuse(section: LayoutSection, precision: str) -> None:
    """What only a recipe's own step can do."""
    for axis in ("pipeline", "context", "expert"):
        if getattr(section, axis) > 1:
            raise RecipeError(
                f"layout.{axis}: is for recipes; replicate, shard and tensor work with a loop of "
                "your own"
            )
    if section.engine != "own":
        raise RecipeError('layout.engine: "ddp" is for recipes; "own" works with your own loop')
    if section.offload and section.shard == 1:
        raise RecipeError("layout.offload: goes with layout.shard > 1")
    if section.tensor == 1 and section.split:
        raise RecipeError("layout.split: goes with layout.tensor > 1")
    if precision == "fp16":
        raise RecipeError("train.precision: fp16 needs a recipe's loss scale; bf16 works")
