"""Expert parallelism: each rank holds some of the experts, and tokens travel to them and back.

Every rank of the ``expert`` axis has samples of its own (Lepikhin et al. 2020, "GShard", section
3.2). A rank's experts see the tokens of all of them, so their gradients are sums over the axis
already; those of all other weights are not.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake
from torch.distributed import _functional_collectives as functional

from megalith.core.errors import RecipeError
from megalith.layout import collectives
from megalith.layout.mesh import Mesh
from megalith.models.decoder.moe import Compute, Exchange, Experts, mixtures


def parts(model: nn.Module) -> list[nn.Module]:
    """The modules whose parameters :func:`apply` shares out, and no others."""
    return [part for part in model.modules() if isinstance(part, Experts)]


def apply(model: nn.Module, mesh: Mesh) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    """Keep rank r's experts ``[r E / n, (r + 1) E / n)`` of every layer, in place.

    Args:
        model: a decoder with experts, on any device; it may be a stage without any of them.

    Returns:
        Of each parameter that is a part now: the shape of the whole, and where the part begins.

    Raises:
        RecipeError: the model has no experts, or they do not divide over the ranks.
    """
    group = mesh.group("expert")
    if group is None:
        return {}
    total, ranks = getattr(getattr(model, "config", None), "experts", 0), mesh.sizes["expert"]
    if not total:
        raise RecipeError(
            f"layout.expert: {type(model).__name__} has no experts to share out; "
            "replicate and shard work"
        )
    if total % ranks:
        fits = max(n for n in range(1, ranks) if total % n == 0)
        raise RecipeError(
            f"layout.expert: {ranks} ranks do not divide {total} experts (model.experts); "
            f"{fits} would"
        )
    each = total // ranks
    first = mesh.place["expert"] * each
    boxes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {}
    for name, part in model.named_modules():
        if not isinstance(part, Experts):
            continue
        for key, whole in list(part.named_parameters(recurse=False)):
            own = whole.detach()[first : first + each].clone()
            setattr(part, key, nn.Parameter(own, requires_grad=whole.requires_grad))
            boxes[f"{name}.{key}"] = (tuple(whole.shape), (first, 0, 0))
        part.exchange = cast(Exchange, partial(exchange, group))
    return boxes


def share_sequences(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Balance over whole sequences where each rank of ``group`` holds a part of each.

    Raises:
        RecipeError: the model has a capacity, which is counted along the whole sequence.
    """
    for part in mixtures(model):
        if part.capacity is not None:
            raise RecipeError(
                "model.capacity: is not possible where ranks share sequences; leave it out"
            )
        part.over_sequence = partial(collectives.sum_now, group=group)


@torch.compiler.disable
def exchange(group: dist.ProcessGroup, rows: Tensor, counts: Tensor, compute: Compute) -> Tensor:
    """Send each row to the rank that holds its expert, compute there, and fetch it back.

    Reads the number of rows from and to each rank on the host: no exchange without it.

    Args:
        rows: ``[n, width]``, sorted by expert; rows behind the last expert's stay here.
        counts: int64 ``[experts]``, rows of each.
        compute: what the experts of this rank do to rows that are sorted by expert.

    Returns:
        ``[n, width]``, zero where a row has no expert.
    """
    if torch.is_autocast_enabled(rows.device.type):  # not to send what is rounded on arrival
        rows = rows.to(torch.get_autocast_dtype(rows.device.type))
    ranks = dist.get_world_size(group)
    arriving = _now(counts, [len(counts) // ranks] * ranks, [len(counts) // ranks] * ranks, group)
    arriving = arriving.view(ranks, -1)  # [from, expert of this rank]
    leaving = counts.view(ranks, -1)
    send, receive = _sizes(leaving, arriving, len(rows))
    got = _Exchange.apply(rows[: sum(send)], receive, send, group)  # pyright: ignore
    assert isinstance(got, Tensor)
    # Rows come sorted by sender, and by expert within one sender.
    ids = torch.arange(arriving.shape[1], device=rows.device).repeat(ranks)
    order = ids.repeat_interleave(arriving.flatten(), output_size=len(got)).argsort(stable=True)
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    done = compute(got[order], arriving.sum(0))[back]
    home = _Exchange.apply(done, send, receive, group)  # pyright: ignore
    assert isinstance(home, Tensor)
    return torch.cat([home, home.new_zeros(len(rows) - len(home), home.shape[1])])


def _sizes(leaving: Tensor, arriving: Tensor, rows: int) -> tuple[list[int], list[int]]:
    """Rows to and from each rank, on the host. A trace has none to read: each gets its share."""
    if is_fake(leaving):
        ranks = len(leaving)
        even = [(rows * (rank + 1)) // ranks - (rows * rank) // ranks for rank in range(ranks)]
        return even, even
    send, receive = torch.stack([leaving.sum(1), arriving.sum(1)]).tolist()
    return send, receive


class _Exchange(torch.autograd.Function):
    """Rows to all ranks and from all ranks; gradients go the other way."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, receive: list[int], send: list[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.receive, ctx.send, ctx.group = receive, send, group
        return _now(rows, receive, send, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # pyright: ignore
        return _now(grad, ctx.send, ctx.receive, ctx.group), None, None, None


def _now(
    rows: Tensor, receive: Sequence[int], send: Sequence[int], group: dist.ProcessGroup
) -> Tensor:
    found = functional.all_to_all_single(rows.contiguous(), list(receive), list(send), group)
    return functional.wait_tensor(found)
