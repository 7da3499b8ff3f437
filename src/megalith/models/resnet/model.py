"""Residual networks for images: He et al. 2015, "Deep Residual Learning for Image Recognition".

The bottleneck's stride stands in its 3x3 convolution, as in torchvision, and the parameters carry
torchvision's names, so that a state dict of one loads into the other.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor, nn

from megalith.core.errors import RecipeError
from megalith.recipe.families import ResNetConfig


class BasicBlock(nn.Module):
    """Two 3x3 convolutions around a shortcut: ``[batch, inputs, h, w]`` to
    ``[batch, width, h / stride, w / stride]``.
    """

    expansion: ClassVar[int] = 1

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = _conv(inputs, width, 3, stride)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU()
        self.conv2 = _conv(width, width, 3)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = _shortcut(inputs, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        return self.relu(y + (x if self.downsample is None else self.downsample(x)))


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions around a shortcut: ``[batch, inputs, h, w]`` to
    ``[batch, 4 width, h / stride, w / stride]``.
    """

    expansion: ClassVar[int] = 4

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = self.expansion * width
        self.conv1 = _conv(inputs, width, 1)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = _conv(width, width, 3, stride)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = _conv(width, outputs, 1)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU()
        self.downsample = _shortcut(inputs, outputs, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        return self.relu(y + (x if self.downsample is None else self.downsample(x)))


class ResNet(nn.Module):
    """Images to class logits.

    Args:
        config: with ``channels`` and ``classes`` set.

    Raises:
        RecipeError: ``channels`` or ``classes`` is left out.
    """

    units: ClassVar[tuple[str, ...]] = ("layer?.[0-9]", "layer?.[0-9][0-9]")  # the blocks alone

    def __init__(self, config: ResNetConfig) -> None:
        super().__init__()
        if config.channels is None or config.classes is None:
            name = "channels" if config.channels is None else "classes"
            raise RecipeError(f"model.{name}: is needed, for the data does not give it")
        self.config = config
        width = config.width
        if config.stem == "imagenet":
            self.conv1 = _conv(config.channels, width, 7, stride=2)
            pool = nn.MaxPool2d(kernel_size=3, stride=2, padding=1)
        else:
            self.conv1 = _conv(config.channels, width, 3)
            pool = nn.Identity()
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU()
        self.maxpool = pool

        self.layer1 = _stage(config, 0)
        self.layer2 = _stage(config, 1)
        self.layer3 = _stage(config, 2)
        self.layer4 = _stage(config, 3)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(_features(config, len(config.blocks) - 1), config.classes)

    def forward(self, images: Tensor) -> Tensor:
        """Logits ``[batch, classes]`` of ``images``, ``[batch, channels, height, width]``."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(images))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(torch.flatten(self.avgpool(x), 1))

    def init_weight(self, name: str, tensor: Tensor, generator: torch.Generator) -> None:
        """Fill ``tensor`` with initial values of the parameter ``name``.

        Convolutions: normal with variance 2 / fan-out (He et al. 2015, "Delving Deep into
        Rectifiers", equation 14). Norms: 1 and 0. Head: uniform in +-1/sqrt(features).
        """
        if name.startswith("fc."):
            bound = 1 / math.sqrt(self.fc.in_features)
            tensor.uniform_(-bound, bound, generator=generator)
        elif tensor.dim() == 4:
            nn.init.kaiming_normal_(tensor, mode="fan_out", generator=generator)
        else:
            tensor.fill_(1.0 if name.endswith("weight") else 0.0)

    def init_buffers(self) -> None:
        """Set the running statistics to those of no data; needed after ``to_empty``."""
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.reset_running_stats()


def _block(config: ResNetConfig) -> type[BasicBlock | Bottleneck]:
    return BasicBlock if config.block == "basic" else Bottleneck


def _features(config: ResNetConfig, stage: int) -> int:
    """Channels that ``stage`` gives out; each stage doubles them."""
    return config.width * 2**stage * _block(config).expansion


def _stage(config: ResNetConfig, stage: int) -> nn.Module:
    if stage >= len(config.blocks):
        return nn.Identity()
    block, width = _block(config), config.width * 2**stage
    inputs = _features(config, stage - 1) if stage else config.width
    first = block(inputs, width, stride=2 if stage else 1)
    rest = [block(width * block.expansion, width, 1) for _ in range(config.blocks[stage] - 1)]
    return nn.Sequential(first, *rest)


def _conv(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    # Without bias: the norm that follows subtracts the mean.
    return nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)


def _shortcut(inputs: int, outputs: int, stride: int) -> nn.Sequential | None:
    if stride == 1 and inputs == outputs:
        return None
    return nn.Sequential(_conv(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))
