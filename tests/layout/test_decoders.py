"""Every kind of decoder under tensor, context and pipeline: what one process computes.

Loss, counts, every gradient, the norm before clipping, weights, AdamW's state and evaluation are
compared in float64, after two clipped updates of ragged micro-batches.
"""

from __future__ import annotations

from typing import Any

import pytest

from trials import differences, small

QWEN = {
    "heads": 8,
    "kv_heads": 4,
    "positions": "rope",
    "norm": "rmsnorm",
    "activation": "swiglu",
    "qk_norm": True,
    "qkv_bias": False,
    "output_bias": False,
    "mlp_bias": False,
    "tied": False,
}
MISTRAL = {**QWEN, "qk_norm": False, "kv_heads": 2, "window": 20, "window_from": 1, "tied": True}
GPT2 = {"positions": "learned", "tied": True}
GPT2_UNTIED = {"positions": "learned", "tied": False, "kv_heads": 4}
STANDING_ALONE = {"source": "stdlib", "sequence": 48, "cross_document_attention": False}

KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "grouped heads, rope, query and key norms, untied": (QWEN, {}),
    "sliding window from the second layer, two key heads, tied": (MISTRAL, {}),
    "learned positions, tied": (GPT2, {}),
    "learned positions, untied": (GPT2_UNTIED, {}),
    "documents, rope": (QWEN, STANDING_ALONE),
    "documents, learned positions, window": ({**GPT2, "window": 7}, STANDING_ALONE),
}
LAYOUTS: list[dict[str, Any]] = [
    {"tensor": 2},
    {"tensor": 2, "sequence_parallel": False},
    {"context": 2},
    {"context": 2, "exchange": "all-to-all"},
    {"pipeline": 2},
]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_decoder_under_every_axis_that_divides_it(kind: str) -> None:
    model, data = KINDS[kind]
    given = small(change=model, **({"data": data} if data else {}))
    assert differences(given, LAYOUTS) == {}


@pytest.mark.parametrize("tied", [True, False])
def test_a_vocabulary_that_divides_over_nothing(tied: bool) -> None:
    """97 tokens over 3 and 4 ranks: the last one has fewer rows."""
    three = {"heads": 6, "kv_heads": 3, "head_dim": 8, "hidden": 96, "tied": tied}
    assert differences(small(change=three), [{"tensor": 3}]) == {}
    four = {"heads": 8, "kv_heads": 4, "tied": tied}
    layouts = [{"tensor": 4}, {"tensor": 2, "context": 2}, {"tensor": 2, "pipeline": 2}]
    assert differences(small(change=four), layouts) == {}


@pytest.mark.parametrize("tied", [True, False])
def test_pipelines_of_four_stages_cut_by_cost_and_by_hand(tied: bool) -> None:
    given = small(change={"tied": tied, "layers": 5})
    by_hand: list[dict[str, Any]] = [
        {"pipeline": 2, "cuts": ["blocks.0"]},
        {"pipeline": 2, "cuts": ["blocks.4"]},
        {"pipeline": 2, "schedule": "interleaved", "stages": 2},
        {
            "pipeline": 2,
            "schedule": "interleaved",
            "stages": 2,
            "cuts": ["blocks.1", "blocks.2", "blocks.4"],
        },
    ]
    assert differences(given, by_hand) == {}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_decoder_on_four_ranks(kind: str) -> None:
    model, data = KINDS[kind]
    given = small(change={"layers": 4, **model}, **({"data": data} if data else {}))
    layouts: list[dict[str, Any]] = [
        {"context": 4},
        {"tensor": 2, "context": 2},
        {"tensor": 2, "pipeline": 2},
        {"pipeline": 2, "context": 2},
        {"pipeline": 4},
        {"tensor": 2, "shard": 2},
    ]
    assert differences(given, layouts) == {}
