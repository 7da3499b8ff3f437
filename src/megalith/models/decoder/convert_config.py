"""``config.json`` in Hugging Face's layout, to a :class:`DecoderConfig` and back."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megalith.core.errors import RecipeError, nearest
from megalith.recipe.families import DecoderConfig, RopeScaling

ARCHITECTURES = {
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
_ACTIVATIONS = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu": "gelu",
    "relu": "relu",
}
_KV_HEADS = {"mistral": 8, "mixtral": 8, "qwen3_moe": 4}
# What does not change the function that the weights compute stays the user's to choose.
_FREE = {"family", "preset", "path", "attention", "dropout", "init_std"} | {
    *("balance", "balance_by", "bias_rate", "capacity"),
}


def read_json(folder: Path) -> dict[str, Any]:
    """The folder's ``config.json``.

    Raises:
        RecipeError: it is missing, unreadable, or of a model that the decoder does not cover.
    """
    file = folder / "config.json"
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise RecipeError(f"model.path: cannot read {file} ({error.strerror})") from error
    except ValueError as error:
        raise RecipeError(f"model.path: {file} is not JSON: {error}") from error
    kind = raw.get("model_type") if isinstance(raw, dict) else None
    if kind not in ARCHITECTURES:
        raise RecipeError(
            f"model.path: {file} has model_type '{kind}', which is not one of "
            f"{', '.join(ARCHITECTURES)}{nearest(str(kind), ARCHITECTURES)}"
        )
    return raw


def read_config(config: DecoderConfig) -> DecoderConfig:
    """``config`` with every field that ``config.path`` decides.

    Raises:
        RecipeError: ``path`` holds no model of this family, or a field given beside it
            contradicts it.
    """
    assert config.path is not None
    file = Path(config.path) / "config.json"
    found = from_json(read_json(file.parent), str(file))
    given = {name: getattr(config, name) for name in config.model_fields_set}
    for name, value in given.items():
        if name not in _FREE and value is not None and value != getattr(found, name):
            raise RecipeError(
                f"model.{name}: {value} contradicts {getattr(found, name)} in {file}; leave it out"
            )
    free = {k: v for k, v in given.items() if k in _FREE}
    return found.model_copy(update={**free, "balance": config.balance})  # follows balance_by


def from_json(raw: Mapping[str, Any], source: str = "config.json") -> DecoderConfig:
    """The config that ``config.json``'s content describes.

    Args:
        source: named in errors.

    Raises:
        RecipeError: it asks for something that the decoder does not do, which is named.
    """
    try:
        values = _gpt2(raw) if raw["model_type"] == "gpt2" else _llama_like(raw)
        return DecoderConfig.model_validate(values)
    except KeyError as error:
        raise RecipeError(f"model.path: {source} has no {error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise RecipeError(f"model.path: {source}: {where} {first['msg']}") from error
    except _Unsupported as error:
        raise RecipeError(f"model.path: {source}: {error}") from error


def to_json(config: DecoderConfig) -> dict[str, Any]:
    """The content of ``config.json`` that makes ``transformers`` compute what the decoder does.

    Raises:
        RecipeError: no model of ``transformers`` has this combination of settings.
    """
    kind = _kind(config)
    common: dict[str, Any] = {
        "architectures": [ARCHITECTURES[kind]],
        "model_type": kind,
        "vocab_size": config.vocab,
        "initializer_range": config.init_std,
        "tie_word_embeddings": config.tied,
        # Left out, transformers would assume the original models' special tokens.
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if kind == "gpt2":
        names = {"gelu_tanh": "gelu_new", "gelu": "gelu", "relu": "relu"}
        return common | {
            "n_positions": config.context,
            "n_embd": config.width,
            "n_layer": config.layers,
            "n_head": config.heads,
            "n_inner": config.hidden,
            "activation_function": names[config.activation],
            "layer_norm_epsilon": config.norm_eps,
            "resid_pdrop": config.dropout,
            "embd_pdrop": config.dropout,
            "attn_pdrop": config.dropout,
        }
    common |= {
        "max_position_embeddings": config.context,
        "hidden_size": config.width,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.hidden,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "attention_dropout": config.dropout,
        "rope_theta": config.rope_theta,
        "rope_scaling": _scaling_to_json(config.rope_scaling),
    }
    if kind in ("mistral", "mixtral"):
        common |= {"sliding_window": config.window}
    if kind == "mixtral":
        common |= {
            "intermediate_size": config.expert_hidden,
            "num_local_experts": config.experts,
            "num_experts_per_tok": config.experts_per_token,
        }
    if kind == "qwen3_moe":
        common |= {
            "use_sliding_window": config.window is not None,
            "sliding_window": config.window,
            "num_experts": config.experts,
            "num_experts_per_tok": config.experts_per_token,
            "moe_intermediate_size": config.expert_hidden,
            "norm_topk_prob": config.router_normalise,
            "decoder_sparse_step": 1,
            "mlp_only_layers": list(range(config.dense_layers)),
        }
    if kind in ("qwen2", "qwen3"):
        common |= {
            "use_sliding_window": config.window is not None,
            "sliding_window": config.window,
            "max_window_layers": config.window_from if config.window else config.layers,
        }
    if kind in ("llama", "qwen3", "qwen3_moe"):
        common["attention_bias"] = config.qkv_bias
    if kind == "llama":
        common["mlp_bias"] = config.mlp_bias
    return common


class _Unsupported(Exception):
    """The model does something that the decoder does not."""


def _gpt2(raw: Mapping[str, Any]) -> dict[str, Any]:
    _only(raw, "scale_attn_weights", True)
    _only(raw, "scale_attn_by_inverse_layer_idx", False)
    _only(raw, "add_cross_attention", False)
    activation = raw.get("activation_function", "gelu_new")
    if activation not in _ACTIVATIONS:
        raise _Unsupported(f"activation_function '{activation}' is not supported")
    return {
        "vocab": raw["vocab_size"],
        "context": raw["n_positions"],
        "layers": raw["n_layer"],
        "width": raw["n_embd"],
        "heads": raw["n_head"],
        "hidden": raw.get("n_inner") or 4 * raw["n_embd"],
        "activation": _ACTIVATIONS[activation],
        "norm": "layernorm",
        "norm_eps": raw.get("layer_norm_epsilon", 1e-5),
        "positions": "learned",
        "qkv_bias": True,
        "output_bias": True,
        "mlp_bias": True,
        "tied": raw.get("tie_word_embeddings", True),
        "init_std": raw.get("initializer_range", 0.02),
    }


def _llama_like(raw: Mapping[str, Any]) -> dict[str, Any]:
    kind = raw["model_type"]
    if raw.get("hidden_act", "silu") not in ("silu", "swish"):
        raise _Unsupported(f"hidden_act '{raw['hidden_act']}' is not supported")
    _only(raw, "partial_rotary_factor", 1.0)
    heads = raw["num_attention_heads"]
    kv_heads = raw.get("num_key_value_heads", _KV_HEADS.get(kind, heads))
    fallback = 128 if kind == "qwen3" else None
    biased = kind not in ("mistral", "mixtral") and raw.get("attention_bias", False)
    bias = kind == "qwen2" or bool(biased)
    context = raw["max_position_embeddings"]
    window, window_from = _window(raw)
    return {
        "vocab": raw["vocab_size"],
        "context": context,
        "layers": raw["num_hidden_layers"],
        "width": raw["hidden_size"],
        "heads": heads,
        "kv_heads": kv_heads or heads,
        "head_dim": raw.get("head_dim", fallback) or raw["hidden_size"] // heads,
        "hidden": raw["intermediate_size"],
        "activation": "swiglu",
        "norm": "rmsnorm",
        "norm_eps": raw.get("rms_norm_eps", 1e-6),
        "positions": "rope",
        "qk_norm": kind in ("qwen3", "qwen3_moe"),
        "qkv_bias": bias,
        "output_bias": bias and kind != "qwen2",
        "mlp_bias": kind == "llama" and bool(raw.get("mlp_bias", False)),
        "tied": raw.get("tie_word_embeddings", False),
        "window": window,
        "window_from": window_from,
        "init_std": raw.get("initializer_range", 0.02),
        **_experts(raw),
        **_rope(raw, context),
    }


def _experts(raw: Mapping[str, Any]) -> dict[str, Any]:
    kind = raw["model_type"]
    if kind == "mixtral":
        _only(raw, "router_jitter_noise", 0.0)
        return {
            "experts": raw.get("num_local_experts", 8),
            "experts_per_token": raw.get("num_experts_per_tok", 2),
            "expert_hidden": raw["intermediate_size"],
            "router_normalise": True,
        }
    if kind != "qwen3_moe":
        return {}
    _only(raw, "decoder_sparse_step", 1)
    dense = raw.get("mlp_only_layers") or []
    if sorted(dense) != list(range(len(dense))):
        raise _Unsupported("mlp_only_layers must be the first layers")
    # transformers 5 calls the number of experts what Mixtral calls it, whatever the model.
    experts = raw.get("num_experts", raw.get("num_local_experts", 128))
    return {
        "experts": experts,
        "experts_per_token": raw.get("num_experts_per_tok", 8),
        "expert_hidden": raw.get("moe_intermediate_size", 768),
        "router_normalise": raw.get("norm_topk_prob", False),
        "dense_layers": len(dense),
    }


def _window(raw: Mapping[str, Any]) -> tuple[int | None, int]:
    """The window and the first layer that has it."""
    kind, layers = raw["model_type"], raw["num_hidden_layers"]
    if kind == "mistral":
        return raw.get("sliding_window", 4096), 0
    if kind == "mixtral":
        return raw.get("sliding_window"), 0
    if kind == "qwen3_moe":  # every layer, or none
        return (raw.get("sliding_window", 4096) if raw.get("use_sliding_window") else None), 0
    if kind == "llama" or not raw.get("use_sliding_window", False):
        return None, 0
    first = raw.get("max_window_layers", 28)
    types = raw.get("layer_types")
    if types is not None:
        first = types.count("full_attention")
        expected = ["full_attention"] * first + ["sliding_attention"] * (layers - first)
        if types != expected:
            raise _Unsupported("layer_types must be full_attention first, then sliding_attention")
    return (raw.get("sliding_window", 4096), first) if first < layers else (None, 0)


def _rope(raw: Mapping[str, Any], context: int) -> dict[str, Any]:
    # transformers 5 writes rope_parameters; older files have rope_theta and rope_scaling.
    rope = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    theta = rope.get("rope_theta", raw.get("rope_theta")) or 10_000.0
    _only(rope, "partial_rotary_factor", 1.0)
    if kind == "default":
        return {"rope_theta": theta}
    original = rope.get("original_max_position_embeddings") or context
    scaling: dict[str, Any] = {"kind": kind, "factor": rope.get("factor") or context / original}
    if kind in ("llama3", "yarn"):
        scaling["original_context"] = original
    if kind == "llama3":
        scaling |= {key: rope[key] for key in ("low_freq_factor", "high_freq_factor")}
    elif kind == "yarn":
        scaling |= {
            "beta_fast": rope.get("beta_fast") or 32.0,
            "beta_slow": rope.get("beta_slow") or 1.0,
            "truncate": rope.get("truncate", True),
            "attention_factor": _yarn_attention(rope, scaling["factor"]),
        }
    elif kind not in ("linear", "dynamic"):
        raise _Unsupported(f"rope_type '{kind}' is not one of linear, dynamic, yarn, llama3")
    return {"rope_theta": theta, "rope_scaling": scaling}


def _yarn_attention(rope: Mapping[str, Any], factor: float) -> float | None:
    scale, scale_all = rope.get("mscale"), rope.get("mscale_all_dim")
    if rope.get("attention_factor") is not None or not (scale and scale_all):
        return rope.get("attention_factor")
    growth = 0.1 * math.log(factor) if factor > 1 else 0.0
    return (scale * growth + 1.0) / (scale_all * growth + 1.0)


def _scaling_to_json(scaling: RopeScaling) -> dict[str, Any] | None:
    if scaling.kind == "none":
        return None
    found: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind in ("llama3", "yarn"):
        found["original_max_position_embeddings"] = scaling.original_context
    if scaling.kind == "llama3":
        found["low_freq_factor"] = scaling.low_freq_factor
        found["high_freq_factor"] = scaling.high_freq_factor
    if scaling.kind == "yarn":
        found |= {"beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow}
        if scaling.attention_factor is not None:
            found["attention_factor"] = scaling.attention_factor
        if not scaling.truncate:
            found["truncate"] = False
    return found


def _kind(config: DecoderConfig) -> str:
    """The model of ``transformers`` that has this combination of settings."""
    biases = (config.qkv_bias, config.output_bias, config.mlp_bias)
    whole = config.head_dim * config.heads == config.width
    if config.experts:
        return _kind_with_experts(config)
    if config.positions == "learned" and config.norm == "layernorm":
        plain = whole and config.kv_heads == config.heads and all(biases) and not config.qk_norm
        if plain and config.window is None and config.activation != "swiglu":
            return "gpt2"
    elif config.norm == "rmsnorm" and config.activation == "swiglu":
        if config.qk_norm:
            if config.qkv_bias == config.output_bias and not config.mlp_bias:
                return "qwen3"
        elif biases == (True, False, False) and whole:
            return "qwen2"
        # Llama insists on heads that make up the width, Mistral does not.
        elif not any(biases) and config.window_from == 0 and (config.window or not whole):
            return "mistral"
        elif config.window is None and whole and config.qkv_bias == config.output_bias:
            return "llama"
    names = ("positions", "norm", "activation", "qk_norm", "qkv_bias", "output_bias", "mlp_bias")
    settings = ", ".join(f"{name}={getattr(config, name)}" for name in (*names, "window"))
    raise RecipeError(
        f"model: no model of Hugging Face's has {settings}, {config.heads} heads "
        f"({config.kv_heads} for keys) of {config.head_dim} in a width of {config.width}"
    )


def _kind_with_experts(config: DecoderConfig) -> str:
    llama_like = config.norm == "rmsnorm" and config.activation == "swiglu"
    if (
        llama_like
        and config.positions == "rope"
        and not (config.shared_hidden or config.window_from)
    ):
        if config.qk_norm and config.qkv_bias == config.output_bias:
            return "qwen3_moe"
        biases = config.qkv_bias or config.output_bias
        plain = not (config.qk_norm or config.dense_layers or biases)
        if plain and config.router_normalise:
            return "mixtral"
    names = ("positions", "norm", "activation", "qk_norm", "qkv_bias", "output_bias")
    names += ("shared_hidden", "dense_layers", "router_normalise", "window_from")
    settings = ", ".join(f"{name}={getattr(config, name)}" for name in names)
    raise RecipeError(f"model: no model of Hugging Face's has {config.experts} experts, {settings}")


def _only(raw: Mapping[str, Any], key: str, value: Any) -> None:
    if (found := raw.get(key)) is not None and found != value:
        raise _Unsupported(f"{key} {found} is not supported")
