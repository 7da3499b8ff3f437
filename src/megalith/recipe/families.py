"""What each model family can be told: one typed section per family.

A section is also the family's config: ``Decoder(DecoderConfig(...))`` needs no recipe. Fields left
out take the preset's value, then the default here. A field that is ``None`` is filled from the data
(the tokenizer's vocabulary, the number of classes) when the model is built.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import model_validator

from megalith.recipe.base import Arguments, Reference, Section, derived, option
from megalith.recipe.presets import with_preset

Ropes = Literal["none", "linear", "dynamic", "yarn", "llama3"]


class RopeScaling(Section):
    """How rotary positions are stretched beyond the length a model was first trained on."""

    kind: Ropes = option("none", "the rule; 'none' leaves the angles as they are")
    factor: float = option(1.0, "how many times longer the context becomes", gt=0)
    original_context: int = option(8192, "context of the first training", unit="tokens", gt=0)
    low_freq_factor: float = option(1.0, "llama3: wavelengths above original/this are scaled", gt=0)
    high_freq_factor: float = option(4.0, "llama3: wavelengths below original/this stay", gt=0)
    beta_fast: float = option(32.0, "yarn: rotations above which an angle stays", gt=0)
    beta_slow: float = option(1.0, "yarn: rotations below which an angle is scaled", gt=0)
    truncate: bool = option(True, "yarn: round the two bounds to whole pairs of features")
    attention_factor: float | None = option(
        None, "yarn: factor on cosine and sine; left out: 0.1 ln(factor) + 1"
    )


class DecoderConfig(Section):
    """A causal decoder: GPT-2/3, Llama, Mistral, Mixtral and Qwen are settings of one model."""

    family: Literal["decoder"] = option("decoder", "a causal decoder")
    preset: str | None = option(
        None, "named set of values for the fields below, such as gpt2-small"
    )
    path: str | None = option(
        None, "folder with weights in Hugging Face's layout; its config.json sets the fields below"
    )
    vocab: int | None = option(None, "size of the vocabulary; left out: the tokenizer's", gt=0)
    context: int = option(1024, "longest sequence", unit="tokens", gt=0)
    layers: int = option(6, "number of blocks", gt=0)
    width: int = option(384, "size of the residual stream", unit="features", gt=0)
    heads: int = option(6, "query heads per layer", gt=0)
    kv_heads: int = derived(
        lambda data: data["heads"],
        "heads",
        "key and value heads; fewer than heads is grouped-query",
        gt=0,
    )
    head_dim: int = derived(
        lambda data: data["width"] // data["heads"],
        "width / heads",
        "size of one head",
        unit="features",
        gt=0,
    )
    hidden: int = derived(
        lambda data: 4 * data["width"],
        "4 x width",
        "inner size of the feed-forward part",
        unit="features",
        gt=0,
    )
    activation: Literal["gelu", "gelu_tanh", "relu", "swiglu"] = option(
        "gelu_tanh", "of the feed-forward part; swiglu adds a gate matrix"
    )
    norm: Literal["layernorm", "rmsnorm"] = option("layernorm", "normalisation before each part")
    norm_eps: float = option(1e-5, "added to the variance", gt=0)
    positions: Literal["learned", "rope"] = option("learned", "how positions enter")
    rope_theta: float = option(10_000.0, "base of the rotary wavelengths", gt=0)
    rope_scaling: RopeScaling = option(RopeScaling(), "stretching of rotary positions")
    qk_norm: bool = option(False, "RMSNorm on each head's query and key (Qwen3)")
    qkv_bias: bool = option(True, "bias in the query, key and value projections")
    output_bias: bool = option(True, "bias in the attention's output projection")
    mlp_bias: bool = option(True, "bias in the feed-forward part")
    experts: int = option(
        0, "feed-forward parts per layer of which each token sees a few; 0: one for all", ge=0
    )
    experts_per_token: int = option(2, "experts that each token sees", gt=0)
    expert_hidden: int = derived(
        lambda data: data["hidden"], "hidden", "inner size of one expert", unit="features", gt=0
    )
    shared_hidden: int = option(
        0, "inner size of an expert that every token sees besides; 0: none", unit="features", ge=0
    )
    dense_layers: int = option(0, "layers at the beginning that have no experts", ge=0)
    router_normalise: bool = derived(
        lambda data: data["experts_per_token"] > 1,
        "with more than one expert per token",
        "the weights of a token's experts are scaled to the sum 1",
    )
    balance_by: Literal["loss", "bias"] = option(
        "loss", "what keeps experts equally busy: a loss, or a bias on the router's choice"
    )
    balance: float = derived(
        lambda data: 0.01 if data["balance_by"] == "loss" else 0.0,
        "0.01, and 0 with a bias",
        "factor on the load-balance loss of each token and layer; 0: none",
        ge=0,
    )
    bias_rate: float = option(0.001, "bias: how far it moves in an update", gt=0)
    capacity: float | None = option(
        None,
        "in training an expert takes at most this times its fair share of a sequence's tokens, "
        "the first ones; left out: all",
        gt=0,
    )
    tied: bool = option(True, "the head shares the embedding's weight")
    window: int | None = option(
        None,
        "sliding window: how many tokens back attention sees, itself included",
        unit="tokens",
        gt=0,
    )
    window_from: int = option(0, "first layer (from 0) that uses the window", ge=0)
    dropout: float = option(
        0.0, "probability, on embeddings, attention and residual parts", ge=0, lt=1
    )
    init_std: float = option(0.02, "standard deviation of initial weights", gt=0)
    attention: Literal["sdpa", "reference"] | Reference = option(
        "sdpa", "attention core: sdpa, reference, or a class of yours as 'package.module:Class'"
    )

    @model_validator(mode="before")
    @classmethod
    def _preset(cls, data: Any) -> Any:
        return with_preset("decoder", data)

    @model_validator(mode="after")
    def _shapes_fit(self) -> DecoderConfig:
        # A head size given by hand frees the width (Qwen3, Mistral-Nemo); else heads divide it.
        if "head_dim" not in self.model_fields_set and self.width % self.heads:
            raise ValueError(f"heads|{self.heads} heads do not divide width {self.width}")
        if self.heads % self.kv_heads:
            raise ValueError(
                f"kv_heads|{self.kv_heads} key/value heads do not divide {self.heads} heads"
            )
        if self.positions == "rope" and self.head_dim % 2:
            raise ValueError(
                f"head_dim|rotary positions need an even head_dim, not {self.head_dim}"
            )
        if self.positions == "learned" and self.rope_scaling.kind != "none":
            raise ValueError('rope_scaling|needs positions = "rope"')
        return self

    @model_validator(mode="after")
    def _experts_fit(self) -> DecoderConfig:
        if not self.experts:
            idle = {"shared_hidden": 0, "dense_layers": 0, "balance_by": "loss", "capacity": None}
            for name, default in idle.items():
                if getattr(self, name) != default and self.path is None:
                    raise ValueError(f"{name}|needs experts")
            return self
        if self.experts_per_token > self.experts:
            raise ValueError(
                f"experts_per_token|{self.experts_per_token} are more than the {self.experts} "
                "experts"
            )
        if self.router_normalise and self.experts_per_token == 1:
            raise ValueError(
                "router_normalise|with one expert per token its weight would always be 1, and the "
                "router would not learn; leave it out"
            )
        if self.mlp_bias:
            raise ValueError("mlp_bias|experts have no biases; set it to false")
        if self.dense_layers >= self.layers:
            raise ValueError(
                f"dense_layers|{self.dense_layers} of {self.layers} layers leave none for experts"
            )
        return self


class ResNetConfig(Section):
    """A residual network for images (He et al. 2015), names as in torchvision."""

    family: Literal["resnet"] = option("resnet", "a residual network for images")
    preset: str | None = option(None, "resnet18, 34, 50, 101 or 152; fields below change it")
    path: str | None = option(None, "safetensors file with torchvision's parameter names")
    blocks: list[int] = option([2, 2, 2, 2], "blocks in each of the one to four stages")
    block: Literal["basic", "bottleneck"] = option("basic", "two 3x3, or 1x1-3x3-1x1 convolutions")
    width: int = option(64, "channels of the first stage", unit="channels", gt=0)
    channels: int | None = option(None, "channels of the image; left out: the data's", gt=0)
    classes: int | None = option(None, "number of classes; left out: the data's", gt=0)
    stem: Literal["imagenet", "small"] = option(
        "imagenet", "7x7 stride 2 and pooling, or 3x3 stride 1 for images under about 64 pixels"
    )

    @model_validator(mode="before")
    @classmethod
    def _preset(cls, data: Any) -> Any:
        return with_preset("resnet", data)

    @model_validator(mode="after")
    def _has_stages(self) -> ResNetConfig:
        if not self.blocks or min(self.blocks) < 1:
            raise ValueError(f"blocks|every stage needs at least one block, not {self.blocks}")
        if len(self.blocks) > 4:
            raise ValueError(f"blocks|at most four stages, not {len(self.blocks)}")
        return self


class FactoryModel(Section):
    """Any ``nn.Module`` of the user's own."""

    family: Literal["factory"] = option("factory", "a module of your own; goes with factory")
    factory: Reference = option(..., "function that returns an nn.Module, as 'package.module:name'")
    args: Arguments = option({}, "keyword arguments for the factory")
