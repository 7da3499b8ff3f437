"""Filters equal those of transformers in value and order; draws follow the probabilities."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, GPT2Config
from transformers.generation import logits_process as theirs

import helpers_torchvision
from megalith.core.errors import MegalithError
from megalith.generate import Sampling, next_token
from megalith.generate.sampling import (
    filtered,
    heat,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    penalize_repetition,
)

VOCAB = 101


def some_logits(rows: int = 64) -> torch.Tensor:
    """From nearly flat to nearly one-hot rows, positive and negative values."""
    generator = torch.Generator().manual_seed(0)
    scale = torch.logspace(-2, 1.5, rows)[:, None]
    return torch.randn(rows, VOCAB, generator=generator) * scale


def same(ours: torch.Tensor, other: torch.Tensor) -> None:
    assert torch.equal(ours.isinf(), other.isinf())
    torch.testing.assert_close(ours, other, rtol=1e-6, atol=0)


NO_IDS = torch.zeros(64, 0, dtype=torch.int64)


@pytest.mark.parametrize("temperature", [0.001, 0.3, 1.7, 30.0])
def test_temperature_is_that_of_transformers(temperature: float) -> None:
    other = theirs.TemperatureLogitsWarper(temperature)
    same(heat(some_logits(), temperature), other(NO_IDS, some_logits()))  # type: ignore[arg-type]


@pytest.mark.parametrize("count", [1, 2, 7, VOCAB, 10 * VOCAB])
def test_top_k_is_that_of_transformers(count: int) -> None:
    other = theirs.TopKLogitsWarper(count)
    same(keep_top_k(some_logits(), count), other(NO_IDS, some_logits()))  # type: ignore[arg-type]


def test_top_k_keeps_ties_with_the_last() -> None:
    kept = keep_top_k(torch.tensor([1.0, 3.0, 2.0, 2.0]), 2)
    assert kept.tolist() == [-math.inf, 3.0, 2.0, 2.0]


@pytest.mark.parametrize("share", [0.001, 0.2, 0.5, 0.9, 0.99])
def test_top_p_is_that_of_transformers(share: float) -> None:
    other = theirs.TopPLogitsWarper(share)
    same(keep_top_p(some_logits(), share), other(NO_IDS, some_logits()))  # type: ignore[arg-type]


def test_top_p_keeps_the_token_that_reaches_the_share() -> None:
    logits = torch.tensor([0.5, 0.3, 0.2]).log()
    assert keep_top_p(logits, 0.45).isfinite().tolist() == [True, False, False]
    assert keep_top_p(logits, 0.55).isfinite().tolist() == [True, True, False]


@pytest.mark.parametrize("share", [0.001, 0.1, 0.7, 1.0])
def test_min_p_is_that_of_transformers(share: float) -> None:
    other = theirs.MinPLogitsWarper(share)
    same(keep_min_p(some_logits(), share), other(NO_IDS, some_logits()))  # type: ignore[arg-type]


@pytest.mark.parametrize("penalty", [0.5, 1.3, 5.0])
def test_repetition_penalty_is_that_of_transformers(penalty: float) -> None:
    seen = torch.tensor([3, 5, 3, 100, 0, 5])  # how often a token occurs must not matter
    other = theirs.RepetitionPenaltyLogitsProcessor(penalty)
    ids: Any = seen.expand(64, -1)
    logits: Any = some_logits()
    same(penalize_repetition(some_logits(), seen, penalty), other(ids, logits))
    assert torch.equal(logits, some_logits())  # ours changes nothing in place


def test_all_filters_together_work_in_the_order_of_transformers() -> None:
    helpers_torchvision.models()  # which transformers imports, where it is installed
    from transformers import GPT2LMHeadModel

    seen = [3, 5, 3, 100, 0, 5]
    settings: dict[str, Any] = {
        "temperature": 0.6,
        "top_k": 30,
        "top_p": 0.9,
        "min_p": 0.05,
        "repetition_penalty": 1.4,
    }
    config = GPT2Config(vocab_size=VOCAB, n_embd=4, n_layer=1, n_head=1, n_positions=8)
    ids: Any = torch.tensor(seen).expand(64, -1)
    logits: Any = some_logits()
    model: Any = GPT2LMHeadModel(config)
    expected = model._get_logits_processor(
        GenerationConfig(do_sample=True, **settings), input_ids_seq_length=len(seen), device="cpu"
    )(ids, logits)
    ours = filtered(some_logits(), seen, Sampling(**settings))
    same(ours, expected)
    # The order is what is tested: another one must give another result here.
    other = keep_top_p(heat(some_logits(), 1.0), 0.9)
    assert not torch.equal(ours.isinf(), other.isinf())


def test_draws_follow_the_probabilities_that_the_filters_leave() -> None:
    probability = torch.tensor([0.4, 0.25, 0.15, 0.1, 0.06, 0.04])
    sampling = Sampling(top_p=0.85)  # leaves the first four
    generator, draws = torch.Generator().manual_seed(1), 4000
    counts = torch.zeros(6)
    for _ in range(draws):
        counts[next_token(probability.log(), [], sampling, generator)] += 1
    expected = torch.where(torch.arange(6) < 4, probability, 0) / 0.9
    deviation = (expected * (1 - expected) / draws).sqrt()
    assert counts[4:].sum() == 0
    assert ((counts / draws - expected).abs()[:4] < 4 * deviation[:4]).all()


def test_greedy_takes_the_likeliest_after_the_penalty_and_draws_nothing() -> None:
    generator = torch.Generator().manual_seed(0)
    before = generator.get_state()
    logits = torch.tensor([1.0, 2.0, 1.9, -1.0])
    assert next_token(logits, [], Sampling(temperature=0), generator) == 1
    # Filters below temperature play no part: top_k = 1 of the penalised logits is token 2.
    sampling = Sampling(temperature=0, repetition_penalty=1.5, top_k=1)
    assert next_token(logits, [1], sampling, generator) == 2
    assert torch.equal(generator.get_state(), before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_logits_of_any_dtype(dtype: torch.dtype) -> None:
    logits = some_logits(1)[0].to(dtype)
    generator = torch.Generator().manual_seed(0)
    assert 0 <= next_token(logits, [], Sampling(top_p=0.9), generator) < VOCAB


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_no_numbers_are_refused(bad: float) -> None:
    logits = torch.zeros(4)
    logits[2] = bad
    for temperature in (0.0, 1.0):
        with pytest.raises(MegalithError, match="not finite"):
            next_token(logits, [], Sampling(temperature=temperature), torch.Generator())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", 1.5),
        ("temperature", -1.0),
        ("temperature", 1e-9),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "0.8"),
        ("top_k", 0),
        ("top_k", 2.5),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", math.nan),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", math.inf),
        ("stop", "text"),
        ("stop", ("",)),
        ("stop", (3,)),
        ("seed", -1),
        ("seed", True),
    ],
)
def test_a_value_out_of_range_is_refused_in_one_line(field: str, value: Any) -> None:
    with pytest.raises(MegalithError) as caught:
        Sampling(**{field: value})
    assert str(caught.value).startswith(f"{field}: must be ")
    assert "\n" not in str(caught.value)


def test_a_list_of_stops_is_taken() -> None:
    assert Sampling(stop=["a", "b"]).stop == ("a", "b")  # type: ignore[arg-type]
