"""Contract 3: initial weights are a function of (seed, parameter name, full shape)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megalith import models
from megalith.core import seeds
from megalith.recipe.families import DecoderConfig

LLAMA: dict[str, Any] = {
    "positions": "rope",
    "norm": "rmsnorm",
    "activation": "swiglu",
    "kv_heads": 2,
    "qk_norm": True,
    "tied": False,
}


def weights(seed: int = 0, **changes: Any) -> dict[str, torch.Tensor]:
    values = {"vocab": 60, "layers": 2, "width": 32, "heads": 4, "context": 16, **changes}
    return dict(models.build(DecoderConfig(**values), seed).named_parameters())


def draw(seed: int, name: str, shape: torch.Size, std: float) -> torch.Tensor:
    source = seeds.generator(seed, "init", name)
    return torch.empty(shape).normal_(0.0, std, generator=source)


@pytest.mark.parametrize("changes", [{}, LLAMA], ids=["gpt2", "llama"])
def test_every_weight_is_the_draw_of_its_own_name(changes: dict[str, Any]) -> None:
    for name, weight in weights(7, init_std=0.03, **changes).items():
        if name.endswith("bias"):
            expected = torch.zeros(weight.shape)
        elif "norm" in name:
            expected = torch.ones(weight.shape)
        else:
            residual = name.endswith(("attention.output.weight", "mlp.down.weight"))
            expected = draw(7, name, weight.shape, 0.03 / 2 if residual else 0.03)
        assert torch.equal(weight, expected), name


def test_neither_other_parameters_nor_the_order_of_drawing_matter() -> None:
    """A model with more layers, an untied head and another random state around it."""
    small = weights()
    torch.manual_seed(123)
    torch.rand(5)
    large = weights(layers=5, tied=False, kv_heads=2, dropout=0.1)
    residual = ("attention.output.weight", "mlp.down.weight")
    kv = ("key.weight", "value.weight", "key.bias", "value.bias")
    for name, weight in small.items():
        if not name.endswith(residual + kv):
            assert torch.equal(weight, large[name]), name
    assert "head.weight" in large


def test_another_seed_or_name_gives_other_weights() -> None:
    one, two = weights(0), weights(1)
    query = "blocks.0.attention.query.weight"
    assert not torch.equal(one[query], two[query])
    assert not torch.equal(one[query], one["blocks.1.attention.query.weight"])
    assert not torch.equal(one[query], one["blocks.0.attention.key.weight"])


def test_building_leaves_torchs_own_generator_alone_in_effect() -> None:
    """Weights do not come from the global generator, whatever its state."""
    torch.manual_seed(1)
    one = weights()
    torch.manual_seed(2)
    two = weights()
    assert all(torch.equal(one[name], two[name]) for name in one)
