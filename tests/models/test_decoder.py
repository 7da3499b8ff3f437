"""What the decoder computes, and what it must not do while computing it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import own_attention
from megalith import models
from megalith.core.errors import MegalithError, RecipeError
from megalith.models.decoder import Decoder, KeyValueCache
from megalith.models.layers import rotary_tables, rotate
from megalith.recipe.families import DecoderConfig, RopeScaling

VOCAB = 61
LLAMA: dict[str, Any] = {
    "positions": "rope",
    "norm": "rmsnorm",
    "activation": "swiglu",
    "kv_heads": 2,
    "tied": False,
    "qkv_bias": False,
    "output_bias": False,
    "mlp_bias": False,
}
VARIANTS = {
    "gpt2": {},
    "llama": LLAMA,
    "one-key-head": {**LLAMA, "kv_heads": 1},
    "window": {**LLAMA, "window": 5},
    "window-in-part": {**LLAMA, "window": 5, "window_from": 1, "qk_norm": True, "head_dim": 16},
    "gpt2-window": {"window": 4},
}
variants = pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS.keys())


def config(**changes: Any) -> DecoderConfig:
    values: dict[str, Any] = {"vocab": VOCAB, "layers": 3, "width": 32, "heads": 4, "context": 64}
    # Large weights make attention sharp, so that a wrong mask or scale shows.
    return DecoderConfig(**{**values, "init_std": 0.2, **changes})


def build(**changes: Any) -> Decoder:
    module = models.build(config(**changes), seed=0)
    assert isinstance(module, Decoder)
    return module


def tokens(batch: int, seq: int) -> Tensor:
    return torch.randint(0, VOCAB, (batch, seq), generator=torch.Generator().manual_seed(3))


DOCUMENTS = torch.tensor([[0] * 7 + [1] * 1 + [2] * 12, [0] * 20])
RESTARTED = torch.cat(
    [
        torch.cat([torch.arange(7), torch.arange(1), torch.arange(12)])[None],
        torch.arange(20)[None],
    ]
)


@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["whole", "documents"])
@variants
def test_sdpa_equals_reference_in_value_and_gradient(
    variant: dict[str, Any], documents: Tensor | None
) -> None:
    found = []
    for attention in ("sdpa", "reference"):
        model = build(**variant, attention=attention).double()
        logits = model(tokens(2, 20), documents=documents)
        logits.logsumexp(-1).sum().backward()
        found.append((logits, {n: p.grad for n, p in model.named_parameters()}))
    torch.testing.assert_close(*(logits for logits, _ in found), atol=1e-11, rtol=0)
    torch.testing.assert_close(*(gradients for _, gradients in found), atol=1e-11, rtol=1e-11)


def visible(query: int, key: int, window: int | None, documents: Tensor | None) -> bool:
    """The contract of a mask, in words."""
    inside = window is None or query - key < window
    same = documents is None or documents[query] == documents[key]
    return bool(key <= query and inside and same)


@pytest.mark.parametrize("window", [None, 1, 5])
@pytest.mark.parametrize("documents", [None, DOCUMENTS])
@pytest.mark.parametrize("attention", ["sdpa", "reference"])
def test_one_block_sees_exactly_what_its_mask_allows(
    attention: str, documents: Tensor | None, window: int | None
) -> None:
    model = build(**LLAMA, layers=1, window=window, attention=attention).double()
    leaf = model.embedding(tokens(2, 20)).detach().requires_grad_()
    model.embedding.forward = lambda _: leaf  # type: ignore[method-assign]
    logits = model(tokens(2, 20), documents=documents)
    for query in range(20):
        (gradient,) = torch.autograd.grad(logits[:, query].pow(2).sum(), leaf, retain_graph=True)
        for row in range(2):
            seen = gradient[row].abs().amax(-1) > 0
            ids = None if documents is None else documents[row]
            assert seen.tolist() == [visible(query, key, window, ids) for key in range(20)]


@variants
def test_masked_documents_equal_separate_documents(variant: dict[str, Any]) -> None:
    model = build(**variant).double()
    text = tokens(2, 20)
    packed = model(text, documents=DOCUMENTS, positions=RESTARTED)
    for row, start, end in [(0, 0, 7), (0, 7, 8), (0, 8, 20), (1, 0, 20)]:
        alone = model(text[row : row + 1, start:end])
        torch.testing.assert_close(packed[row : row + 1, start:end], alone, atol=1e-12, rtol=0)


@pytest.mark.parametrize("chunks", [[20], [1] * 20, [7, 1, 1, 4, 1, 6]])
@variants
def test_cached_equals_uncached(variant: dict[str, Any], chunks: list[int]) -> None:
    model = build(**variant).double().eval()
    text = tokens(2, 20)
    cache = KeyValueCache(len(model.blocks))
    with torch.no_grad():
        parts = [model(part, cache=cache) for part in text.split(chunks, dim=1)]
        torch.testing.assert_close(torch.cat(parts, 1), model(text), atol=1e-12, rtol=0)
    assert cache.length == 20


@variants
def test_a_long_cached_text_equals_uncached(variant: dict[str, Any]) -> None:
    """Past every growth of the cache's tensors, and past many windows."""
    model = build(**variant, context=512).double().eval()
    text = tokens(1, 300)
    cache = KeyValueCache(len(model.blocks))
    with torch.no_grad():
        parts = [model(part, cache=cache) for part in text.split([100] + [1] * 200, dim=1)]
        torch.testing.assert_close(torch.cat(parts, 1), model(text), atol=1e-12, rtol=0)


@variants
def test_rows_padded_on_the_left_equal_rows_alone(variant: dict[str, Any]) -> None:
    """How generation runs prompts of unequal length in one batch."""
    model = build(**variant).double().eval()
    text = tokens(2, 12)
    pad = torch.tensor([0, 5])
    places = torch.arange(12)
    positions = (places - pad[:, None]).clamp(min=0)
    documents = (places >= pad[:, None]).long()
    cache = KeyValueCache(len(model.blocks))
    with torch.no_grad():
        parts = [
            model(
                text[:, a:b], positions=positions[:, a:b], documents=documents[:, a:b], cache=cache
            )
            for a, b in [(0, 9), (9, 10), (10, 12)]
        ]
        found = torch.cat(parts, 1)
        torch.testing.assert_close(found[:1], model(text[:1]), atol=1e-12, rtol=0)
        torch.testing.assert_close(found[1:, 5:], model(text[1:, 5:]), atol=1e-12, rtol=0)


def test_a_cache_takes_documents_always_or_never() -> None:
    model, cache = build().eval(), KeyValueCache(3)
    with torch.no_grad():
        model(tokens(1, 4), cache=cache)
        with pytest.raises(MegalithError, match="to every call"):
            model(tokens(1, 1), cache=cache, documents=torch.zeros(1, 1, dtype=torch.int64))


def test_plain_sequences_take_the_causal_path_without_a_mask() -> None:
    own_attention.Recording.calls.clear()
    model = build(attention="own_attention:Recording", window=8, window_from=2, dropout=0.25)
    model(tokens(2, 8))
    first = own_attention.Recording.calls.copy()
    assert [call["layer"] for call in first] == [0, 1, 2]
    assert all(call["mask"] is None and call["causal"] for call in first)
    assert {call["dropout"] for call in first} == {0.25}

    own_attention.Recording.calls.clear()
    model.eval()(tokens(2, 9))  # one more than the window
    masks = [call["mask"] for call in own_attention.Recording.calls]
    assert [mask is None for mask in masks] == [True, True, False]
    assert {call["dropout"] for call in own_attention.Recording.calls} == {0.0}

    own_attention.Recording.calls.clear()
    cache = KeyValueCache(3)
    for part in tokens(2, 12).split([11, 1], dim=1):
        model(part, cache=cache)
    last = own_attention.Recording.calls[3:]
    assert all(call["mask"] is None and not call["causal"] for call in last)
    assert [call["keys"] for call in last] == [12, 12, 8]


def test_an_attention_of_the_users_with_parameters() -> None:
    plain, own = build(layers=1), build(layers=1, attention="own_attention:Scaled")
    with torch.no_grad():
        plain.get_parameter("blocks.0.attention.output.weight").mul_(2)
    torch.testing.assert_close(own(tokens(1, 9)), plain(tokens(1, 9)))
    own(tokens(1, 9)).sum().backward()
    assert own.get_parameter("blocks.0.attention.core.factor").grad is not None


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("own_attention:Skaled", "has no 'Skaled'; did you mean 'Scaled'"),
        ("no_such_module:Core", "cannot import 'no_such_module'"),
        ("own_attention:not_a_module", "is not an nn.Module class"),
        ("own_attention:TooFewArguments", r"cannot be made from \(config, layer\)"),
    ],
)
def test_an_unusable_attention_is_refused_by_name(reference: str, message: str) -> None:
    with pytest.raises(RecipeError, match=rf"^model\.attention: .*{message}"):
        build(attention=reference)


def test_a_head_of_the_callers_sees_hidden_states_and_weight() -> None:
    for tied in (True, False):
        model = build(tied=tied)
        text = tokens(2, 8)
        last = model(text, head=lambda hidden, weight: hidden[:, -1:] @ weight.T)
        torch.testing.assert_close(last, model(text)[:, -1:])


def test_a_tied_head_is_one_parameter() -> None:
    names = set(build(tied=False).state_dict()) - set(build(tied=True).state_dict())
    assert names == {"head.weight"}


def test_learned_positions_end_and_vocab_is_needed() -> None:
    with pytest.raises(MegalithError, match="65 tokens are more than the model's 64 positions"):
        build()(tokens(1, 65))
    with pytest.raises(RecipeError, match=r"^model\.vocab: "):
        Decoder(DecoderConfig())


def test_dropout_acts_in_training_only_and_by_seed() -> None:
    model, text = build(dropout=0.3), tokens(2, 16)
    torch.manual_seed(1)
    first = model(text)
    torch.manual_seed(1)
    assert torch.equal(first, model(text))
    assert not torch.equal(first, model(text))
    model.eval()
    assert torch.equal(model(text), model(text))
    torch.testing.assert_close(model(text), build().eval()(text))


@pytest.mark.parametrize("attention", ["sdpa", "reference"])
@variants
def test_bf16_autocast_runs_and_keeps_angles_in_float32(
    variant: dict[str, Any], attention: str
) -> None:
    model = build(**{**variant, "init_std": 0.05}, attention=attention)
    text = tokens(2, 12)
    tables: list[Any] = []
    model.blocks[0].register_forward_pre_hook(lambda _, args: tables.append(args[1:3]))
    exact = model(text)
    with torch.autocast("cpu", torch.bfloat16):
        rough = model(text)
        rough.float().logsumexp(-1).sum().backward()
    assert rough.dtype == torch.bfloat16
    assert (rough - exact).abs().max() < 0.05 * exact.abs().max()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    model.bfloat16()(text)
    if model.config.positions == "rope":
        for cos, sin in tables[1:]:
            assert torch.equal(cos, tables[0][0])
            assert torch.equal(sin, tables[0][1])
            assert cos.dtype == torch.float32


def test_reference_scores_and_softmax_are_float32_on_bf16() -> None:
    """In bf16 a score of 40 is off by up to 0.1, and its weight by a tenth."""
    core = build(attention="reference", layers=1).get_submodule("blocks.0.attention.core")
    query, key, value = torch.randn(3, 1, 1, 64, 16, dtype=torch.bfloat16).unbind(0)
    query = query * 8
    exact = core(query.double(), key.double(), value.double(), None, True, 0.0)
    rough = core(query, key, value, None, True, 0.0)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(core(query, key, value, None, True, 0.0), rough)
    assert (rough.dtype, exact.dtype) == (torch.bfloat16, torch.float64)
    assert (rough.double() - exact).abs().max() < 0.01 * exact.abs().max()


def test_rotation_is_a_complex_product() -> None:
    """Su et al. 2021, equation 13: the pair (i, i + d/2) times exp(i m theta_i)."""
    positions = torch.tensor([[0, 1, 5, 1000]])
    cos, sin = rotary_tables(positions, 8, 100.0, RopeScaling(), 64, torch.float64)
    states = torch.randn(2, 3, 4, 8, dtype=torch.float64)
    theta = torch.tensor([100.0 ** (-2 * i / 8) for i in range(4)], dtype=torch.float64)
    turn = torch.polar(torch.ones(4, 4, dtype=torch.float64), positions[0][:, None] * theta)
    product = torch.complex(states[..., :4], states[..., 4:]) * turn
    expected = torch.cat([product.real, product.imag], -1)
    torch.testing.assert_close(rotate(states, cos, sin), expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("kind", ["linear", "dynamic", "yarn", "llama3"])
def test_scaled_angles_agree_in_both_precisions(kind: Any) -> None:
    scaling = RopeScaling(kind=kind, factor=4.0, original_context=64)
    positions = torch.arange(256)[None]
    wide = rotary_tables(positions, 16, 1e4, scaling, 64, torch.float64)
    narrow = rotary_tables(positions, 16, 1e4, scaling, 64, torch.float32)
    torch.testing.assert_close(narrow, tuple(t.float() for t in wide), atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["gpt2", "llama", "window-in-part"])
def test_compiling_every_block_makes_two_graphs_at_most(name: str) -> None:
    """One graph for the first length, one with the length left open: none per layer or length."""
    torch._dynamo.reset()
    counters.clear()
    eager, model = build(**VARIANTS[name]), build(**VARIANTS[name])
    for block in model.blocks:
        block.compile(backend="eager")
    kinds = 2 if model.config.window_from > 0 else 1  # blocks with a mask and blocks without
    for seq in (16, 24, 9, 33, 64):
        torch.testing.assert_close(model(tokens(2, seq)), eager(tokens(2, seq)))
    assert counters["stats"]["unique_graphs"] <= 2 * kinds
    assert not counters["graph_break"]


@variants
def test_fake_and_meta_tensors_pass_through_forward_and_backward(variant: dict[str, Any]) -> None:
    with torch.device("meta"):
        model = Decoder(config(**variant))
    text = torch.empty(2, 20, dtype=torch.int64, device="meta")
    model(text, documents=text).sum().backward()
    with FakeTensorMode(allow_non_fake_inputs=False):
        fake = Decoder(config(**variant, rope_scaling=RopeScaling()))
        text = torch.empty(2, 20, dtype=torch.int64)
        logits = fake(text, documents=text)
        logits.sum().backward()
    assert logits.shape == (2, 20, VOCAB)
    assert all(p.grad is not None for p in fake.parameters())


def test_dynamic_scaling_needs_no_number_from_the_device() -> None:
    scaling = RopeScaling(kind="dynamic", factor=2.0)
    with FakeTensorMode():
        model = Decoder(config(**LLAMA, rope_scaling=scaling))
        assert model(torch.empty(1, 80, dtype=torch.int64)).shape == (1, 80, VOCAB)


@variants
def test_blocks_can_be_checkpointed_with_dropout(variant: dict[str, Any]) -> None:
    found = []
    for recompute in (False, True):
        model = build(**variant, dropout=0.2)
        for block in model.blocks if recompute else []:
            run = block.forward
            block.forward = lambda *a, run=run: checkpoint(run, *a, use_reentrant=False)
        torch.manual_seed(5)
        model(tokens(2, 20), documents=DOCUMENTS).logsumexp(-1).sum().backward()
        found.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_attention_is_the_textbook_formula() -> None:
    """One query, written out in Python floats (Vaswani et al. 2017, equation 1)."""
    core = build(attention="reference").get_submodule("blocks.0.attention.core")
    query, key, value = torch.randn(3, 1, 1, 3, 2, dtype=torch.float64).unbind(0)
    q, keys, values = query[0, 0, 2].tolist(), key[0, 0].tolist(), value[0, 0].tolist()
    raw = [math.exp(sum(a * b for a, b in zip(q, k, strict=True)) / math.sqrt(2)) for k in keys]
    expected = [sum(w * v[i] for w, v in zip(raw, values, strict=True)) / sum(raw) for i in (0, 1)]
    found = core(query, key, value, None, True, 0.0)[0, 0, 2]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))
