"""Context parallelism: each rank holds a part of every sequence, and attention stays exact.

``gather``: each rank holds two chunks, one from the beginning and its mirror from the end, so that
causal attention costs all ranks the same (zig-zag); keys and values of all ranks are gathered in
each layer (Grattafiori et al. 2024, "The Llama 3 Herd of Models", section 3.3.2). ``all-to-all``:
in attention each rank holds a part of the heads and the whole sequence (Jacobs et al. 2023,
DeepSpeed-Ulysses).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megalith.core.errors import RecipeError
from megalith.layout import collectives

SEQUENCE = 1  # of a batch's [batch, sequence]
HEADS, TOKENS = 1, 2  # of attention's [batch, heads, sequence, head_dim]


def places(length: int, ranks: int, rank: int, exchange: str) -> Tensor:
    """Which tokens of a sequence ``rank`` holds, int64 ``[length / ranks]``."""
    if exchange == "all-to-all":
        return torch.arange(rank * length // ranks, (rank + 1) * length // ranks)
    chunk = length // (2 * ranks)
    early, late = rank * chunk, (2 * ranks - 1 - rank) * chunk
    return torch.cat([torch.arange(early, early + chunk), torch.arange(late, late + chunk)])


def check(length: int, ranks: int, exchange: str) -> None:
    """Refuse sequences that do not divide.

    Raises:
        RecipeError: with the multiple that works.
    """
    parts = ranks if exchange == "all-to-all" else 2 * ranks
    if length % parts:
        raise RecipeError(
            f"data.sequence: {length} is not a multiple of {parts}, which layout.context = "
            f'{ranks} with exchange = "{exchange}" needs'
        )


def part(
    batch: dict[str, Tensor],
    sequences: Collection[str],
    ranks: int,
    rank: int,
    exchange: str,
) -> dict[str, Tensor]:
    """This rank's part of a batch, with ``positions`` in it.

    Numbers per sample that a task adds up would count once per rank: only the first keeps them.

    Args:
        sequences: names of the tensors ``[batch, sequence, ...]``.
    """
    if ranks == 1:
        return batch
    length = next(batch[name].shape[SEQUENCE] for name in sequences if name in batch)
    check(length, ranks, exchange)
    device = batch["sample"].device
    here = places(length, ranks, rank, exchange).to(device)
    found = dict(batch)
    if "positions" not in found:
        found["positions"] = torch.arange(length, device=device).expand(len(batch["sample"]), -1)
    for name, tensor in found.items():
        if name in (*sequences, "positions"):
            found[name] = tensor.index_select(SEQUENCE, here)
        elif name != "sample" and rank:
            found[name] = torch.zeros_like(tensor)
    return found


def apply(model: Any, group: dist.ProcessGroup, exchange: str) -> None:
    """Let every attention core of ``model`` see all tokens.

    Cores are modules named ``core`` with the interface of :mod:`megalith.models.decoder.attention`;
    the model builds its masks through its attribute ``mask``.

    Raises:
        RecipeError: the model is not one that can be divided along its sequence.
    """
    cores = [m for name, m in model.named_modules() if name.endswith("attention.core")]
    if not cores or not hasattr(model, "mask"):
        raise RecipeError(
            f"layout.context: {type(model).__name__} has no attention that can be divided; "
            "replicate and shard work"
        )
    model.mask = partial(_mask, model.mask, group, exchange)
    for core in cores:
        wrap = _swapped if exchange == "all-to-all" else _gathered
        core.forward = wrap(core.forward, group)


def _mask(
    inner: Callable[..., Tensor | None],
    group: dist.ProcessGroup,
    exchange: str,
    seq: int,
    past: int,
    window: int | None,
    documents: Tensor | None,
    seen: Tensor | None,
    device: torch.device,
) -> Tensor | None:
    """The whole sequence's mask, and of it the rows of the queries that attention has here."""
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    if documents is not None:
        documents = _in_order(
            collectives.gather_now(documents, SEQUENCE, group), 1, ranks, exchange
        )
    mask = inner(seq * ranks, past, window, documents, documents, device)
    if mask is None or exchange == "all-to-all":
        return mask
    return mask.index_select(TOKENS, places(seq * ranks, ranks, rank, exchange).to(device))


def _gathered(core: Callable[..., Tensor], group: dist.ProcessGroup) -> Callable[..., Tensor]:
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)

    def forward(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        causal: bool,
        dropout: float,
    ) -> Tensor:
        both = collectives.gather_used(torch.stack([key, value]), TOKENS + 1, group)
        key, value = _in_order(both, TOKENS + 1, ranks, "gather")
        if mask is not None or not causal:
            return core(query, key, value, mask=mask, causal=False, dropout=dropout)
        mixed = []
        chunk = query.shape[TOKENS] // 2
        for half, number in zip(
            query.split(chunk, TOKENS), (rank, 2 * ranks - 1 - rank), strict=True
        ):
            end = (number + 1) * chunk
            rows = torch.arange(end - chunk, end, device=query.device)
            seen = rows[:, None] >= torch.arange(end, device=query.device)
            keys, values = key[:, :, :end], value[:, :, :end]
            mixed.append(
                core(half, keys, values, mask=seen[None, None], causal=False, dropout=dropout)
            )
        return torch.cat(mixed, TOKENS)

    return forward


def _swapped(core: Callable[..., Tensor], group: dist.ProcessGroup) -> Callable[..., Tensor]:
    ranks = dist.get_world_size(group)

    def forward(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        if key.shape[HEADS] % ranks:
            raise RecipeError(
                f"layout.context: {ranks} does not divide the {key.shape[HEADS]} key and value "
                'heads that each rank holds; layout.exchange = "gather" works'
            )
        heads = [collectives.swap(x, HEADS, TOKENS, group) for x in (query, key, value)]
        return collectives.swap(core(*heads, **options), TOKENS, HEADS, group)

    return forward


def _in_order(x: Tensor, dim: int, ranks: int, exchange: str) -> Tensor:
    """Tokens that were gathered rank by rank, in the order of the sequence."""
    length = x.shape[dim]
    held = torch.cat([places(length, ranks, rank, exchange) for rank in range(ranks)])
    return x.index_select(dim, held.argsort().to(x.device))
