"""The residual networks: ``build(config)``, and weights under torchvision's names."""

from megalith.models.resnet.convert import (
    load_weights,
    read_config,
    save_pretrained,
    with_classes,
)
from megalith.models.resnet.model import ResNet
from megalith.recipe.families import ResNetConfig

__all__ = ["ResNet", "build", "load_weights", "read_config", "save_pretrained"]


def build(config: ResNetConfig) -> ResNet:
    """The module of ``config``, its weights not yet filled.

    Raises:
        RecipeError: neither the recipe, the data nor a file gives ``channels`` and ``classes``.
    """
    return ResNet(with_classes(config))
