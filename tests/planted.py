"""How a fault is planted: a part of the product is replaced on the ranks, and on them alone.

Ranks are forked from the test's process, so they inherit what it has patched. One process, which
computes what is right, must not: every replacement asks first whether ranks have joined.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

Patch = pytest.MonkeyPatch
Plant = Callable[[Patch], None]


@dataclass(frozen=True)
class Fault:
    """One known mistake, and what the verifier must say of it.

    Attributes:
        plant: puts it into the product.
        why: what is wrong, in one line.
        source: ``row N`` of the table of public reports, or the notes' section, that has it.
        layout: in which it shows.
        axes: to which it must be traced.
        recipe: name of the recipe that has the part it breaks.
        factor: of gradients or a number, as the verifier must name it.
        named: what must be among the names of what differs.
        failure: the run ends with this message instead of a difference.
    """

    plant: Plant
    why: str
    source: str
    layout: dict[str, Any]
    axes: tuple[str, ...]
    recipe: str = "gpt"
    factor: str | None = None
    named: str = ""
    failure: str = ""

    @property
    def id(self) -> str:
        """The plant's name, for pytest."""
        return self.plant.__name__.replace("_", "-")


def replace(patch: Patch, owner: Any, name: str, wrong: Callable[..., Any]) -> None:
    """Put ``wrong(right, *args)`` in the place of ``owner.name`` on ranks."""
    right = getattr(owner, name)

    @functools.wraps(right)
    def replaced(*args: Any, **kwargs: Any) -> Any:
        if not dist.is_initialized():
            return right(*args, **kwargs)
        return wrong(right, *args, **kwargs)

    patch.setattr(owner, name, replaced)


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore
        return grad * ctx.factor, None


def scaled(x: Tensor, factor: float) -> Tensor:
    """``x``, whose gradient is ``factor`` times what it should be."""
    return _Scaled.apply(x, factor)  # pyright: ignore
