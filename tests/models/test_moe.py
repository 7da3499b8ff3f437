"""The mixture of experts computes what its definition says, and balances whatever the batch."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pydantic import ValidationError
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from megalith import models
from megalith.layout import checkpointing
from megalith.layout.units import units
from megalith.models import decoder
from megalith.models.decoder import moe
from megalith.models.grouped import grouped
from megalith.recipe.families import DecoderConfig
from megalith.tasks.language import Language

VOCAB = 53
GIVEN: dict[str, Any] = {
    "vocab": VOCAB,
    "layers": 2,
    "width": 16,
    "heads": 2,
    "context": 32,
    "experts": 5,
    "expert_hidden": 24,
    "activation": "swiglu",
    "mlp_bias": False,
}


def section(**changes: Any) -> DecoderConfig:
    return DecoderConfig(**{**GIVEN, **changes})


def model(dtype: torch.dtype = torch.float64, **changes: Any) -> decoder.Decoder:
    module = models.build(section(**changes), seed=0)
    assert isinstance(module, decoder.Decoder)
    return module.to(dtype).train()


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def mixture(dtype: torch.dtype = torch.float64, **changes: Any) -> moe.MoE:
    """With weights large enough that the choice is spread unevenly over the experts."""
    part = moe.MoE(section(**changes)).to(dtype).train()
    with torch.no_grad():
        for seed, parameter in enumerate(part.parameters()):
            parameter.copy_(normal(*parameter.shape, seed=seed + 1) * 0.5)
        if part.bias is not None:
            part.bias.copy_(normal(len(part.bias), seed=99) * 0.2)
    return part


def dense(part: moe.MoE, config: DecoderConfig, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """The definition: every expert computes every token, and a mask keeps the chosen.

    Token by token in plain loops; shares no code with the module but its parameters.
    """
    batch, seq, _ = hidden.shape
    p = torch.softmax(torch.einsum("bsw,ew->bse", hidden, part.router.weight), -1)
    score = p.detach() if part.bias is None else p.detach() + part.bias
    mask = torch.zeros_like(p)
    taken = torch.zeros_like(p)
    room = math.inf
    if config.capacity is not None:
        room = math.ceil(config.capacity * seq * config.experts_per_token / config.experts)
    for b in range(batch):
        used = [0] * config.experts
        for s in range(seq):
            best = sorted(range(config.experts), key=lambda e, b=b, s=s: -float(score[b, s, e]))
            for e in best[: config.experts_per_token]:
                mask[b, s, e] = 1.0
                used[e] += 1
                taken[b, s, e] = float(used[e] <= room)
    weight = p * mask
    if config.router_normalise:
        weight = weight / weight.sum(-1, keepdim=True)
    up = torch.einsum("bsw,ehw->bseh", hidden, part.experts.up)
    if part.experts.gate is not None:
        inner = F.silu(torch.einsum("bsw,ehw->bseh", hidden, part.experts.gate)) * up
    else:
        inner = {
            "relu": F.relu(up),
            "gelu": F.gelu(up),
            "gelu_tanh": F.gelu(up, approximate="tanh"),
        }[config.activation]
    each = torch.einsum("bseh,ewh->bsew", inner, part.experts.down)
    out = ((weight * taken)[..., None] * each).sum(2)
    if part.shared is not None:
        assert part.shared.gate is not None
        out = out + part.shared.down(F.silu(part.shared.gate(hidden)) * part.shared.up(hidden))
    f = mask.mean(1) / config.experts_per_token
    balance = config.balance * config.experts * (f * p.mean(1)).sum(-1) * seq
    return out, balance.sum()


CASES: list[Any] = [
    pytest.param({}, id="plain"),
    pytest.param({"router_normalise": False, "experts_per_token": 3}, id="not-normalised"),
    pytest.param({"experts_per_token": 1, "activation": "gelu"}, id="one-expert-per-token"),
    pytest.param({"activation": "relu"}, id="relu"),
    pytest.param({"activation": "gelu_tanh", "experts_per_token": 5}, id="all-experts"),
    pytest.param({"shared_hidden": 12}, id="shared"),
    pytest.param({"balance_by": "bias"}, id="bias"),
    pytest.param({"balance_by": "bias", "balance": 0.1}, id="bias-and-loss"),
    pytest.param({"capacity": 0.6}, id="capacity"),
    pytest.param({"capacity": 1.0, "experts_per_token": 3, "balance": 0.5}, id="capacity-3"),
]


@pytest.mark.parametrize("changes", CASES)
def test_output_and_gradients_are_those_of_the_dense_definition(changes: dict[str, Any]) -> None:
    config, part = section(**changes), mixture(**changes)
    found: list[list[Tensor]] = []
    for compute in (part, lambda x: dense(part, config, x)):
        hidden = normal(3, 14, 16).requires_grad_()
        out, balance = compute(hidden)[:2]
        total = (out * normal(3, 14, 16, seed=7)).sum()
        total = total if balance is None else total + balance
        inputs = [hidden, *part.parameters()]
        found.append([out, total, *torch.autograd.grad(total, inputs)])
    for ours, right in zip(*found, strict=True):
        torch.testing.assert_close(ours, right, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("capacity", [None, 0.7])
def test_the_grouped_product_of_float32_agrees_with_the_loop_of_float64(
    capacity: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[torch.dtype] = []
    real = F.grouped_mm

    def spy(left: Tensor, right: Tensor, **kwargs: Any) -> Tensor:
        calls.append(left.dtype)
        out = real(left, right, **kwargs)
        used = int(kwargs["offs"][-1])
        if right.ndim == 3 and used < len(out):
            out[used:] = torch.nan  # what a kernel leaves undefined must not be seen
        return out

    monkeypatch.setattr(F, "grouped_mm", spy)
    found: list[list[Tensor]] = []
    for dtype in (torch.float64, torch.float32):
        part = mixture(dtype, capacity=capacity)
        hidden = normal(3, 14, 16).to(dtype).requires_grad_()
        out, balance, _ = part(hidden)
        assert balance is not None
        total = (out * normal(3, 14, 16, seed=7).to(dtype)).sum() + balance
        found.append([out, *torch.autograd.grad(total, [hidden, *part.parameters()])])
    assert set(calls) == {torch.float32}
    assert len(calls) == 9  # three matrices: forward, and each of backward's two products
    for wide, narrow in zip(*found, strict=True):
        torch.testing.assert_close(narrow.double(), wide, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("width", [16, 6])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_grouped_with_empty_groups_and_rows_behind_the_last(dtype: torch.dtype, width: int) -> None:
    counts = torch.tensor([0, 4, 0, 3])
    rows = normal(9, width).to(dtype).requires_grad_()
    weights = normal(4, 10, width, seed=1).to(dtype).requires_grad_()
    out = grouped(rows, weights, counts)[:7]
    right = torch.cat([rows[:4] @ weights[1].t(), rows[4:7] @ weights[3].t()])
    close: dict[str, Any] = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(out, right, **close)
    up = normal(7, 10, seed=2).to(dtype)
    ours = torch.autograd.grad(out, [rows, weights], up)
    theirs = torch.autograd.grad(right, [rows, weights], up)
    torch.testing.assert_close(ours[0][:7], theirs[0][:7], **close)
    torch.testing.assert_close(ours[1], theirs[1], **close)
    assert not ours[1][[0, 2]].any()


def test_grouped_is_a_proper_operator() -> None:
    """Its fake and its autograd registrations agree with what it does."""
    arguments = (
        normal(7, 16).requires_grad_(),
        normal(3, 8, 16).requires_grad_(),
        torch.tensor([2, 0, 5]),
    )
    operator = torch.ops.megalith.grouped
    torch.library.opcheck(operator, arguments)
    torch.library.opcheck(
        operator, tuple(a.detach().float() if a.is_floating_point() else a for a in arguments)
    )


def test_an_expert_without_tokens_has_a_gradient_of_zeros() -> None:
    part = mixture(experts_per_token=1)
    with torch.no_grad():
        part.router.weight.zero_()
        part.router.weight[2] = 1.0
    part(normal(2, 6, 16).abs())[0].sum().backward()
    for weight in (part.experts.gate, part.experts.up, part.experts.down):
        assert weight is not None
        assert weight.grad is not None
        assert weight.grad[2].any()
        assert not weight.grad[[0, 1, 3, 4]].any()


def batch(samples: int = 6, seq: int = 12) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, VOCAB, (samples, seq), generator=generator)
    return {"tokens": tokens, "targets": tokens.roll(-1, 1)}


def gradients(module: decoder.Decoder, micro: int) -> dict[str, Tensor]:
    data = batch()
    sums: dict[str, Tensor] = {}
    for start in range(0, 6, micro):
        part = {name: value[start : start + micro] for name, value in data.items()}
        loss = Language().loss(module, part)
        loss.total.backward()
        for name, value in {"loss": loss.total.detach(), **loss.sums}.items():
            sums[name] = sums.get(name, torch.zeros(())) + value
    return sums | {n: p.grad for n, p in module.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    "changes", [{"balance": 0.3}, {"capacity": 0.8}, {"dense_layers": 1, "shared_hidden": 8}]
)
@pytest.mark.parametrize("micro", [1, 4])
def test_loss_and_gradients_do_not_depend_on_the_micro_batches(
    changes: dict[str, Any], micro: int
) -> None:
    whole = gradients(model(**changes), 6)
    parts = gradients(model(**changes), micro)
    assert whole["balance"] > 0
    assert whole.keys() == parts.keys()
    for name, value in whole.items():
        torch.testing.assert_close(parts[name], value, rtol=1e-11, atol=1e-12)


def test_the_balance_loss_is_one_per_token_and_layer_when_balanced_and_more_when_not() -> None:
    module = model(balance=1.0)
    with torch.no_grad():
        for part in moe.mixtures(module):
            part.router.weight.zero_()
    even = gradients(module, 6)["balance"]
    torch.testing.assert_close(even.item(), 6 * 12 * 2.0)
    assert gradients(model(balance=1.0, init_std=1.0), 6)["balance"] > even * 1.1


def test_training_adds_the_balance_loss_and_evaluation_does_not() -> None:
    module = model(balance=0.5)
    plain = model(balance=0.0)
    with_it, without = (Language().loss(m, batch()) for m in (module, plain))
    torch.testing.assert_close(with_it.total, without.total + with_it.sums["balance"])
    assert not without.sums
    assert not with_it.sums["balance"].requires_grad
    copy.deepcopy(module)  # no graph stays behind in it
    evaluated = Language().loss(module.eval(), batch())
    assert evaluated.sums == {}
    torch.testing.assert_close(evaluated.total, without.total)
    module.train()(batch()["tokens"])
    assert module.balance is not None
    module.eval()(batch()["tokens"])
    assert module.balance is None


@pytest.mark.parametrize("mode", ["selective", "full"])
@pytest.mark.parametrize("changes", [{"balance": 0.3}, {"balance_by": "bias", "capacity": 0.8}])
def test_recomputation_changes_nothing_and_counts_nothing_twice(
    mode: Any, changes: dict[str, Any]
) -> None:
    plain, recomputed = model(**changes), model(**changes)
    checkpointing.apply(units(recomputed), mode)
    one, other = gradients(plain, 4), gradients(recomputed, 4)
    for name, value in one.items():
        torch.testing.assert_close(other[name], value, rtol=1e-12, atol=1e-13)
    if "balance_by" in changes:
        for module in (plain, recomputed):
            loads = [part.load for part in moe.mixtures(module)]
            assert all(load is not None and load.sum() == 6 * 12 * 2 for load in loads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_compiled_blocks_compute_the_same(dtype: torch.dtype) -> None:
    plain, compiled = model(dtype, capacity=0.8), model(dtype, capacity=0.8)
    for unit in units(compiled).values():
        unit.compile(backend="aot_eager")
    one, other = gradients(plain, 6), gradients(compiled, 6)
    for name, value in one.items():
        torch.testing.assert_close(other[name], value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_fake_tensors_pass_through_forward_and_backward(dtype: torch.dtype) -> None:
    """What ``plan`` needs: no value is read on the host."""
    with torch.device("meta"):
        shapes = decoder.Decoder(section(capacity=1.0)).to(dtype).state_dict()
    with FakeTensorMode():
        module = decoder.Decoder(section(capacity=1.0)).train()
        fake = {name: torch.zeros(s.shape, dtype=dtype) for name, s in shapes.items()}
        module.load_state_dict(fake, assign=True)
        tokens = torch.zeros(2, 8, dtype=torch.int64)
        Language().loss(module, {"tokens": tokens, "targets": tokens}).total.backward()
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.shape == parameter.shape


def test_the_router_is_float32_under_autocast() -> None:
    part = mixture(torch.float32)
    hidden = normal(2, 9, 16, dtype=torch.float32).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, balance, load = part(hidden)
    assert out.dtype == torch.bfloat16
    assert balance is not None
    assert balance.dtype == torch.float32
    right = part(hidden.float())
    assert torch.equal(load, right[2])
    torch.testing.assert_close(out.float(), right[0], rtol=5e-2, atol=5e-2)
    parameters = list(part.parameters())
    narrow = torch.autograd.grad(out.float().square().sum() + balance, parameters)
    wide = torch.autograd.grad(right[0].square().sum() + right[1], parameters)
    for one, other in zip(narrow, wide, strict=True):
        assert one.dtype == torch.float32
        torch.testing.assert_close(one / other.norm(), other / other.norm(), rtol=0, atol=2e-2)


def test_over_capacity_the_first_tokens_stay_and_later_ones_change_nothing_before() -> None:
    """All tokens want expert 2, which has room for ceil(0.5 * 10 / 5) = 1 of them."""
    part = mixture(experts_per_token=1, capacity=0.5)
    with torch.no_grad():
        part.router.weight.zero_()
        part.router.weight[2] = 1.0
    hidden = normal(2, 10, 16).abs()
    out = part(hidden)[0]
    assert out[:, 0].any(-1).all()
    assert not out[:, 1:].any()
    hidden[:, 5:] += 1.0
    assert torch.equal(part(hidden)[0][:, :5], out[:, :5])
    assert part.eval()(hidden)[0].any(-1).all()  # nothing is dropped in evaluation


def test_the_bias_moves_by_its_rate_against_the_load_of_the_whole_update() -> None:
    module = model(balance_by="bias", bias_rate=0.25)
    gradients(module, 2)
    loads = [part.load for part in moe.mixtures(module)]
    again = model(balance_by="bias", bias_rate=0.25)
    gradients(again, 6)
    asked: list[Tensor] = []

    def sum_(load: Tensor) -> Tensor:
        asked.append(load)
        return load * 3  # as if three ranks had seen the same

    moe.update_bias(module, sum_)
    moe.update_bias(again)
    assert [tuple(load.shape) for load in asked] == [(2, 5)]  # one sum for all layers
    for part, same, load in zip(moe.mixtures(module), moe.mixtures(again), loads, strict=True):
        assert load is not None
        assert part.bias is not None
        expected = 0.25 * torch.sign(load.double().mean() - load.double())
        assert torch.equal(part.bias, expected)
        assert same.bias is not None
        assert torch.equal(same.bias, expected)
        assert part.load is None
        assert int(load.sum()) == 6 * 12 * 2


def test_the_bias_alone_evens_out_a_skewed_router() -> None:
    part = mixture(balance_by="bias", bias_rate=0.002)
    assert part.bias is not None
    part.bias.zero_()

    @torch.no_grad()
    def load(seed: int) -> Tensor:
        return part(normal(8, 64, 16, seed=seed) + 1.5)[2]

    def unevenness() -> float:
        loads = load(1000).double()
        return float(loads.max() / loads.mean())

    before = unevenness()
    for update in range(300):
        part.observe(load(update))
        moe.update_bias(part)
    assert before > 1.9
    assert unevenness() < 1.2


def test_a_skipped_update_forgets_its_load_and_other_models_have_none() -> None:
    module = model(balance_by="bias")
    gradients(module, 6)
    moe.forget_load(module)
    moe.update_bias(module, lambda load: pytest.fail("nothing to add up"))
    assert not any(part.bias.any() for part in moe.mixtures(module) if part.bias is not None)
    other = model()
    gradients(other, 6)
    moe.update_bias(other, lambda load: pytest.fail("nothing to add up"))
    assert not any("bias" in name for name, _ in other.named_buffers())


def test_counts_of_parts_of_a_sequence_make_the_balance_of_the_whole() -> None:
    """Each part's own probabilities against everybody's counts; the parts' losses add up."""
    part = mixture(balance=1.0)
    hidden = normal(3, 12, 16)
    right = part(hidden)[1]
    assert right is not None
    halves = hidden.chunk(2, 1)
    whole = torch.stack([count_of(part, half) for half in halves]).sum(0)
    part.over_sequence = lambda counts: whole
    found = [part(half)[1] for half in halves]
    assert found[0] is not None
    assert found[1] is not None
    torch.testing.assert_close(found[0] + found[1], right)
    assert not torch.isclose(found[0], found[1])


def count_of(part: moe.MoE, hidden: Tensor) -> Tensor:
    chosen = (hidden @ part.router.weight.t()).topk(2).indices
    return F.one_hot(chosen, 5).sum((1, 2))


def test_count_counts() -> None:
    choices = torch.randint(0, 7, (4, 50), generator=torch.Generator().manual_seed(0))
    right = torch.stack([torch.bincount(row, minlength=9)[:9] for row in choices])
    assert torch.equal(moe.count(choices, 9), right)
    assert torch.equal(moe.count(choices, 5), right[:, :5])


def test_decoding_with_a_cache_gives_the_logits_of_the_whole_text() -> None:
    module = model(capacity=0.5).eval()
    tokens = batch(2, 9)["tokens"]
    with torch.no_grad():
        right = module(tokens)
        cache = decoder.KeyValueCache(2)
        found = [module(tokens[:, i : i + 1], cache=cache) for i in range(9)]
    torch.testing.assert_close(torch.cat(found, 1), right)


def test_names_shapes_and_initial_scale() -> None:
    module = model(shared_hidden=8, dense_layers=1, experts=50, expert_hidden=200, width=64)
    shapes = {n: tuple(p.shape) for n, p in module.named_parameters() if ".mlp." in n}
    assert shapes == {
        "blocks.0.mlp.gate.weight": (256, 64),
        "blocks.0.mlp.up.weight": (256, 64),
        "blocks.0.mlp.down.weight": (64, 256),
        "blocks.1.mlp.router.weight": (50, 64),
        "blocks.1.mlp.experts.gate": (50, 200, 64),
        "blocks.1.mlp.experts.up": (50, 200, 64),
        "blocks.1.mlp.experts.down": (50, 64, 200),
        "blocks.1.mlp.shared.gate.weight": (8, 64),
        "blocks.1.mlp.shared.up.weight": (8, 64),
        "blocks.1.mlp.shared.down.weight": (64, 8),
    }
    for name in shapes:
        std = 0.02 / 2.0 if ".down" in name else 0.02  # sqrt(2 * 2 layers)
        assert module.get_parameter(name).std().item() == pytest.approx(std, rel=0.15), name


def test_buffers_are_right_after_to_empty() -> None:
    with torch.device("meta"):
        module = decoder.Decoder(section(balance_by="bias"))
    module.to_empty(device="cpu")
    for part in moe.mixtures(module):
        assert part.bias is not None
        part.bias.fill_(7.0)
    models.initialise(module, seed=0)
    assert not any(part.bias.any() for part in moe.mixtures(module) if part.bias is not None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"experts_per_token": 6}, "experts_per_token|6 are more than the 5 experts"),
        (
            {"experts_per_token": 1, "router_normalise": True},
            "router_normalise|with one expert per token",
        ),
        ({"mlp_bias": True}, "mlp_bias|experts have no biases"),
        ({"dense_layers": 2}, "dense_layers|2 of 2 layers leave none for experts"),
        ({"experts": 0, "capacity": 1.5}, "capacity|needs experts"),
        ({"experts": 0, "shared_hidden": 8}, "shared_hidden|needs experts"),
        ({"experts": 0, "balance_by": "bias"}, "balance_by|needs experts"),
        ({"experts": 0, "dense_layers": 1}, "dense_layers|needs experts"),
        ({"capacity": 0.0}, "greater than 0"),
        ({"balance": -1.0}, "greater than or equal to 0"),
    ],
)
def test_impossible_settings_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        section(**changes)
    assert message in str(caught.value)


def test_defaults_follow_from_each_other() -> None:
    assert section(hidden=40, expert_hidden=40) == DecoderConfig(
        **{k: v for k, v in GIVEN.items() if k != "expert_hidden"}, hidden=40
    )
    assert section().balance == 0.01
    assert section(balance_by="bias").balance == 0.0
    assert section().router_normalise
    assert not section(experts_per_token=1).router_normalise
