"""Hugging Face's layout, both ways: transformers is the judge."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import helpers_torchvision
from megalith import models
from megalith.core.errors import CheckpointError, RecipeError
from megalith.models import decoder
from megalith.models.decoder.convert_config import from_json, to_json
from megalith.recipe.families import DecoderConfig

helpers_torchvision.models()  # transformers' Llama imports torchvision where it finds it
VOCAB = 97
LLAMA: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.3,
    "pad_token_id": None,
}
GPT2: dict[str, Any] = {
    "vocab_size": VOCAB,
    "n_positions": 64,
    "n_embd": 48,
    "n_layer": 3,
    "n_head": 4,
    "initializer_range": 0.3,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 1024,
}
# Heads large enough for pairs on both sides of YaRN's bounds, and between them.
YARN = {**LLAMA, "head_dim": 32, "rope_parameters": YARN_ROPE}


def rope(**kwargs: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 10000.0, **kwargs}}


# A row: name, transformers' config class, its arguments, length of the text.
CASES: list[Any] = [
    pytest.param(transformers.GPT2Config, GPT2, 64, id="gpt2"),
    pytest.param(
        transformers.GPT2Config,
        {**GPT2, "n_inner": 100, "activation_function": "gelu", "tie_word_embeddings": False},
        20,
        id="gpt2-untied",
    ),
    pytest.param(transformers.LlamaConfig, LLAMA, 64, id="llama2"),
    pytest.param(
        transformers.LlamaConfig,
        {**LLAMA, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
        20,
        id="llama-tied-biases",
    ),
    pytest.param(
        transformers.LlamaConfig, {**LLAMA, "rope_parameters": LLAMA3_ROPE}, 64, id="llama3"
    ),
    pytest.param(
        transformers.LlamaConfig,
        {**LLAMA, **rope(rope_type="linear", factor=4.0)},
        64,
        id="llama-linear",
    ),
    pytest.param(
        transformers.LlamaConfig,
        {**LLAMA, **rope(rope_type="dynamic", factor=4.0)},
        64,
        id="llama-dynamic-short",
    ),
    pytest.param(
        transformers.LlamaConfig,
        {**LLAMA, "max_position_embeddings": 24, **rope(rope_type="dynamic", factor=4.0)},
        64,
        id="llama-dynamic-long",
    ),
    pytest.param(transformers.LlamaConfig, YARN, 64, id="llama-yarn"),
    pytest.param(
        transformers.LlamaConfig,
        {
            **YARN,
            "rope_parameters": {
                **YARN_ROPE,
                "beta_fast": 4.0,
                "beta_slow": 2.0,
                "truncate": False,
                "attention_factor": 1.3,
            },
        },
        64,
        id="llama-yarn-settings",
    ),
    pytest.param(
        transformers.LlamaConfig,
        {**YARN, "rope_parameters": {**YARN_ROPE, "mscale": 0.7, "mscale_all_dim": 1.5}},
        64,
        id="llama-yarn-mscale",
    ),
    pytest.param(
        transformers.MistralConfig, {**LLAMA, "sliding_window": 7}, 64, id="mistral-window"
    ),
    pytest.param(
        transformers.MistralConfig,
        {**LLAMA, "sliding_window": None, "head_dim": 16},
        20,
        id="mistral-head-dim",
    ),
    pytest.param(transformers.Qwen2Config, LLAMA, 20, id="qwen2"),
    pytest.param(
        transformers.Qwen2Config,
        {**LLAMA, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
        64,
        id="qwen2-window-layers",
    ),
    pytest.param(
        transformers.Qwen3Config,
        {**LLAMA, "head_dim": 16, "tie_word_embeddings": True},
        20,
        id="qwen3",
    ),
    pytest.param(
        transformers.Qwen3Config,
        {
            **LLAMA,
            "head_dim": 16,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 5,
            "max_window_layers": 2,
        },
        64,
        id="qwen3-window-bias",
    ),
]


def peer(kind: Any, arguments: dict[str, Any]) -> Any:
    """A random model of transformers', with norms and biases that are not ones and zeros."""
    torch.manual_seed(0)
    config = kind(**arguments, attn_implementation="eager")
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            torch.nn.init.normal_(parameter, float("norm" in name or ".ln_" in name), 0.3)
    return model


def tokens(length: int) -> torch.Tensor:
    return torch.randint(0, VOCAB, (2, length), generator=torch.Generator().manual_seed(1))


def imported(folder: Path) -> tuple[decoder.Decoder, DecoderConfig]:
    config = models.resolve(DecoderConfig(path=str(folder)), {})
    assert isinstance(config, DecoderConfig)
    module = models.build(config, seed=0)
    assert isinstance(module, decoder.Decoder)
    return module.eval(), config


@torch.no_grad()
def close(ours: Any, theirs: Any, length: int) -> None:
    a, b = ours(tokens(length)), theirs(tokens(length)).logits
    scale = b.abs().max()
    torch.testing.assert_close(a / scale, b / scale, atol=1e-5, rtol=0)


def same_weights(one: torch.nn.Module, other: torch.nn.Module) -> None:
    for p, q in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize(("kind", "arguments", "length"), CASES)
def test_logits_equal_those_of_transformers_both_ways(
    kind: Any, arguments: dict[str, Any], length: int, tmp_path: Path
) -> None:
    theirs = peer(kind, arguments)
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    assert (tmp_path / "theirs" / "model.safetensors.index.json").exists()
    ours, config = imported(tmp_path / "theirs")
    close(ours, theirs, length)

    decoder.save_pretrained(ours, config, tmp_path / "single")
    decoder.save_pretrained(ours, config, tmp_path / "sharded", max_shard_bytes=20_000)
    assert (tmp_path / "single" / "model.safetensors").exists()
    for folder in ("single", "sharded"):
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / folder, output_loading_info=True, attn_implementation="eager"
        )
        again, info = loaded
        assert not info["missing_keys"]
        assert not info["unexpected_keys"]
        assert not info["mismatched_keys"]
        close(ours, again.eval(), length)
        back, same = imported(tmp_path / folder)
        assert same.model_copy(update={"path": None}) == config.model_copy(update={"path": None})
        same_weights(back, ours)


def test_a_shard_is_at_most_as_large_as_asked(tmp_path: Path) -> None:
    ours, config = tiny()
    decoder.save_pretrained(ours, config, tmp_path, max_shard_bytes=40_000)
    files = sorted(tmp_path.glob("model-*.safetensors"))
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    sizes = [sum(t.nbytes for t in load_file(f).values()) for f in files]
    assert len(files) > 2
    assert max(sizes) <= 40_000
    assert sum(sizes) == index["metadata"]["total_size"]
    assert set(index["weight_map"].values()) == {f.name for f in files}


def test_a_second_export_leaves_nothing_of_the_first(tmp_path: Path) -> None:
    ours, config = tiny()
    decoder.save_pretrained(ours, config, tmp_path, max_shard_bytes=40_000)
    decoder.save_pretrained(ours, config, tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


def test_a_tied_head_is_written_once_and_comes_back_tied(tmp_path: Path) -> None:
    ours, config = tiny()
    decoder.save_pretrained(ours, config, tmp_path, extra={"eos_token_id": 3})
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    again, _ = imported(tmp_path)
    assert again.head_weight is again.embedding.weight
    theirs: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert theirs.lm_head.weight is theirs.transformer.wte.weight
    assert theirs.config.eos_token_id == 3


def test_a_tied_head_stored_twice_must_be_the_same(tmp_path: Path) -> None:
    ours, config = tiny()
    decoder.save_pretrained(ours, config, tmp_path)
    file = tmp_path / "model.safetensors"
    state = load_file(file)
    save_file({**state, "lm_head.weight": state["transformer.wte.weight"].clone()}, file)
    imported(tmp_path)
    save_file({**state, "lm_head.weight": state["transformer.wte.weight"] + 1}, file)
    with pytest.raises(CheckpointError, match="ties the head to the embedding"):
        imported(tmp_path)


def test_names_without_prefix_and_stored_constants_are_understood(tmp_path: Path) -> None:
    """The layout of the first GPT-2 release."""
    ours, config = tiny()
    decoder.save_pretrained(ours, config, tmp_path)
    file = tmp_path / "model.safetensors"
    state = {k.removeprefix("transformer."): v for k, v in load_file(file).items()}
    save_file({**state, "h.0.attn.bias": torch.ones(1, 1, 64, 64)}, file)
    again, _ = imported(tmp_path)
    same_weights(again, ours)


def test_weights_load_into_another_dtype(tmp_path: Path) -> None:
    ours, config = tiny()
    decoder.save_pretrained(ours.bfloat16(), config, tmp_path)
    assert load_file(tmp_path / "model.safetensors")["transformer.wte.weight"].dtype == (
        torch.bfloat16
    )
    again, _ = imported(tmp_path)
    assert again.embedding.weight.dtype == torch.float32
    assert torch.equal(again.embedding.weight, ours.embedding.weight.float())


def tiny(**changes: Any) -> tuple[decoder.Decoder, DecoderConfig]:
    config = DecoderConfig(vocab=VOCAB, layers=2, width=48, heads=4, context=64, **changes)
    module = models.build(config, seed=0)
    assert isinstance(module, decoder.Decoder)
    return module, config


def damage(tmp_path: Path, **changes: torch.Tensor | None) -> Path:
    """An export with some tensors replaced, or left out where ``None``."""
    ours, config = tiny()
    decoder.save_pretrained(ours, config, tmp_path)
    file = tmp_path / "model.safetensors"
    state: dict[str, Any] = {**load_file(file), **changes}
    save_file({k: v for k, v in state.items() if v is not None}, file)
    return tmp_path


WPE = "transformer.wpe.weight"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({WPE: None}, "1 missing, such as 'transformer.wpe.weight'"),
        ({"transformer.extra": torch.ones(1)}, "1 unexpected, such as 'transformer.extra'"),
        ({WPE: torch.ones(64, 47)}, r"has shape \[64, 47\], the model's is \[64, 48\]"),
        (
            {"transformer.h.1.attn.c_attn.weight": torch.ones(144, 48)},
            r"has shape \[144, 48\], the model's is \[48, 144\]",
        ),
    ],
)
def test_wrong_tensors_are_refused_in_one_line(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    damage(tmp_path, **changes)
    with pytest.raises(CheckpointError, match=message) as caught:
        imported(tmp_path)
    assert "\n" not in str(caught.value)


def test_missing_and_damaged_files_are_refused(tmp_path: Path) -> None:
    ours, config = tiny()
    with pytest.raises(RecipeError, match=r"model\.path: cannot read .*config\.json"):
        imported(tmp_path)
    decoder.save_pretrained(ours, config, tmp_path, max_shard_bytes=40_000)
    shard = sorted(tmp_path.glob("model-00002-of-*.safetensors"))[0]
    content = shard.read_bytes()
    shard.write_bytes(content[:-100])
    with pytest.raises(CheckpointError, match=r"model-00002.* is damaged"):
        imported(tmp_path)
    shard.unlink()
    with pytest.raises(CheckpointError, match=r"model-00002.* is missing"):
        imported(tmp_path)
    for file in tmp_path.glob("model*"):
        file.unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"pickled \.bin files are never loaded"):
        imported(tmp_path)


def test_a_field_that_contradicts_the_file_is_refused_and_a_free_one_is_kept(
    tmp_path: Path,
) -> None:
    decoder.save_pretrained(*tiny(), tmp_path)
    same = DecoderConfig(path=str(tmp_path), layers=2, attention="reference", dropout=0.1)
    found = decoder.read_config(same)
    assert (found.vocab, found.attention, found.dropout) == (VOCAB, "reference", 0.1)
    with pytest.raises(RecipeError, match=r"model\.layers: 3 contradicts 2"):
        decoder.read_config(DecoderConfig(path=str(tmp_path), layers=3))


def test_the_resolved_config_resolves_to_itself(tmp_path: Path) -> None:
    """A run's recipe.toml holds every field beside the path, and is read again on resume."""
    decoder.save_pretrained(*tiny(), tmp_path)
    found = decoder.read_config(DecoderConfig(path=str(tmp_path)))
    again = DecoderConfig.model_validate(found.model_dump())
    assert decoder.read_config(again) == found


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({**GPT2, "scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx True"),
        ({**GPT2, "activation_function": "silu"}, "activation_function 'silu'"),
        ({**LLAMA, "model_type": "llama", "hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({**LLAMA, "model_type": "llama", "num_attention_heads": 5}, "do not divide"),
        ({k: v for k, v in GPT2.items() if k != "n_embd"}, "has no 'n_embd'"),
        (
            {**LLAMA, "model_type": "llama", "rope_scaling": {"type": "longrope", "factor": 2.0}},
            "rope_type 'longrope' is not one of",
        ),
        (
            {
                **LLAMA,
                "model_type": "qwen2",
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            "layer_types must be full_attention first",
        ),
    ],
)
def test_what_the_decoder_does_not_do_is_refused_by_name(raw: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        from_json({"model_type": "gpt2", **raw})


def test_an_unknown_model_type_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "mistrall"}')
    with pytest.raises(RecipeError, match=r"'mistrall', which is not one of .* mean 'mistral'"):
        decoder.read_config(DecoderConfig(path=str(tmp_path)))


def test_older_spellings_of_rotary_settings_are_read() -> None:
    raw = {**LLAMA, "model_type": "llama", "rope_theta": 5e5}
    old = from_json({**raw, "rope_scaling": {"type": "linear", "factor": 2.0}})
    new = from_json(
        {**raw, "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}}
    )
    assert old == new
    assert (old.rope_theta, old.rope_scaling.kind, old.rope_scaling.factor) == (5e5, "linear", 2.0)


def test_a_combination_that_transformers_lacks_is_refused() -> None:
    with pytest.raises(RecipeError, match="no model of Hugging Face's has positions=rope"):
        to_json(DecoderConfig(vocab=9, positions="rope"))
