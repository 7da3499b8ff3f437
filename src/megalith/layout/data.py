"""Data parallelism: ranks with their own samples, whose gradients are summed.

``replicate``: every rank holds the whole model, and gradients are summed in buckets while backward
still runs (Li et al. 2020, "PyTorch Distributed", section 3.2). ``shard``: FSDP2 cuts every
parameter over the ranks (Zhao et al. 2023), and the ZeRO stages (Rajbhandari et al. 2020) are how
often it gathers and reduces:

======  =======================  ========================
stage   weights are gathered     gradients are reduced
======  =======================  ========================
1       once per update          once per update
2       once per update          after every micro-batch
3       in forward and backward  after every micro-batch
======  =======================  ========================

With both, what the ranks of ``shard`` have reduced is summed over ``replicate`` once per update.

Nothing here divides: the step has divided the loss by the global count (contract 1).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.nn.parallel import DistributedDataParallel

from megalith.core import devices
from megalith.layout.mesh import Mesh
from megalith.layout.pieces import local
from megalith.layout.precision import Precision
from megalith.layout.units import units
from megalith.recipe.schema import LayoutSection

_BUCKET = 25 << 20
"""Bytes of gradients that are summed at once: many for bandwidth, few for overlap."""


class Sync:
    """What sums a model's gradients over the ranks that have their own samples.

    This one is for a rank that is alone with its samples: there is nothing to sum.
    """

    def before_backward(self, last: bool) -> None:
        """Called before each backward pass; ``last`` is the update's last one."""

    def finish(self) -> None:
        """After the last backward pass: the gradients are sums when it returns."""

    def rest(self) -> None:
        """Give back memory that only a forward or backward pass needs."""

    def runner(self, model: nn.Module) -> nn.Module:
        """What to call in place of ``model``."""
        return model


@dataclass
class _Bucket:
    parameters: list[Tensor]
    group: dist.ProcessGroup
    waiting: int = 0
    work: Any = None
    missing: list[tuple[Tensor, Tensor]] = field(default_factory=list)


@dataclass
class Replicas(Sync):
    """Sums gradients of whole parameters in buckets, in the order in which backward fills them.

    Args:
        parameters: each with the group that has copies of it, in the model's order.
    """

    parameters: list[tuple[nn.Parameter, dist.ProcessGroup]]
    _buckets: list[_Bucket] = field(init=False, default_factory=list)
    _armed: bool = field(init=False, default=False)
    _next: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self._buckets = _fill(self.parameters)
        for bucket in self._buckets:
            for parameter in bucket.parameters:
                parameter.register_post_accumulate_grad_hook(  # pyright: ignore
                    lambda _, bucket=bucket: self._arrived(bucket)
                )

    def before_backward(self, last: bool) -> None:
        """Gradients of all but the last backward pass stay here and add up."""
        self._armed = last
        if last:
            self._next = 0
            for bucket in self._buckets:
                bucket.waiting = len(bucket.parameters)

    def finish(self) -> None:
        """Wait for the sums, which are in ``.grad`` then."""
        self._armed = False
        while self._next < len(self._buckets):  # parameters without a gradient here
            self._launch(self._buckets[self._next])
        for bucket in self._buckets:
            bucket.work.wait()
            bucket.work = None
            for parameter, ranks in bucket.missing:
                if not ranks:  # as on one process, an optimizer passes over what nothing uses
                    parameter.grad = None
            bucket.missing.clear()

    def _arrived(self, bucket: _Bucket) -> None:
        if not self._armed:
            return
        bucket.waiting -= 1
        # All ranks must sum the same bucket at the same time, so the order is fixed.
        while self._next < len(self._buckets) and self._buckets[self._next].waiting == 0:
            self._launch(self._buckets[self._next])

    def _launch(self, bucket: _Bucket) -> None:
        grads = [p.grad for p in bucket.parameters]
        filled = [
            torch.zeros_like(p) if grad is None else grad
            for p, grad in zip(bucket.parameters, grads, strict=True)
        ]
        # Behind the gradients: on how many ranks each parameter has one.
        here = torch.tensor([grad is not None for grad in grads]).to(filled[0])
        flat = torch.cat([*(grad.flatten() for grad in filled), here])
        *parts, ranks = flat.split([*(p.numel() for p in bucket.parameters), len(grads)])
        for parameter, part in zip(bucket.parameters, parts, strict=True):
            parameter.grad = part.view_as(parameter)  # the bucket takes the place of what it copied
        missing = [i for i, grad in enumerate(grads) if grad is None]
        bucket.missing = [(bucket.parameters[i], ranks[i]) for i in missing]
        bucket.work = dist.all_reduce(flat, group=bucket.group, async_op=True)
        self._next += 1


@dataclass
class Sharded(Sync):
    """FSDP2's side of an update: when it reduces, and when it lets go of whole weights."""

    modules: list[FSDPModule]
    zero: int

    def before_backward(self, last: bool) -> None:
        """See the table at the top of this file."""
        for module in self.modules:
            module.set_requires_gradient_sync(last or self.zero > 1, recurse=False)
            module.set_requires_all_reduce(last, recurse=False)  # over the copies, once
            module.set_reshard_after_backward(last or self.zero == 3, recurse=False)

    def rest(self) -> None:
        """Whole weights gathered by a forward pass without a backward would go stale."""
        for module in self.modules:
            module.reshard()


class Ddp(Sync):
    """torch's ``DistributedDataParallel`` (a reducer in C++), told to sum and not to average."""

    def __init__(self, model: nn.Module, group: dist.ProcessGroup) -> None:
        self._wrapped = DistributedDataParallel(
            model, process_group=group, gradient_as_bucket_view=True
        )
        self._wrapped.register_comm_hook(group, _sum_bucket)

    def before_backward(self, last: bool) -> None:
        """Called before forward too: that is where DDP decides whether to sum."""
        self._wrapped.require_backward_grad_sync = last

    def runner(self, model: nn.Module) -> nn.Module:
        """DDP's wrapper."""
        return self._wrapped


def _sum_bucket(group, bucket):  # pyright: ignore  # DDP refuses annotations that are strings
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    assert work is not None
    return work.get_future().then(lambda done: done.value()[0])


def shard(
    model: nn.Module,
    mesh: Mesh,
    section: LayoutSection,
    precision: Precision,
    experts: Iterable[nn.Module] = (),
) -> Sharded:
    """Cut every parameter of ``model`` over the ranks that have their own samples or sequence part.

    Args:
        experts: parts whose weights differ along the ``expert`` axis, so that it does not cut them.
    """
    inner = ("shard", "expert", "context")
    options = _options(section, precision)
    wrapped: list[nn.Module] = []
    for part in experts:
        own = tuple(axis for axis in inner if axis != "expert")
        fully_shard(part, mesh=_devices(mesh, own), **options)
        wrapped.append(part)
    for part in [*units(model).values(), model]:
        fully_shard(part, mesh=_devices(mesh, inner), **options)
        wrapped.append(part)
    sharded: list[FSDPModule] = [m for m in wrapped if isinstance(m, FSDPModule)]
    for module in sharded:
        # The loss is divided already; gloo has no kernel for FSDP2's own scaled sum.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    return Sharded(sharded, section.zero)


def sum_partial(tensors: Sequence[Tensor], group: dist.ProcessGroup | None) -> None:
    """Add up over ``group`` gradients that each rank has found for its part of the work."""
    grads = [local(t.grad) for t in tensors if t.grad is not None]
    if group is None or not grads:
        return
    flat = torch.cat([grad.flatten() for grad in grads])
    dist.all_reduce(flat, group=group)
    for grad, total in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
        grad.copy_(total.view_as(grad))


def _devices(mesh: Mesh, inner: tuple[str, ...]) -> Any:
    if not mesh.spread("replicate"):
        return mesh.devices(*inner)
    return mesh.grid(("replicate",), inner)


def _options(section: LayoutSection, precision: Precision) -> dict[str, Any]:
    offload: OffloadPolicy = OffloadPolicy()
    if section.offload:
        offload = CPUOffloadPolicy(pin_memory=devices.is_accelerator(precision.device))
    policy = MixedPrecisionPolicy()
    if precision.name != "fp32":
        # Weights travel in half the bytes; gradients are summed, and inputs such as rotary
        # tables stay, in float32.
        policy = MixedPrecisionPolicy(
            param_dtype=precision.dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
    return {
        # None: again after each forward, but for the root, which backward needs at once.
        "reshard_after_forward": None if section.zero == 3 else False,
        "mp_policy": policy,
        "offload_policy": offload,
    }


def _fill(parameters: list[tuple[nn.Parameter, dist.ProcessGroup]]) -> list[_Bucket]:
    """Buckets of one group and dtype each; backward reaches the last parameters first."""
    buckets: list[_Bucket] = []
    held = 0
    for parameter, group in reversed(parameters):
        size = parameter.numel() * parameter.element_size()
        last = buckets[-1] if buckets else None
        fits = (
            last is not None
            and last.group is group
            and last.parameters[0].dtype == parameter.dtype
            and held + size <= _BUCKET
        )
        if last is not None and fits:
            last.parameters.append(parameter)
            held += size
        else:
            buckets.append(_Bucket([parameter], group))
            held = size
    return buckets
