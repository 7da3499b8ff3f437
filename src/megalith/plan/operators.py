"""How many floating-point operations an operator takes, and of which kind it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import (
    flop_registry,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)

from megalith.models import grouped

NO_KERNEL = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.new_empty_strided.default,
    torch.ops.aten.lift_fresh.default,
    torch.ops.aten._unsafe_view.default,
}
"""What gives memory a name or a shape, and starts no kernel."""

_GROUPED: dict[Any, Callable[[Tensor], int]] = {
    grouped.PRODUCT.overloadpacket: lambda matrices: matrices.shape[1],
    grouped.OUTER.overloadpacket: lambda right: right.shape[1],
}
"""Products of rows by groups: what an element of the first operand is multiplied with."""

_ON_CPU: dict[Any, Callable[..., int]] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: (
        lambda query, key, value, *rest: sdpa_flop_count(query, key, value)
    ),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        lambda grad, query, key, value, *rest: sdpa_backward_flop_count(grad, query, key, value)
    ),
}
"""The CPU's attention, which torch's registry leaves out."""


def cost(function: Any, args: Any, kwargs: Any, result: Any) -> tuple[str, int]:
    """The kind of an operator, ``matmul``, ``attention`` or ``memory``, and its operations.

    Args:
        function: overload that was called with ``args`` and ``kwargs`` and gave ``result``.
    """
    packet = function._overloadpacket
    if packet in _GROUPED:
        return "matmul", 2 * args[0].numel() * _GROUPED[packet](args[1])
    if packet in _ON_CPU:
        shapes = [t.shape for t in tree_iter((args, kwargs)) if isinstance(t, Tensor)]
        return "attention", _ON_CPU[packet](*shapes)
    if packet in flop_registry:
        kind = "attention" if "attention" in function._schema.name else "matmul"
        return kind, flop_registry[packet](*args, **kwargs, out_val=result)
    return "memory", 0
