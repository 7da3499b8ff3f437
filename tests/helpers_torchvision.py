"""torchvision's models where its compiled operators may be missing."""

from __future__ import annotations

import importlib
from typing import Any

import torch

_library: Any = None  # the operators live as long as this object


def models() -> Any:
    """``torchvision.models``; operators that its wheel lacks here are declared, not defined."""
    global _library
    try:
        return importlib.import_module("torchvision.models")
    except RuntimeError:
        _library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            _library.define(f"{name}(Tensor dets, Tensor scores, float threshold) -> Tensor")
        return importlib.import_module("torchvision.models")
