"""Models that are not this project's, as a user would bring them: BERT-base and ViT-B/16."""

from __future__ import annotations

import importlib

import torch
from torch import nn

_library = None
try:  # transformers imports torchvision where that is installed
    importlib.import_module("torchvision")
except ModuleNotFoundError:
    pass
except RuntimeError:  # its wheel is for another build of torch, and lacks an operator
    _library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        _library.define(f"{name}(Tensor dets, Tensor scores, float threshold) -> Tensor")

from transformers import (  # noqa: E402
    BertConfig,
    BertForMaskedLM,
    ViTConfig,
    ViTForImageClassification,
)


def bert(layers: int = 12) -> nn.Module:
    """BERT-base with its masked-language head (Devlin et al. 2018)."""
    return BertForMaskedLM(BertConfig(num_hidden_layers=layers))


def vit(layers: int = 12) -> nn.Module:
    """ViT-B/16 for 1000 classes (Dosovitskiy et al. 2020)."""
    return ViTForImageClassification(ViTConfig(num_hidden_layers=layers, num_labels=1000))
