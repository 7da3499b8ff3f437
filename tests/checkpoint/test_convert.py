"""Checkpoints become folders that transformers loads, and back; none is held in memory whole."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn
from typer.testing import CliRunner

import helpers_torchvision
from megalith import checkpoint, cli, models
from megalith.checkpoint import hugging_face, manifest
from megalith.core.errors import CheckpointError
from megalith.core.runs import RunFolder
from megalith.data.tokenizers import ByteTokenizer
from megalith.generate.load import load_run
from megalith.layout.mesh import Mesh
from megalith.recipe import Recipe, parse
from megalith.recipe.dump import dump
from thread_ranks import on_threads, spread

helpers_torchvision.models()  # transformers imports torchvision where it finds it

GPT2 = {"layers": 2, "width": 16, "heads": 2, "context": 32, "vocab": 300}
LLAMA = {
    **GPT2,
    "kv_heads": 1,
    "positions": "rope",
    "norm": "rmsnorm",
    "activation": "swiglu",
    "qkv_bias": False,
    "output_bias": False,
    "mlp_bias": False,
    "tied": False,
    "hidden": 24,
}
MIXTURE = {**LLAMA, "experts": 4, "expert_hidden": 12}
FAMILIES = {"gpt2": GPT2, "llama": LLAMA, "mixture": MIXTURE}


def run(*words: Any):
    return CliRunner().invoke(cli.app, ["checkpoint", *map(str, words)])


def build(recipe: Recipe, seed: int = 0) -> nn.Module:
    return models.build(recipe.model, seed).to(torch.bfloat16)


def saved_run(path: Path, fields: dict[str, Any], ranks: int, *, ema: bool = False) -> nn.Module:
    """A run folder with one checkpoint of several ranks; returns the model that it holds."""
    recipe = parse({"model": fields, "data": {"sequence": 16}, "run": {"dir": str(path)}})
    folder = RunFolder(path)
    path.mkdir()
    folder.recipe.write_text(dump(recipe))
    folder.tokenizer.write_text(ByteTokenizer().to_json())
    model, averaged = build(recipe), build(recipe, 1)
    tensors = {name: value.detach() for name, value in checkpoint.model_tensors(model).items()}
    parts = {"model": spread(tensors, ranks, 0, fill=True)}
    if ema:
        average = {name: value.detach() for name, value in averaged.named_parameters()}
        parts["ema"] = spread(average, ranks, 1, fill=True)
    state = {"done": 3, "recipe": recipe.model_dump(mode="json")}

    def work(mesh: Mesh) -> Path:
        pieces = {part: layout[mesh.rank] for part, layout in parts.items()}
        return checkpoint.save(folder.checkpoints, 3, pieces, state, mesh)

    assert all(isinstance(result, Path) for result in on_threads(ranks, work))
    return averaged if ema else model


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("ema", [False, True])
def test_transformers_computes_what_the_checkpoint_does(
    tmp_path: Path, family: str, ema: bool
) -> None:
    model = saved_run(tmp_path / "run", FAMILIES[family], 3, ema=ema).float().eval()
    done = run("convert", tmp_path / "run", tmp_path / "out", "--shard-gb", "0.00001")
    assert done.exit_code == 0, done.output
    files = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"config.json", "tokenizer.json", "model.safetensors.index.json"} <= files
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").float().eval()
    tokens = torch.randint(300, (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), theirs(tokens).logits, atol=1e-5, rtol=1e-5)
    assert theirs.config.eos_token_id == ByteTokenizer().end


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("shard", [5.0, 0.00001])
def test_there_and_back_is_the_same_bit_for_bit(tmp_path: Path, family: str, shard: float) -> None:
    model = saved_run(tmp_path / "run", FAMILIES[family], 2)
    assert run("convert", tmp_path / "run", tmp_path / "out", "--shard-gb", shard).exit_code == 0
    back = run("convert", tmp_path / "out", tmp_path / "back")
    assert back.exit_code == 0, back.output
    entry = checkpoint.newest_whole(tmp_path / "back" / "checkpoints")
    assert entry is not None
    assert str(entry.path) == back.stdout.strip()
    loaded, wanted = checkpoint.load(entry.path, "model"), checkpoint.model_tensors(model)
    assert loaded.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert loaded[name].dtype == torch.bfloat16
        assert torch.equal(loaded[name], tensor), name
    again, recipe = load_run(RunFolder(tmp_path / "back"))
    assert recipe.model.layers == 2  # type: ignore[union-attr]
    assert torch.equal(
        again.state_dict()["embedding.weight"], model.state_dict()["embedding.weight"].float()
    )


def test_a_checkpoint_that_the_library_wrote_comes_in(tmp_path: Path) -> None:
    """GPT-2 as transformers saves it: fused, transposed, tied."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=90, n_positions=16, n_embd=8, n_layer=2, n_head=2)
    theirs = transformers.GPT2LMHeadModel(config).eval()
    theirs.save_pretrained(tmp_path / "hf", max_shard_size="4KB")
    assert run("convert", tmp_path / "hf", tmp_path / "run").exit_code == 0
    model, _ = load_run(RunFolder(tmp_path / "run"))
    tokens = torch.arange(12)[None]
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), theirs(tokens).logits, atol=1e-5, rtol=1e-5)


def test_consolidated_is_what_one_process_saves(tmp_path: Path) -> None:
    saved_run(tmp_path / "run", GPT2, 3, ema=True)
    done = run("consolidate", tmp_path / "run", tmp_path / "one")
    assert done.exit_code == 0, done.output
    path = tmp_path / "run" / "checkpoints" / "step-00000003"
    names = {file.name for file in (tmp_path / "one").iterdir()}
    assert names == {"model.safetensors", "ema.safetensors", "state.json", "manifest.json"}
    manifest.verify(tmp_path / "one")
    for part in ("model", "ema"):
        expected = checkpoint.load(path, part)
        found = load_file(tmp_path / "one" / f"{part}.safetensors")
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    # Also of the folder of a checkpoint, and again from what came out.
    assert run("consolidate", path, tmp_path / "two").exit_code == 0
    assert run("consolidate", tmp_path / "one", tmp_path / "three").exit_code == 0
    for name in names:
        assert (tmp_path / "two" / name).read_bytes() == (tmp_path / "three" / name).read_bytes()


def test_ls_shows_the_layout_and_verify_names_the_damaged_file(tmp_path: Path) -> None:
    saved_run(tmp_path / "run", GPT2, 3)
    path = tmp_path / "run" / "checkpoints" / "step-00000003"
    assert "1 process" in run("ls", tmp_path / "run").stdout
    section = {"pipeline": 2, "shard": 4, "tensor": 1}
    checkpoint.save(path.parent, 4, {"model": {}}, {"recipe": {"layout": section}})
    assert "pipeline 2 x shard 4 " in run("ls", tmp_path / "run").stdout
    whole = run("verify", tmp_path / "run")
    assert whole.exit_code == 0
    assert whole.stdout.count("whole; tensors") == 2
    file = path / "model-rank-00001.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    for target in (tmp_path / "run", path):
        damaged = run("verify", target)
        assert damaged.exit_code == 2
        assert f"{path}: 'model-rank-00001.safetensors' is damaged" in damaged.stderr
    for verb in ("consolidate", "convert"):
        refused = run(verb, path, tmp_path / "out")
        assert refused.exit_code == 2
        assert "model-rank-00001.safetensors" in refused.stderr
        assert not (tmp_path / "out").exists()


REFUSALS = [
    (["verify", "nowhere"], "nowhere: holds no run"),
    (["verify", "empty"], "empty: holds no run"),
    (["consolidate", "nowhere", "out"], "nowhere: no such folder"),
    (["consolidate", "empty", "out"], "empty: neither a run nor a checkpoint"),
    (["consolidate", "run", "full"], "full: is there and not empty"),
    (["consolidate", "run", "out", "--step", "7"], "no checkpoint of step 7; there is: 3"),
    (["convert", "nowhere", "out"], "nowhere: no such folder"),
    (["convert", "run", "full"], "full: is there and not empty"),
    (["convert", "hf", "out"], "model_type 'bert', which is not one of"),
    (["convert", "hf", "out", "--step", "3"], "has no steps to choose from"),
    (["convert", "weights", "out"], "has no recipe, so its model is not known"),
    (["convert", "picture", "out"], "only a decoder has a place"),
]


@pytest.mark.parametrize(("words", "line"), REFUSALS, ids=[" ".join(w[:2]) for w, _ in REFUSALS])
def test_bad_input_is_refused_in_one_line(tmp_path: Path, monkeypatch, words, line) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("empty", "full", "hf"):
        Path(name).mkdir()
    Path("full/file").write_text("mine")
    Path("hf/config.json").write_text(json.dumps({"model_type": "bert"}))
    saved_run(Path("run"), GPT2, 2)
    checkpoint.save(Path("weights/checkpoints"), 1, {"model": {}}, {})
    picture = parse({"model": {"family": "resnet"}, "task": {"name": "classify"}})
    state = {"recipe": picture.model_dump(mode="json")}
    checkpoint.save(Path("picture/checkpoints"), 1, {"model": {}}, state)
    result = run(*words)
    assert result.exit_code == 2
    assert line in result.stderr
    assert result.stderr.count("\n") == 1
    assert not Path("out").exists()
    assert Path("full/file").read_text() == "mine"
    assert not list(Path().glob(".*.tmp"))


def test_weights_that_do_not_fit_their_config_are_refused(tmp_path: Path) -> None:
    saved_run(tmp_path / "run", GPT2, 1)
    assert run("convert", tmp_path / "run", tmp_path / "hf").exit_code == 0
    file = tmp_path / "hf" / "model.safetensors"
    tensors = load_file(file)
    wrong = {**tensors, "transformer.ln_f.bias": torch.zeros(3)}
    save_file(wrong, file)
    with pytest.raises(CheckpointError, match=r"ln_f.bias' has shape \[3\], the model's is \[16\]"):
        hugging_face.from_hugging_face(tmp_path / "hf", tmp_path / "out")
    save_file({**tensors, "lm_head.weight": torch.zeros(300, 16)}, file)
    with pytest.raises(CheckpointError, match="the two differ"):
        hugging_face.from_hugging_face(tmp_path / "hf", tmp_path / "out")
    del tensors["transformer.ln_f.bias"]
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=r"1 missing, such as 'transformer.ln_f"):
        hugging_face.from_hugging_face(tmp_path / "hf", tmp_path / "out")
    assert not (tmp_path / "out").exists()


_MEASURED = """
import sys, threading, time
from pathlib import Path
import psutil
from megalith.checkpoint import consolidate, hugging_face

import megalith.models.decoder.convert
source, out = Path(sys.argv[2]), Path(sys.argv[3])
process = psutil.Process()
before = process.memory_info().rss
peak, done = before, False

def watch():
    global peak
    while not done:
        peak = max(peak, process.memory_info().rss)
        time.sleep(0.001)

watcher = threading.Thread(target=watch)
watcher.start()
if sys.argv[1] == "consolidate":
    consolidate.consolidate(source, out)
elif sys.argv[1] == "to":
    hugging_face.to_hugging_face(source, out, 10**10)
else:
    hugging_face.from_hugging_face(source, out)
done = True
watcher.join()
print(peak - before)
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks with 320 MiB of bfloat16 in tensors of up to 8 MiB."""
    folder = tmp_path_factory.mktemp("large")
    fields = {**LLAMA, "layers": 10, "width": 1024, "heads": 8, "kv_heads": 8, "hidden": 4096}
    saved_run(folder / "run", fields, 2)
    return folder


@pytest.mark.parametrize("direction", ["consolidate", "to", "from"])
def test_no_model_is_held_in_memory(large: Path, direction: str) -> None:
    source = large / "run" / "checkpoints" / "step-00000003"
    if direction == "from":
        source = large / "hf"
        hugging_face.to_hugging_face(large / "run" / "checkpoints" / "step-00000003", source)
    size = sum(file.stat().st_size for file in source.iterdir())
    assert size > 300 * 2**20
    words = [direction, str(source), str(large / f"out-{direction}")]
    done = subprocess.run([sys.executable, "-c", _MEASURED, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    grown = int(done.stdout)
    assert grown < size / 2, f"{grown / 2**20:.0f} of {size / 2**20:.0f} MiB"
