"""Experts on several ranks: loss, balance and every gradient are those of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megalith import models
from megalith.core.errors import RecipeError
from megalith.layout import checkpointing, expert, mesh
from megalith.layout.units import units
from megalith.models import decoder
from megalith.models.decoder import moe
from megalith.recipe.families import DecoderConfig
from megalith.recipe.schema import LayoutSection
from megalith.tasks.language import Language
from ranks import on_ranks

VOCAB = 41
EXACT: dict[str, Any] = {"rtol": 1e-11, "atol": 1e-12}
CPU = torch.device("cpu")


def section(**changes: Any) -> DecoderConfig:
    given: dict[str, Any] = {
        "vocab": VOCAB,
        "layers": 2,
        "width": 16,
        "heads": 2,
        "context": 32,
        "experts": 4,
        "expert_hidden": 24,
        "activation": "swiglu",
        "mlp_bias": False,
        "balance": 0.3,
        "init_std": 0.2,
    }
    return DecoderConfig(**{**given, **changes})


def model(config: DecoderConfig, starved: bool) -> decoder.Decoder:
    module = models.build(config, seed=0)
    assert isinstance(module, decoder.Decoder)
    module = module.double().train()
    if starved:
        # One direction of the input that every token has, and that repels expert 1.
        with torch.no_grad():
            for block in module.blocks[config.dense_layers :]:
                block.get_parameter("mlp_norm.bias")[0] = 8.0
                block.get_parameter("mlp.router.weight")[:, 0] = 0.0
                block.get_parameter("mlp.router.weight")[1, 0] = -8.0
    return module


def samples(ranks: int) -> list[dict[str, Tensor]]:
    """Ragged batches: rank r has r + 1 samples, and targets that do not count."""
    generator = torch.Generator().manual_seed(5)
    found = []
    for rank in range(ranks):
        tokens = torch.randint(0, VOCAB, (rank + 1, 10), generator=generator)
        targets = tokens.roll(-1, 1)
        targets[:, 10 - 2 * rank :] = -100
        found.append({"tokens": tokens, "targets": targets})
    return found


def whole(tensor: Tensor, box: tuple[tuple[int, ...], tuple[int, ...]] | None) -> Tensor:
    """A gradient over all ranks: parts put together, everything else summed."""
    if box is None:
        dist.all_reduce(tensor)
        return tensor
    assert box[0][0] == dist.get_world_size() * tensor.shape[0]
    assert box[1] == (dist.get_rank() * tensor.shape[0], 0, 0)
    found = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(found, tensor)
    return torch.cat(found)


def as_one_process(changes: dict[str, Any], starved: bool, recompute: str) -> None:
    ranks, rank = dist.get_world_size(), dist.get_rank()
    config = section(**changes)
    batches = samples(ranks)
    task = Language()
    count = torch.stack([task.count(batch) for batch in batches]).sum()

    reference = model(config, starved)
    right = [task.loss(reference, batch) for batch in batches]
    loss = torch.stack([one.total for one in right]).sum() / count
    loss.backward()

    spread = model(config, starved)
    boxes = expert.apply(spread, mesh.build(LayoutSection(expert=ranks), CPU))
    if recompute != "none":
        checkpointing.apply(units(spread), recompute)  # pyright: ignore
    own = task.loss(spread, batches[rank])
    (own.total / count).backward()

    for found, expected in ((own.total, right[rank].total), *_sums(own.sums, right[rank].sums)):
        torch.testing.assert_close(found, expected, **EXACT)
    torch.testing.assert_close(whole(own.total.detach() / count, None), loss.detach(), **EXACT)
    expected_parts = {n for n, p in reference.named_parameters() if ".experts." in n}
    assert set(boxes) == expected_parts
    assert boxes
    gradients = {name: p.grad for name, p in spread.named_parameters()}
    for name, parameter in reference.named_parameters():
        mine = gradients[name]
        assert mine is not None
        assert parameter.grad is not None
        found = whole(mine.contiguous(), boxes.get(name))
        torch.testing.assert_close(
            found, parameter.grad, **EXACT, msg=lambda m, n=name: f"{n}: {m}"
        )
        if starved and ".experts." in name:
            assert not found[1].any()
            assert found.any()
    if config.balance_by == "bias":
        group = dist.group.WORLD
        moe.update_bias(spread, lambda load: (dist.all_reduce(load, group=group), load)[1])
        moe.update_bias(reference)
        for one, other in zip(moe.mixtures(spread), moe.mixtures(reference), strict=True):
            assert one.bias is not None
            assert other.bias is not None
            assert other.bias.any()
            assert torch.equal(one.bias, other.bias)


def _sums(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
    assert one.keys() == other.keys()
    return [(one[name], other[name]) for name in one]


# Settings; whether an expert gets no token; checkpointing. One start of the ranks for all of them.
CASES: dict[int, list[tuple[dict[str, Any], bool, str]]] = {
    2: [
        ({}, False, "none"),
        ({"capacity": 0.7, "balance_by": "bias"}, False, "full"),
        ({"experts_per_token": 1, "dense_layers": 1}, True, "selective"),
    ],
    4: [({"shared_hidden": 8}, False, "none"), ({}, True, "none")],
}


def all_cases() -> None:
    for changes, starved, recompute in CASES[dist.get_world_size()]:
        as_one_process(changes, starved, recompute)


@pytest.mark.parametrize("ranks", CASES)
def test_loss_and_gradients_are_those_of_one_process(ranks: int, tmp_path: Path) -> None:
    on_ranks(ranks, tmp_path, all_cases)


def mixture(config: DecoderConfig) -> moe.MoE:
    """Tokens with a positive first feature want the last half of the experts, others the first."""
    part = moe.MoE(config).double().train()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in part.parameters():
            parameter.normal_(0.0, 0.3, generator=generator)
        half = config.experts // 2
        part.router.weight[:half, 0] = -9.0
        part.router.weight[half:, 0] = 9.0
    return part


def one_way(signs: tuple[float, ...], dtype: torch.dtype) -> None:
    """``signs``: of each rank's first feature."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    config = section()
    reference, spread = mixture(config).to(dtype), mixture(config).to(dtype)
    hidden = torch.randn(ranks, 2, 7, 16, generator=torch.Generator().manual_seed(2)).to(dtype)
    for one, sign in zip(hidden, signs, strict=True):
        one[..., 0] = sign * 3.0
    holder = torch.nn.Module()
    holder.config, holder.mlp = config, spread  # pyright: ignore
    boxes = expert.apply(holder, mesh.build(LayoutSection(expert=ranks), CPU))
    slope = torch.randn(ranks, 2, 7, 16, generator=torch.Generator().manual_seed(3)).to(dtype)

    given = hidden.clone().requires_grad_()
    right, balance, load = reference(given.flatten(0, 1))
    ((right * slope.flatten(0, 1)).sum() + balance).backward()
    assert given.grad is not None
    own = hidden[rank].clone().requires_grad_()
    found, own_balance, own_load = spread(own)
    ((found * slope[rank]).sum() + own_balance).backward()
    assert own.grad is not None

    exact: dict[str, Any] = EXACT if dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-5}
    assert own_load[2:].sum() == (own_load.sum() if signs[rank] > 0 else 0)
    assert torch.equal(whole(own_load, None), load)
    torch.testing.assert_close(found, right.view(ranks, 2, 7, 16)[rank], **exact)
    torch.testing.assert_close(whole(own_balance.detach(), None), balance.detach(), **exact)
    torch.testing.assert_close(own.grad, given.grad[rank], **exact)
    gradients = dict(spread.named_parameters())
    for name, parameter in reference.named_parameters():
        mine = gradients[name].grad
        assert mine is not None
        together = whole(mine.contiguous(), boxes.get(f"mlp.{name}"))
        torch.testing.assert_close(together, parameter.grad, **exact)


# By the number of ranks: each to the other, each to itself, all to the last, and so on.
SIGNS: dict[int, list[tuple[float, ...]]] = {
    2: [(1.0, -1.0), (-1.0, 1.0), (1.0, 1.0)],
    4: [(1.0, -1.0, 1.0, 1.0), (1.0, 1.0, 1.0, 1.0)],
}


def all_ways() -> None:
    for signs in SIGNS[dist.get_world_size()]:
        for dtype in (torch.float64, torch.float32):
            one_way(signs, dtype)


@pytest.mark.parametrize("ranks", SIGNS)
def test_a_rank_whose_tokens_all_go_to_one_side(ranks: int, tmp_path: Path) -> None:
    on_ranks(ranks, tmp_path, all_ways)


def refusals() -> None:
    three = mesh.build(LayoutSection(expert=3), CPU)
    with pytest.raises(
        RecipeError, match=r"layout\.expert: 3 ranks do not divide 4 experts.*; 2 w"
    ):
        expert.apply(decoder.Decoder(section()), three)
    dense = DecoderConfig(vocab=VOCAB)
    with pytest.raises(RecipeError, match=r"layout\.expert: Decoder has no experts"):
        expert.apply(decoder.Decoder(dense), three)
    group = dist.group.WORLD
    assert group is not None
    with pytest.raises(RecipeError, match=r"model\.capacity: is not possible"):
        expert.share_sequences(decoder.Decoder(section(capacity=1.0)), group)


def test_what_does_not_fit_is_refused_by_name(tmp_path: Path) -> None:
    on_ranks(3, tmp_path, refusals)


def test_one_process_is_left_alone() -> None:
    module = decoder.Decoder(section())
    assert expert.apply(module, mesh.single()) == {}
    assert all(part.exchange is None for part in module.modules() if isinstance(part, moe.Experts))


def shared_sequences() -> None:
    """Halves of each sequence on two ranks: the balance and its gradient add up to the whole's."""
    rank = dist.get_rank()
    config = section(balance=1.0)
    reference, spread = mixture(config), mixture(config)
    group = dist.group.WORLD
    assert group is not None
    expert.share_sequences(spread, group)
    hidden = torch.randn(3, 8, 16, generator=torch.Generator().manual_seed(2)).double()
    right = reference(hidden)[1]
    right.backward()
    own = spread(hidden.chunk(2, 1)[rank])[1]
    own.backward()
    torch.testing.assert_close(whole(own.detach(), None), right.detach(), **EXACT)
    assert spread.router.weight.grad is not None
    found = whole(spread.router.weight.grad, None)
    torch.testing.assert_close(found, reference.router.weight.grad, **EXACT)


def test_ranks_that_share_sequences_balance_whole_ones(tmp_path: Path) -> None:
    on_ranks(2, tmp_path, shared_sequences)
