"""Mixtures of experts under layouts: gradients, balance loss and loads of one process."""

from __future__ import annotations

from typing import Any

import pytest

from trials import differences, small

MIXTRAL = {
    "experts": 4,
    "experts_per_token": 2,
    "expert_hidden": 24,
    "activation": "swiglu",
    "mlp_bias": False,
    "balance": 0.3,
    "heads": 8,
    "kv_heads": 4,
}
TOP_1 = {"experts_per_token": 1, "router_normalise": False}
SHARED = {**MIXTRAL, **TOP_1, "shared_hidden": 16, "dense_layers": 1}
BIASED = {**MIXTRAL, "balance_by": "bias", "balance": 0.0, "bias_rate": 0.01}
CAPPED = {**MIXTRAL, "capacity": 0.8}

DATA: list[dict[str, Any]] = [
    {"replicate": 2},
    {"shard": 2},
    {"shard": 2, "zero": 1},
    {"expert": 2},
]
CONTEXT: list[dict[str, Any]] = [{"context": 2}, {"context": 2, "exchange": "all-to-all"}]
TOGETHER: list[dict[str, Any]] = [
    {"expert": 2, "shard": 2},
    {"expert": 2, "replicate": 2},
    {"expert": 2, "context": 2},
    {"expert": 4},
]


@pytest.mark.parametrize(
    ("kind", "layouts"),
    [
        (MIXTRAL, [*DATA, *CONTEXT]),
        (SHARED, [*DATA, *CONTEXT]),
        (BIASED, [*DATA, *CONTEXT]),
        (CAPPED, DATA),
    ],
    ids=["mixtral", "shared expert", "bias", "capacity"],
)
def test_every_kind_of_mixture_on_two_ranks(
    kind: dict[str, Any], layouts: list[dict[str, Any]]
) -> None:
    """The balance loss is one of the task's sums, and compared with the rest."""
    assert differences(small(change=kind), layouts) == {}


@pytest.mark.parametrize("kind", [MIXTRAL, BIASED], ids=["mixtral", "bias"])
def test_axes_together(kind: dict[str, Any]) -> None:
    assert differences(small(change=kind), TOGETHER) == {}


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_recomputed_and_averaged(mode: str) -> None:
    given = small(change=MIXTRAL, train={"checkpointing": mode, "ema": 0.9, "clip": 0.05})
    assert differences(given, [{"shard": 2}, {"expert": 2}, {"context": 2}]) == {}
