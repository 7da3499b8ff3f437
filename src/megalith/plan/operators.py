"""How many floating-point operations an operator takes, and of which kind it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
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

_UNLISTED: dict[Any, tuple[str, Callable[..., int]]] = {
    grouped.PRODUCT.overloadpacket: (
        "matmul",
        lambda rows, matrices, *rest: 2 * rows.numel() * matrices.shape[1],
    ),
    grouped.OUTER.overloadpacket: (
        "matmul",
        lambda left, right, *rest: 2 * left.numel() * right.shape[1],
    ),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: (
        "attention",
        lambda query, key, value, *rest, **options: sdpa_flop_count(
            query.shape, key.shape, value.shape
        ),
    ),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        "attention",
        lambda grad, query, key, value, *rest, **options: sdpa_backward_flop_count(
            grad.shape, query.shape, key.shape, value.shape
        ),
    ),
}
"""Kind and operations of what torch's registry leaves out: our products by groups, the CPU's
attention."""


def cost(function: Any, args: Any, kwargs: Any, result: Any) -> tuple[str, int]:
    """The kind of an operator, ``matmul``, ``attention`` or ``memory``, and its operations.

    Args:
        function: overload that was called with ``args`` and ``kwargs`` and gave ``result``.
    """
    packet = function._overloadpacket
    if packet in _UNLISTED:
        kind, count = _UNLISTED[packet]
        return kind, count(*args, **kwargs)
    if packet in flop_registry:
        kind = "attention" if "attention" in function._schema.name else "matmul"
        return kind, flop_registry[packet](*args, **kwargs, out_val=result)
    return "memory", 0
