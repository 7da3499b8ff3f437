"""Mixtral's and Qwen3-MoE's weights, both ways: transformers is the judge."""

from __future__ import annotations

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

helpers_torchvision.models()  # transformers imports torchvision where it finds it
VOCAB = 97
SHAPE: dict[str, Any] = {
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
QWEN = {
    **SHAPE,
    "head_dim": 16,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
}
# A row: transformers' config class and its arguments.
CASES: list[Any] = [
    pytest.param(transformers.MixtralConfig, {**SHAPE, "num_local_experts": 4}, id="mixtral"),
    pytest.param(
        transformers.MixtralConfig,
        {
            **SHAPE,
            "num_local_experts": 5,
            "num_experts_per_tok": 3,
            "head_dim": 16,
            "sliding_window": 7,
            "tie_word_embeddings": True,
        },
        id="mixtral-window-head-dim-tied",
    ),
    pytest.param(transformers.Qwen3MoeConfig, QWEN, id="qwen3-moe-weights-not-normalised"),
    pytest.param(
        transformers.Qwen3MoeConfig,
        {
            **QWEN,
            "norm_topk_prob": True,
            "mlp_only_layers": [0],
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 5,
        },
        id="qwen3-moe-dense-layer-bias-window",
    ),
]


def peer(kind: Any, arguments: dict[str, Any]) -> Any:
    """A random model of transformers', with norms and biases that are not ones and zeros."""
    torch.manual_seed(0)
    config = kind(**arguments, attn_implementation="eager")
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            torch.nn.init.normal_(parameter, float("norm" in name), 0.3)
        elif "experts" in name or "mlp.gate.weight" in name:
            torch.nn.init.normal_(parameter, 0.0, 0.3)
    return model


def imported(folder: Path) -> tuple[decoder.Decoder, DecoderConfig]:
    config = models.resolve(DecoderConfig(path=str(folder)), {})
    assert isinstance(config, DecoderConfig)
    module = models.build(config, seed=0)
    assert isinstance(module, decoder.Decoder)
    return module.eval(), config


@torch.no_grad()
def close(ours: Any, theirs: Any) -> None:
    tokens = torch.randint(0, VOCAB, (2, 40), generator=torch.Generator().manual_seed(1))
    a, b = ours(tokens), theirs(tokens).logits
    scale = b.abs().max()
    torch.testing.assert_close(a / scale, b / scale, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("kind", "arguments"), CASES)
def test_logits_equal_those_of_transformers_both_ways(
    kind: Any, arguments: dict[str, Any], tmp_path: Path
) -> None:
    theirs = peer(kind, arguments)
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="50KB")
    ours, config = imported(tmp_path / "theirs")
    close(ours, theirs)

    decoder.save_pretrained(ours, config, tmp_path / "single")
    decoder.save_pretrained(ours, config, tmp_path / "sharded", max_shard_bytes=50_000)
    for folder in ("single", "sharded"):
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / folder, output_loading_info=True, attn_implementation="eager"
        )
        again, info = loaded
        assert not info["missing_keys"]
        assert not info["unexpected_keys"]
        assert not info["mismatched_keys"]
        close(ours, again.eval())
        back, same = imported(tmp_path / folder)
        assert same.model_copy(update={"path": None}) == config.model_copy(update={"path": None})
        for p, q in zip(back.parameters(), ours.parameters(), strict=True):
            assert torch.equal(p, q)


@pytest.mark.parametrize(("kind", "arguments"), CASES)
def test_names_in_the_file_are_those_of_the_released_checkpoints(
    kind: Any, arguments: dict[str, Any], tmp_path: Path
) -> None:
    """One tensor per expert, as in the hub's files, not transformers' own stacks in memory."""
    theirs = peer(kind, arguments)
    theirs.save_pretrained(tmp_path / "theirs")
    ours, config = imported(tmp_path / "theirs")
    decoder.save_pretrained(ours, config, tmp_path / "ours")
    files = [load_file(tmp_path / who / "model.safetensors") for who in ("ours", "theirs")]
    assert set(files[0]) == set(files[1])
    for name, tensor in files[0].items():
        assert torch.equal(tensor, files[1][name]), name


def saved(tmp_path: Path, **changes: Any) -> tuple[decoder.Decoder, DecoderConfig]:
    config = DecoderConfig(
        vocab=VOCAB,
        layers=2,
        width=32,
        heads=4,
        experts=3,
        expert_hidden=24,
        **{
            "hidden": 24,
            "activation": "swiglu",
            "norm": "rmsnorm",
            "positions": "rope",
            "qkv_bias": False,
            "output_bias": False,
            "mlp_bias": False,
            **changes,
        },
    )
    module = models.build(config, seed=0)
    assert isinstance(module, decoder.Decoder)
    decoder.save_pretrained(module, config, tmp_path)
    return module, config


def test_a_missing_expert_and_one_of_another_shape_are_refused(tmp_path: Path) -> None:
    saved(tmp_path)
    file = tmp_path / "model.safetensors"
    state = load_file(file)
    name = "model.layers.1.block_sparse_moe.experts.2.w3.weight"
    save_file({**state, name: torch.ones(23, 32)}, file)
    with pytest.raises(CheckpointError, match=r"2\.w3.*has shape \[23, 32\].*\[24, 32\]"):
        imported(tmp_path)
    save_file({k: v for k, v in state.items() if k != name}, file)
    with pytest.raises(CheckpointError, match=r"1 missing, such as '.*experts\.2\.w3\.weight'"):
        imported(tmp_path)


def test_how_training_balances_is_free_and_a_learned_bias_is_not_lost(tmp_path: Path) -> None:
    saved(tmp_path)
    config = decoder.read_config(DecoderConfig(path=str(tmp_path), balance_by="bias"))
    assert (config.balance_by, config.balance, config.experts) == ("bias", 0.0, 3)
    assert decoder.read_config(DecoderConfig.model_validate(config.model_dump())) == config
    module = models.build(config, seed=0)
    decoder.save_pretrained(module, config, tmp_path / "unbiased")
    module.get_buffer("blocks.1.mlp.bias")[0] = 0.5
    with pytest.raises(CheckpointError, match=r"'blocks\.1\.mlp\.bias' has no place"):
        decoder.save_pretrained(module, config, tmp_path / "biased")


def test_what_either_side_does_not_have_is_refused_by_name(tmp_path: Path) -> None:
    for change in ({"shared_hidden": 8}, {"router_normalise": False}, {"dense_layers": 1}):
        with pytest.raises(RecipeError, match="no model of Hugging Face's has 3 experts"):
            saved(tmp_path, **change)
    raw = {**QWEN, "model_type": "qwen3_moe"}
    with pytest.raises(RecipeError, match="decoder_sparse_step 2 is not supported"):
        from_json({**raw, "decoder_sparse_step": 2})
    with pytest.raises(RecipeError, match="mlp_only_layers must be the first layers"):
        from_json({**raw, "mlp_only_layers": [0, 2]})


@pytest.mark.parametrize(
    ("preset", "kind"), [("mixtral-8x7b", "mixtral"), ("qwen3-30b-a3b", "qwen3_moe")]
)
def test_the_presets_go_to_json_and_back(preset: str, kind: str) -> None:
    config = DecoderConfig(preset=preset)
    content = to_json(config)
    assert content["model_type"] == kind
    assert from_json(content) == config.model_copy(update={"preset": None})
