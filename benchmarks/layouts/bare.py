"""The same training by hand with torch alone: DDP, FSDP2, and tensor parallelism by DTensor.

Model, loss and data are those of the measured layouts; what spreads them is torch's. Weight decay
is as in the recipe: matrices of the blocks only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from layouts import problem
from layouts.problem import Size
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from megalith import models
from megalith.tasks import Batch
from megalith.tasks.cross_entropy import linear_cross_entropy

Update = Callable[[Sequence[Batch]], float]
"""Trains on a rank's micro-batches of one update; its part of the mean loss before it."""


def build(kind: str, size: Size) -> Update:
    """The training of this rank, by ``ddp``, ``fsdp2`` or ``tensor``."""
    loaded = problem.recipe(size)
    config = models.resolve(loaded.model, {"vocab": size.vocab})
    model = models.build(config, loaded.train.seed)
    run, last = _SPREAD[kind](model)
    inside = [p for n, p in model.named_parameters() if n.startswith("blocks.") and p.ndim > 1]
    ids = {id(p) for p in inside}
    outside = [p for p in model.parameters() if id(p) not in ids]
    decay = {id(p): loaded.optim.weight_decay if id(p) in ids else 0.0 for p in model.parameters()}
    groups = [
        {"params": part, "weight_decay": decay[id(part[0])]}
        for parameters in (inside, outside)
        for part in _alike(parameters)
    ]
    optimizer = torch.optim.AdamW(
        groups, lr=loaded.optim.lr, betas=loaded.optim.betas, eps=loaded.optim.eps
    )
    own_samples = kind != "tensor"
    scale = dist.get_world_size() if own_samples else 1  # DDP and FSDP2 take the mean over ranks
    tokens = size.micros * size.micro_batch * size.sequence

    def update(batches: Sequence[Batch]) -> float:
        total = 0.0
        for micro, batch in enumerate(batches):
            with last(micro == len(batches) - 1):
                loss = run(batch) * (scale / tokens)
                loss.backward()
            total += float(loss.detach()) / scale
        _clip([p for p in model.parameters() if p.grad is not None], loaded.train.clip or 1e9)
        optimizer.step()
        optimizer.zero_grad()
        return total

    return update


Spread = tuple[Callable[[Batch], Tensor], Callable[[bool], AbstractContextManager[Any]]]
"""What gives a micro-batch's summed loss, and what surrounds it, told whether it is the last."""


def _ddp(model: nn.Module) -> Spread:
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    return partial(_loss, wrapped), lambda last: nullcontext() if last else wrapped.no_sync()


def _fsdp2(model: nn.Module) -> Spread:
    for block in model.blocks:  # pyright: ignore
        fully_shard(block)
    fully_shard(model)
    assert isinstance(model, FSDPModule)
    return partial(_loss, model), lambda last: nullcontext()


def _loss(model: nn.Module, batch: Batch) -> Tensor:
    def head(hidden: Tensor, weight: Tensor) -> Tensor:
        return linear_cross_entropy(hidden, weight, batch["targets"])

    return model(batch["tokens"], head=head)


def _tensor(model: nn.Module) -> Spread:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    columns = ("attention.query", "attention.key", "attention.value", "mlp.up")
    plan: dict[str, Any] = {f"blocks.*.{name}": ColwiseParallel() for name in columns}
    plan |= {f"blocks.*.{name}": RowwiseParallel() for name in ("attention.output", "mlp.down")}
    plan["embedding"] = RowwiseParallel(input_layouts=Replicate())
    parallelize_module(model, mesh, plan)

    def run(batch: Batch) -> Tensor:
        def head(hidden: Tensor, weight: Tensor) -> Tensor:
            logits = F.linear(DTensor.from_local(hidden, mesh, [Replicate()]), weight)
            return F.cross_entropy(
                logits.flatten(0, 1), batch["targets"].flatten(), reduction="sum"
            )

        loss = model(batch["tokens"], head=head)
        return loss.to_local() if isinstance(loss, DTensor) else loss

    return run, lambda last: loss_parallel()


_SPREAD = {"ddp": _ddp, "fsdp2": _fsdp2, "tensor": _tensor}


def _alike(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Divided and whole parameters apart: torch does not mix them in one operation."""
    parts: list[list[nn.Parameter]] = [[], []]
    for parameter in parameters:
        parts[isinstance(parameter, DTensor)].append(parameter)
    return [part for part in parts if part]


def _clip(parameters: Sequence[nn.Parameter], limit: float) -> None:
    parts = _alike(parameters)
    norms = []
    for part in parts:
        norm = nn.utils.get_total_norm([p.grad for p in part if p.grad is not None])
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    total = torch.stack(norms).norm()
    for part in parts:
        nn.utils.clip_grads_with_norm_(part, limit, total)
