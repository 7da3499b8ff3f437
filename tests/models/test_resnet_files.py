"""Weight files of ResNets: torchvision's names, out and in, and refusals in one line."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers_torchvision import models as torchvision_models
from megalith import models
from megalith.core.errors import CheckpointError, RecipeError
from megalith.models import resnet
from megalith.recipe.families import ResNetConfig


def from_file(path: Path, facts: dict[str, int] | None = None, **fields: object) -> torch.nn.Module:
    config = models.resolve(ResNetConfig.model_validate({"path": str(path), **fields}), facts or {})
    return models.build(config, seed=4)


@pytest.mark.parametrize("depth", ["resnet18", "resnet50"])
def test_a_file_of_torchvisions_says_what_it_is(depth: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    theirs = getattr(torchvision_models(), depth)(num_classes=12).eval()
    save_file(theirs.state_dict(), tmp_path / "weights.safetensors")
    ours = from_file(tmp_path / "weights.safetensors").eval()
    images = torch.randn(2, 3, 40, 40)
    torch.testing.assert_close(ours(images), theirs(images))


def test_torchvision_reads_what_we_write(tmp_path: Path) -> None:
    config = ResNetConfig.model_validate({"preset": "resnet34", "channels": 3, "classes": 9})
    ours = models.build(config, seed=0)
    file = resnet.save_pretrained(ours, tmp_path / "out")  # type: ignore[arg-type]
    theirs = torchvision_models().resnet34(num_classes=9)
    theirs.load_state_dict(load_file(file))
    images = torch.randn(2, 3, 40, 40)
    torch.testing.assert_close(ours.eval()(images), theirs.eval()(images))
    assert [f.name for f in (tmp_path / "out").iterdir()] == ["model.safetensors"]


def test_a_small_network_comes_back_bit_for_bit(tmp_path: Path) -> None:
    config = ResNetConfig(channels=1, classes=4, stem="small", width=8, blocks=[1, 2])
    ours = models.build(config, seed=0)
    ours(torch.randn(8, 1, 8, 8))  # so that the running statistics are not the initial ones
    file = resnet.save_pretrained(ours, tmp_path / "small.safetensors")  # type: ignore[arg-type]
    again = from_file(file)
    for name, tensor in ours.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name


def test_another_number_of_classes_means_a_new_head(tmp_path: Path) -> None:
    config = ResNetConfig(channels=1, classes=4, stem="small", width=8, blocks=[1])
    file = resnet.save_pretrained(models.build(config, seed=0), tmp_path)  # type: ignore[arg-type]
    again = from_file(file, facts={"classes": 10, "channels": 1})
    fresh = models.build(config.model_copy(update={"classes": 10}), seed=4)
    assert torch.equal(again.get_parameter("fc.weight"), fresh.get_parameter("fc.weight"))
    assert torch.equal(again.get_parameter("fc.bias"), fresh.get_parameter("fc.bias"))
    name = "layer1.0.conv1.weight"
    assert torch.equal(again.get_parameter(name), load_file(file)[name])


def test_a_file_without_batch_counts_is_accepted(tmp_path: Path) -> None:
    config = ResNetConfig(channels=1, classes=4, stem="small", width=8, blocks=[1])
    tensors = models.build(config, seed=0).state_dict()
    old = {n: t for n, t in tensors.items() if not n.endswith("num_batches_tracked")}
    save_file(old, tmp_path / "old.safetensors")
    again = from_file(tmp_path / "old.safetensors").state_dict()
    assert all(torch.equal(t, again[n]) for n, t in tensors.items())


def test_wrong_files_are_refused_in_one_line(tmp_path: Path) -> None:
    config = ResNetConfig(channels=1, classes=4, stem="small", width=8, blocks=[1])
    good = models.build(config, seed=0).state_dict()
    file = tmp_path / "x.safetensors"

    with pytest.raises(CheckpointError, match=r"model.path: cannot read .*no such file"):
        from_file(file)
    file.write_bytes(b"not safetensors at all")
    with pytest.raises(CheckpointError, match="is no safetensors file"):
        from_file(file)
    save_file({"weight": torch.zeros(3)}, file)
    with pytest.raises(CheckpointError, match=r"not a residual network, it has no .conv1\.weight"):
        from_file(file)
    save_file({n: t for n, t in good.items() if n != "bn1.weight"}, file)
    with pytest.raises(CheckpointError, match=r"'bn1\.weight' is missing"):
        from_file(file)
    save_file({**good, "layer1.0.bn2.wieght": torch.zeros(8)}, file)
    with pytest.raises(CheckpointError, match=r"wieght'; did you mean 'layer1.0.bn2.weight'"):
        from_file(file)
    save_file({**good, "bn1.bias": torch.zeros(9)}, file)
    with pytest.raises(CheckpointError, match=r"'bn1.bias' has shape \[9\], the model's is \[8\]"):
        from_file(file)
    save_file(good, file)
    with pytest.raises(RecipeError, match=r"model.width: 16 is given, but .* has 8"):
        from_file(file, width=16)
