"""A run folder, or a folder of Hugging Face's layout, is all that generation needs."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from megalith import checkpoint, models
from megalith.core.errors import MegalithError
from megalith.core.runs import RunFolder
from megalith.data.tokenizers import ByteTokenizer, train_bpe
from megalith.generate import Sampling, generate, load_for_generation
from megalith.models import decoder
from megalith.models.decoder import Decoder
from megalith.recipe import dump, parse

SMALL: dict[str, Any] = {"context": 32, "layers": 1, "width": 16, "heads": 2, "vocab": 257}
FEW = Sampling(max_tokens=6, seed=1)


def weights(seed: int, **fields: Any) -> Decoder:
    recipe = parse({"model": {**SMALL, **fields}, "data": {"sequence": 16}})
    model = models.build(recipe.model, seed)
    assert isinstance(model, Decoder)
    return model


def made_run(path: Path, losses: dict[int, float | None], ema: bool = False, **fields: Any) -> Path:
    """A run whose checkpoint of step ``n`` has the initial weights of seed ``n``."""
    run = RunFolder(path)
    path.mkdir()
    recipe = parse({"model": {**SMALL, **fields}, "data": {"sequence": 16}})
    run.recipe.write_text(dump(recipe))
    run.tokenizer.write_text(ByteTokenizer().to_json())
    for step, loss in losses.items():
        tensors = {"model": checkpoint.wholes(checkpoint.model_tensors(weights(step, **fields)))}
        if ema:
            averaged = weights(step + 1000, **fields)
            tensors["ema"] = checkpoint.wholes(dict(averaged.named_parameters()))
        checkpoint.save(run.checkpoints, step, tensors, {"validation_loss": loss})
    return path


def same(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.state_dict().items(), other.state_dict().items(), strict=True)
    return all(a == b and torch.equal(x, y) for (a, x), (b, y) in pairs)


def test_a_run_gives_its_best_checkpoint_and_its_own_tokenizer(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", {10: 2.0, 20: 1.5, 30: 1.7, 40: None})
    model, tokenizer, recipe = load_for_generation(run, device="cpu")
    assert same(model, weights(20))
    assert not model.training
    assert (tokenizer.vocab, tokenizer.end) == (257, 256)
    assert getattr(recipe.model, "width", 0) == 16
    assert generate(model, tokenizer, "ab", FEW) == generate(weights(20), tokenizer, "ab", FEW)


def test_a_run_that_was_never_evaluated_gives_its_newest_checkpoint(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", {10: None, 20: None})
    assert same(load_for_generation(run)[0], weights(20))


def test_a_step_can_be_named(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", {10: 2.0, 20: 1.5})
    assert same(load_for_generation(run, step=10)[0], weights(10))
    with pytest.raises(MegalithError, match="no checkpoint of step 15; there is: 10, 20"):
        load_for_generation(run, step=15)


def test_averaged_weights_are_taken_where_there_are_any(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", {10: 2.0}, ema=True)
    assert same(load_for_generation(run)[0], weights(1010))


def test_a_damaged_checkpoint_gives_way_to_the_next_best(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", {10: 2.0, 20: 1.5, 30: 1.7})
    file = run / "checkpoints" / "step-00000020" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert same(load_for_generation(run)[0], weights(30))
    with pytest.raises(MegalithError, match="damaged"):
        load_for_generation(run, step=20)


def test_a_tied_head_is_the_embedding_and_an_untied_one_is_loaded(tmp_path: Path) -> None:
    tied, _, _ = load_for_generation(made_run(tmp_path / "tied", {1: None}))
    assert tied.head_weight.data_ptr() == tied.embedding.weight.data_ptr()
    untied, _, _ = load_for_generation(
        made_run(tmp_path / "untied", {1: None}, tied=False, positions="rope")
    )
    assert same(untied, weights(1, tied=False, positions="rope"))


def test_a_model_of_the_users_own_that_is_a_decoder_generates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine_to_generate.py").write_text(
        "from megalith.models.decoder import Decoder\n"
        "from megalith.recipe.families import DecoderConfig\n"
        "def make(width):\n"
        "    return Decoder(DecoderConfig(vocab=257, context=32, layers=1, width=width, heads=2))\n"
    )
    monkeypatch.chdir(tmp_path)
    run = made_run(tmp_path / "run", {5: None})
    section = {"factory": "mine_to_generate:make", "args": {"width": 16}}
    RunFolder(run).recipe.write_text(dump(parse({"model": section})))
    assert same(load_for_generation(run)[0], weights(5))


def test_a_folder_of_hugging_faces_layout_generates(tmp_path: Path) -> None:
    model = weights(
        3,
        positions="rope",
        norm="rmsnorm",
        activation="swiglu",
        vocab=300,
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        tied=False,
    )
    decoder.save_pretrained(model, model.config, tmp_path / "hf")
    tokenizer = train_bpe(["some text, some more text"], 270)
    (tmp_path / "hf" / "tokenizer.json").write_text(tokenizer.to_json())
    loaded, found, recipe = load_for_generation(tmp_path / "hf")
    assert same(loaded, model)
    assert found.to_json() == tokenizer.to_json()
    assert getattr(recipe.model, "positions", "") == "rope"
    assert generate(loaded, found, "some ", FEW) == generate(model, tokenizer, "some ", FEW)
    with pytest.raises(MegalithError, match="no steps to choose from"):
        load_for_generation(tmp_path / "hf", step=1)
    (tmp_path / "hf" / "tokenizer.json").unlink()
    with pytest.raises(MegalithError, match=r"holds no tokenizer\.json"):
        load_for_generation(tmp_path / "hf")


def one_line(path: Path) -> str:
    with pytest.raises(MegalithError) as caught:
        load_for_generation(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_anything_else_is_refused_in_one_line(tmp_path: Path) -> None:
    assert one_line(tmp_path / "none").endswith("none: no such folder")
    assert "neither a run folder" in one_line(tmp_path)
    run = made_run(tmp_path / "run", {1: None})
    assert f"give the run's folder, {run}" in one_line(run / "checkpoints" / "step-00000001")
    RunFolder(run).tokenizer.unlink()
    assert "holds no tokenizer.json" in one_line(run)
    shutil.rmtree(run / "checkpoints")
    assert "no whole checkpoint" in one_line(run)


def test_another_kind_of_model_is_refused(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", {1: None})
    image = {
        "model": {"family": "resnet", "classes": 3, "channels": 1},
        "data": {"source": "digits"},
        "task": {"name": "classify"},
    }
    recipe = parse(image)
    RunFolder(run).recipe.write_text(dump(recipe))
    tensors = {"model": checkpoint.wholes(checkpoint.model_tensors(models.build(recipe.model, 0)))}
    checkpoint.save(run / "checkpoints", 1, tensors, {"validation_loss": None})
    assert "a ResNet, and only a Decoder generates" in one_line(run)


def test_weights_of_another_recipe_are_refused(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", {1: None})
    recipe = parse({"model": {**SMALL, "width": 32}, "data": {"sequence": 16}})
    RunFolder(run).recipe.write_text(dump(recipe))
    assert "has shape" in one_line(run)


def test_a_tokenizer_with_more_ids_than_the_model_is_refused(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", {}, vocab=200)
    tensors = {"model": checkpoint.wholes(checkpoint.model_tensors(weights(1, vocab=200)))}
    checkpoint.save(run / "checkpoints", 1, tensors, {"validation_loss": None})
    assert "the model knows 200 ids" in one_line(run)


def test_a_file_of_the_layout_that_is_damaged_is_one_line(tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    folder.mkdir()
    (folder / "tokenizer.json").write_text(ByteTokenizer().to_json())
    (folder / "config.json").write_text("{")
    save_file({"x": torch.zeros(1)}, folder / "model.safetensors")
    one_line(folder)
