"""With and without a cache the same tokens come out; text comes in whole characters."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megalith import models
from megalith.core.errors import MegalithError
from megalith.data.tokenizers import ByteTokenizer, train_bpe
from megalith.generate import Sampling, generate, generate_tokens, stream
from megalith.generate.decode import window_start
from megalith.layout import checkpointing
from megalith.layout.compile import graphs_compiled
from megalith.layout.units import units
from megalith.models.decoder import Decoder
from megalith.recipe.families import DecoderConfig

VOCAB, CONTEXT = 257, 16
ROPE: dict[str, Any] = {
    "positions": "rope",
    "norm": "rmsnorm",
    "activation": "swiglu",
    "kv_heads": 2,
    "qkv_bias": False,
    "output_bias": False,
    "mlp_bias": False,
    "tied": False,
}
KINDS: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "gpt2, odd context": {"context": 13},
    "rope and grouped queries": ROPE,
    "sliding window": {**ROPE, "window": 5},
    "sliding window from the second layer": {**ROPE, "window": 5, "window_from": 1},
    "window as long as the context": {**ROPE, "window": CONTEXT},
    "norms of queries and keys": {**ROPE, "qk_norm": True, "head_dim": 6},
    "dynamic rope": {**ROPE, "rope_scaling": {"kind": "dynamic", "factor": 4.0}},
    "reference attention": {"attention": "reference"},
}
# The penalty keeps greedy choices from going in circles.
GREEDY = Sampling(max_tokens=30, temperature=0, repetition_penalty=2.0)
SAMPLED = Sampling(max_tokens=30, temperature=0.9, top_p=0.95, repetition_penalty=1.1, seed=3)


def decoder(**fields: Any) -> Decoder:
    """A small one whose tokens vary: large initial weights make its choices sharp."""
    values = {"vocab": VOCAB, "context": CONTEXT, "layers": 2, "width": 32, "heads": 4}
    made = models.build(DecoderConfig(**{**values, "init_std": 0.3, **fields}), seed=1)
    assert isinstance(made, Decoder)
    return made


class Scripted(Decoder):
    """Says what it is told to, whatever it reads; notes what it was fed."""

    def __init__(self, script: list[int], vocab: int = VOCAB) -> None:
        super().__init__(DecoderConfig(vocab=vocab, context=512, layers=1, width=4, heads=1))
        self.script, self.fed = list(script), []

    def forward(self, tokens: torch.Tensor, *, cache: Any = None, **_: Any) -> Any:  # type: ignore[override]
        self.fed.append(tokens[0].tolist())
        cache.advance(tokens.shape[1], None)
        logits = torch.full((self.config.vocab or 0,), -20.0)
        logits[self.script.pop(0)] = 20.0
        return logits


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kind", KINDS)
def test_cached_equals_uncached_token_for_token_past_the_end_of_the_context(
    kind: str, sampling: Sampling
) -> None:
    model = decoder(**KINDS[kind])
    for prompt in ([7], list(range(100, 100 + CONTEXT + 21))):
        cached = list(generate_tokens(model, prompt, sampling))
        assert cached == list(generate_tokens(model, prompt, sampling, use_cache=False))
        assert len(cached) == 30
    assert len(set(cached)) > 10  # a model that says one thing would prove nothing


def test_greedy_tokens_are_the_likeliest_of_a_plain_forward_pass() -> None:
    model = decoder(**ROPE)
    ids = [5, 100, 200]
    for token in generate_tokens(model, ids, Sampling(max_tokens=CONTEXT - 3, temperature=0)):
        assert token == int(model(torch.tensor([ids]))[0, -1].argmax())
        ids = [*ids, token]


def test_beyond_the_context_the_older_half_is_dropped() -> None:
    model = decoder()
    ids = [5, 100, 200]
    for token in generate_tokens(model, ids, Sampling(max_tokens=28, temperature=0)):
        # 16 tokens fit; the 17th drops 8, and so does every 8th after it.
        start = 0 if len(ids) <= 16 else 8 if len(ids) <= 24 else 16
        assert token == int(model(torch.tensor([ids[start:]]))[0, -1].argmax())
        ids = [*ids, token]


@pytest.mark.parametrize("context", [1, 2, 3, 24, 25])
def test_the_window_never_exceeds_the_context_and_keeps_at_least_half(context: int) -> None:
    starts = [window_start(length, context) for length in range(1, 10 * context)]
    assert starts == sorted(starts)
    for length, start in enumerate(starts, 1):
        assert 0 <= start < length
        assert length - start <= context
        whole = length <= context and start == 0
        assert whole or length - start > context - max(context // 2, 1)


def test_with_a_cache_each_token_is_fed_once() -> None:
    model, fed = decoder(), []
    model.embedding.register_forward_pre_hook(lambda _, given: fed.append(given[0].shape[1]))
    list(generate_tokens(model, [1, 2, 3, 4], Sampling(max_tokens=10)))
    assert fed == [4] + [1] * 9
    fed.clear()
    list(generate_tokens(model, [1, 2, 3, 4], Sampling(max_tokens=10), use_cache=False))
    assert fed == list(range(4, 14))


def test_only_seed_and_prompt_decide_and_the_global_random_state_stays() -> None:
    model = decoder(dropout=0.5).train()
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = list(generate_tokens(model, [1, 2], SAMPLED))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert list(generate_tokens(model, [1, 2], SAMPLED)) == first
    assert list(generate_tokens(model.eval(), [1, 2], SAMPLED)) == first
    assert list(generate_tokens(model, [1, 3], SAMPLED)) != first
    other = Sampling(max_tokens=30, temperature=0.9, top_p=0.95, repetition_penalty=1.1, seed=4)
    assert list(generate_tokens(model, [1, 2], other)) != first


def test_each_module_is_in_its_mode_again_even_if_the_stream_is_left_early() -> None:
    model = decoder(dropout=0.1).train()
    model.blocks[0].eval()  # such as a frozen part
    modes = [module.training for module in model.modules()]
    tokens = generate_tokens(model, [1, 2], SAMPLED)
    next(tokens)
    assert not model.training
    tokens.close()
    assert [module.training for module in model.modules()] == modes
    generate(model, ByteTokenizer(), "x", Sampling(max_tokens=3))
    assert [module.training for module in model.modules()] == modes


def test_gradients_are_on_between_tokens_and_training_goes_on_after() -> None:
    model = decoder()
    for token in generate_tokens(model, [1, 2], Sampling(max_tokens=3)):
        assert torch.is_grad_enabled()
        model(torch.tensor([[token]])).sum().backward()
    assert all(p.grad is not None for p in model.parameters() if p is not None)


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_blocks_that_recompute_in_training_say_the_same(mode: Any) -> None:
    model = decoder()
    plain = list(generate_tokens(model, [1, 2], SAMPLED))
    checkpointing.apply(units(model), mode)
    assert list(generate_tokens(model, [1, 2], SAMPLED)) == plain


def test_blocks_compiled_for_training_are_not_compiled_for_the_cache() -> None:
    model = decoder()
    plain = list(generate_tokens(model, [1, 2], SAMPLED))
    for block in units(model).values():
        block.compile()
    before = graphs_compiled()
    assert list(generate_tokens(model, [1, 2], SAMPLED)) == plain
    assert graphs_compiled() == before


TEXT = "naïve — 日本語 🎉\u2028end"


def test_a_stream_of_single_bytes_gives_whole_characters() -> None:
    script = [*TEXT.encode(), ByteTokenizer.end]
    pieces = list(stream(Scripted(script), ByteTokenizer(), "x"))
    assert pieces == list(TEXT)


def test_a_stream_of_bpe_tokens_gives_whole_characters() -> None:
    tokenizer = train_bpe([TEXT, "日本語 " * 3], 262)  # merges cut characters in two
    ids = tokenizer.encode(TEXT)
    pieces = list(stream(Scripted([*ids, tokenizer.end], 300), tokenizer, "日"))
    assert "".join(pieces) == TEXT
    assert len(pieces) > 5


def test_a_character_that_is_never_finished_is_shown_as_such() -> None:
    script = [*b"ab", 0xE6, 0x97, ByteTokenizer.end]
    assert generate(Scripted(script), ByteTokenizer(), "x") == "ab\ufffd"


def test_a_stop_text_ends_the_stream_and_no_part_of_it_is_given_out() -> None:
    model = Scripted(list(b"one two. THE END and more"))
    sampling = Sampling(stop=("Never", "THE END", "\n"))
    pieces = list(stream(model, ByteTokenizer(), "x", sampling))
    assert "".join(pieces) == "one two. "
    # 'T' was held back until the stop text was complete, and nothing was computed after it.
    assert pieces == list("one two. ")
    assert bytes(model.script) == b" and more"


def test_the_prompt_is_no_part_of_what_a_stop_text_is_looked_for_in() -> None:
    model = Scripted([*b"ND. x", ByteTokenizer.end])
    assert generate(model, ByteTokenizer(), "THE E", Sampling(stop=("END",))) == "ND. x"


def test_text_that_only_began_like_a_stop_is_given_out_at_the_end() -> None:
    model = Scripted([*b"a EN", ByteTokenizer.end])
    assert generate(model, ByteTokenizer(), "x", Sampling(stop=("END",))) == "a EN"


def test_it_ends_at_max_tokens() -> None:
    model = Scripted(list(b"abcdef"))
    assert generate(model, ByteTokenizer(), "x", Sampling(max_tokens=4)) == "abcd"
    assert len(model.fed) == 4


def test_the_prompt_is_read_whole_and_an_empty_one_is_the_end_of_a_document() -> None:
    model = Scripted([*b"ab", ByteTokenizer.end] * 2)
    generate(model, ByteTokenizer(), "né")
    assert model.fed == [list("né".encode()), [ord("a")], [ord("b")]]
    model.fed.clear()
    generate(model, ByteTokenizer(), "")
    assert model.fed[0] == [ByteTokenizer.end]


def test_ids_that_the_tokenizer_does_not_know_are_never_drawn() -> None:
    model = decoder(vocab=300)  # 43 more than the tokenizer's, as where a size is rounded up
    assert max(generate_tokens(model, [1], Sampling(max_tokens=200))) > 256
    limited = generate_tokens(model, [1], Sampling(max_tokens=200), vocab=257)
    assert max(limited) <= 256


def test_the_verb_is_the_function() -> None:
    import megalith

    model, few = decoder(), Sampling(max_tokens=8)
    assert megalith.generate(model, ByteTokenizer(), "a", few) == generate(
        model, ByteTokenizer(), "a", few
    )


@pytest.mark.parametrize(
    ("tokens", "words"), [([], "no token"), ([1, 257], "token 257 is outside"), ([-1], "token -1")]
)
def test_tokens_that_cannot_be_continued_are_refused_at_once(tokens: Any, words: str) -> None:
    with pytest.raises(MegalithError, match=words):
        generate_tokens(decoder(), tokens)


def test_a_prompt_that_is_no_text_is_refused_at_once() -> None:
    with pytest.raises(MegalithError, match="prompt: not valid text"):
        stream(decoder(), ByteTokenizer(), "a\udc80")
