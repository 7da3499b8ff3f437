"""Presets have the sizes that were published, counted on the meta device."""

from __future__ import annotations

import pytest
from torch import nn

from megalith import models
from megalith.models.decoder.convert_config import from_json, to_json
from megalith.recipe.families import DecoderConfig
from megalith.recipe.presets import presets

# Parameters as counted in the released checkpoints, a tied head once.
RELEASED = {
    "gpt2-small": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3.1-8b": 8_030_261_248,
    "llama3.1-70b": 70_553_706_496,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "mistral-7b": 7_241_732_096,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "mixtral-8x7b": 46_702_792_704,
    "qwen3-30b-a3b": 30_532_122_624,
}
# Brown et al. 2020, table 2.1: rounded, and never released.
ROUNDED = {
    "gpt3-125m": 125e6,
    "gpt3-350m": 350e6,
    "gpt3-760m": 760e6,
    "gpt3-1.3b": 1.3e9,
    "gpt3-2.7b": 2.7e9,
    "gpt3-6.7b": 6.7e9,
    "gpt3-13b": 13e9,
    "gpt3-175b": 175e9,
}
# Ours: blocks alone, as the vocabulary is the tokenizer's.
BLOCKS = {
    "tiny-1m": 0.8e6,
    "small-10m": 10.6e6,
    "small-30m": 28.4e6,
    "tiny-llama-1m": 0.8e6,
    "small-llama-10m": 9.9e6,
    "small-llama-30m": 29.5e6,
}


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def test_every_preset_is_counted_here() -> None:
    assert set(presets("decoder")) == set(RELEASED) | set(ROUNDED) | set(BLOCKS)


@pytest.mark.parametrize("name", RELEASED)
def test_released_models_have_their_exact_size(name: str) -> None:
    assert count(models.build(DecoderConfig(preset=name), 0, "meta")) == RELEASED[name]


@pytest.mark.parametrize("name", ROUNDED)
def test_gpt3_has_the_sizes_of_its_table(name: str) -> None:
    config = DecoderConfig(preset=name)
    assert count(models.build(config, 0, "meta")) == pytest.approx(ROUNDED[name], rel=0.02)
    assert (config.context, config.vocab, config.hidden) == (2048, 50257, 4 * config.width)


@pytest.mark.parametrize("name", BLOCKS)
def test_small_ones_have_the_size_of_their_name(name: str) -> None:
    module = models.build(DecoderConfig(preset=name, vocab=256), 0, "meta")
    assert count(module.get_submodule("blocks")) == pytest.approx(BLOCKS[name], rel=0.02)


@pytest.mark.parametrize("name", [n for n in [*RELEASED, *ROUNDED] if n != "gpt3-13b"])
def test_presets_survive_the_way_through_config_json(name: str) -> None:
    config = DecoderConfig(preset=name)
    again = from_json(to_json(config))
    assert again.model_dump(exclude={"preset"}) == config.model_dump(exclude={"preset"})
