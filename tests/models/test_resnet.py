"""ResNets are torchvision's: the same names, outputs, gradients and sizes."""

from __future__ import annotations

from fnmatch import fnmatchcase

import pytest
import torch
from torch import nn

from helpers_torchvision import models as torchvision_models
from megalith import models
from megalith.core import seeds
from megalith.core.errors import RecipeError
from megalith.recipe import parse
from megalith.recipe.families import ResNetConfig

DEPTHS = ("resnet18", "resnet34", "resnet50", "resnet101", "resnet152")
# torchvision's documentation, "Table of all available classification weights".
PUBLISHED = {
    "resnet18": 11_689_512,
    "resnet34": 21_797_672,
    "resnet50": 25_557_032,
    "resnet101": 44_549_160,
    "resnet152": 60_192_808,
}


def pair(depth: str, dtype: torch.dtype) -> tuple[nn.Module, nn.Module]:
    """Ours and torchvision's with the same weights, and statistics unlike the initial ones."""
    torch.manual_seed(0)
    theirs = getattr(torchvision_models(), depth)(num_classes=7).to(dtype)
    for name, buffer in theirs.named_buffers():
        if name.endswith(("mean", "var")):
            buffer.uniform_(0.5, 1.5)
    ours = models.build(small(depth), seed=1).to(dtype)
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def small(depth: str, **fields: object) -> ResNetConfig:
    return ResNetConfig.model_validate({"preset": depth, "channels": 3, "classes": 7, **fields})


@pytest.mark.parametrize("depth", DEPTHS)
def test_names_are_torchvisions_in_its_order(depth: str) -> None:
    with torch.device("meta"):
        theirs = getattr(torchvision_models(), depth)(num_classes=7)
    ours = models.build(small(depth), seed=0, device="meta")
    shapes = {name: tensor.shape for name, tensor in ours.state_dict().items()}
    assert list(shapes.items()) == [(n, t.shape) for n, t in theirs.state_dict().items()]
    assert [n for n, _ in ours.named_parameters()] == [n for n, _ in theirs.named_parameters()]


@pytest.mark.parametrize("depth", DEPTHS)
def test_parameter_counts_are_the_published_ones(depth: str) -> None:
    ours = models.build(small(depth, classes=1000), seed=0, device="meta")
    assert sum(p.numel() for p in ours.parameters()) == PUBLISHED[depth]


@pytest.mark.parametrize("depth", DEPTHS)
def test_outputs_are_torchvisions(depth: str) -> None:
    ours, theirs = pair(depth, torch.float64)
    images = torch.randn(2, 3, 40, 33, dtype=torch.float64)
    assert torch.equal(ours.eval()(images), theirs.eval()(images))


@pytest.mark.parametrize("depth", ["resnet18", "resnet50"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_and_running_statistics_are_torchvisions(depth: str, dtype: torch.dtype) -> None:
    ours, theirs = pair(depth, dtype)
    images = torch.randn(3, 3, 40, 40, dtype=dtype)
    for module in (ours, theirs):
        module.train()(images).square().sum().backward()
    for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, msg=name)
    for (name, mine), other in zip(ours.named_buffers(), theirs.buffers(), strict=True):
        torch.testing.assert_close(mine, other, msg=name)


def test_small_stem_keeps_the_size_until_the_second_stage() -> None:
    config = ResNetConfig(channels=1, classes=10, stem="small", width=8, blocks=[1, 1, 1])
    module = models.build(config, seed=0)
    seen: dict[str, tuple[int, ...]] = {}

    def watch(stage: str) -> None:
        def note(_module: nn.Module, _args: object, output: torch.Tensor) -> None:
            seen[stage] = tuple(output.shape)

        module.get_submodule(stage).register_forward_hook(note)

    for stage in ("layer1", "layer2", "layer3"):
        watch(stage)
    assert module(torch.randn(2, 1, 8, 8)).shape == (2, 10)
    assert seen == {"layer1": (2, 8, 8, 8), "layer2": (2, 16, 4, 4), "layer3": (2, 32, 2, 2)}


def test_initial_weights_have_the_papers_variance() -> None:
    module = models.build(small("resnet50"), seed=3)
    for name, tensor in module.named_parameters():
        if tensor.dim() == 4 and tensor.numel() > 10_000:
            fan_out = tensor.shape[0] * tensor.shape[2] * tensor.shape[3]
            assert tensor.std().item() == pytest.approx((2 / fan_out) ** 0.5, rel=0.05), name
        elif name.startswith("fc"):
            bound = 2048**-0.5
            assert tensor.abs().max() <= bound
            assert tensor.abs().max() > 0.5 * bound
        elif tensor.dim() == 1:
            assert torch.all(tensor == (1 if name.endswith("weight") else 0)), name


def test_initial_weights_depend_on_seed_and_name_alone() -> None:
    narrow = models.build(small("resnet18"), seed=5)
    deep = models.build(small("resnet34"), seed=5)
    other = models.build(small("resnet18"), seed=6)
    name = "layer2.0.conv1.weight"
    assert torch.equal(narrow.get_parameter(name), deep.get_parameter(name))
    assert not torch.equal(narrow.get_parameter(name), other.get_parameter(name))
    alone = torch.empty_like(narrow.get_parameter(name))
    deep.init_weight(name, alone, seeds.generator(5, "init", name))  # type: ignore[operator]
    assert torch.equal(alone, narrow.get_parameter(name))


def test_a_module_made_on_meta_is_the_same_after_initialise() -> None:
    straight = models.build(small("resnet18"), seed=2)
    later = models.build(small("resnet18"), seed=2, device="meta").to_empty(device="cpu")
    for tensor in (*later.parameters(), *later.buffers()):
        tensor.data.fill_(77)  # what to_empty leaves is anything
    models.initialise(later, seed=2)
    for name, tensor in straight.state_dict().items():
        assert torch.equal(tensor, later.state_dict()[name]), name


def test_units_name_the_residual_blocks_and_nothing_else() -> None:
    module = models.build(small("resnet101"), seed=0, device="meta")
    named = [(name, type(m).__name__) for name, m in module.named_modules()]
    matched = [
        (name, kind)
        for name, kind in named
        if any(fnmatchcase(name, pattern) for pattern in module.units)  # type: ignore[union-attr]
    ]
    assert len(matched) == 3 + 4 + 23 + 3
    assert matched == [(name, kind) for name, kind in named if kind == "Bottleneck"]


def test_scripted_and_exported_modules_agree() -> None:
    module = models.build(small("resnet50"), seed=0).eval()
    images = torch.randn(2, 3, 32, 32)
    exported = torch.export.export(module, (images,)).module()
    torch.testing.assert_close(exported(images), module(images))
    torch.testing.assert_close(torch.jit.script(module)(images), module(images))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"blocks": []}, "model.blocks: every stage needs at least one block, not []"),
        ({"blocks": [1] * 5}, "model.blocks: at most four stages, not 5"),
        ({"preset": "resnet51"}, "model.preset: 'resnet51' is"),
    ],
)
def test_a_wrong_shape_is_refused_in_one_line(fields: dict[str, object], message: str) -> None:
    with pytest.raises(RecipeError, match=message.replace("[", r"\[").replace("]", r"\]")):
        parse({"model": {"family": "resnet", **fields}})


def test_what_the_data_says_is_filled_in_and_checked() -> None:
    config = models.resolve(ResNetConfig(), {"classes": 10, "channels": 1})
    assert (config.classes, config.channels) == (10, 1)  # type: ignore[union-attr]
    with pytest.raises(RecipeError, match=r"model.channels: 3, but the data's images have 1"):
        models.resolve(ResNetConfig(channels=3), {"channels": 1})
    with pytest.raises(RecipeError, match=r"model.classes: is needed"):
        models.build(ResNetConfig(channels=3), seed=0)
