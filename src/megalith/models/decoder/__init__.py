"""The causal decoder family: GPT-2/3, Llama 2/3, Mistral, Mixtral, Qwen2/2.5/3, Qwen3-MoE."""

from __future__ import annotations

from megalith.models.decoder.cache import KeyValueCache
from megalith.models.decoder.convert import load_weights, save_pretrained
from megalith.models.decoder.convert_config import read_config
from megalith.models.decoder.model import Decoder
from megalith.recipe.families import DecoderConfig

__all__ = ["Decoder", "KeyValueCache", "build", "load_weights", "read_config", "save_pretrained"]


def build(config: DecoderConfig) -> Decoder:
    """The module with its shapes; its weights are torch's default until filled."""
    return Decoder(config)
