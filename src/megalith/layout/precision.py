"""Mixed precision: which dtype matmuls run in, and how float16 gradients keep their small values.

Weights, optimizer state and the loss stay in float32. Autocast runs matmuls in the chosen dtype.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from megalith.core import devices


@dataclass(frozen=True)
class Precision:
    """The dtype of matmuls on a device."""

    name: str
    device: torch.device

    @property
    def dtype(self) -> torch.dtype:
        """What matmuls take and give."""
        return devices.DTYPES[self.name]

    @property
    def widened(self) -> bool:
        """Whether matmuls compute in float32, because the device has no kernels for the dtype."""
        return not devices.multiplies_natively(self.device, self.dtype)

    @property
    def computing_dtype(self) -> torch.dtype:
        """What matmuls compute in."""
        return torch.float32 if self.widened else self.dtype

    @contextmanager
    def update(self) -> Iterator[None]:
        """Around all micro-batches of an update: each weight is cast once, not once per forward.

        Autocast drops its cast weights when its outermost context ends. Holding the nesting count
        keeps them over the micro-batches, while backward still runs outside of autocast.
        """
        if self.name == "fp32":
            yield
            return
        torch.autocast_increment_nesting()
        try:
            with WidenedMatmuls() if self.widened else ExitStack():
                yield
        finally:
            if torch.autocast_decrement_nesting() == 0:
                torch.clear_autocast_cache()

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Around every forward pass, inside :meth:`update`."""
        if self.name == "fp32":
            yield
            return
        with torch.autocast(self.device.type, self.dtype):
            yield


class WidenedMatmuls(TorchDispatchMode):
    """Runs matmuls, convolutions and attention of half-precision tensors in float32.

    The products are those of the same rounded numbers, summed in float32 and rounded again, which
    is what bfloat16 units do. For CPUs without such units, where torch's own kernels are loops.
    """

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        given = {a.dtype for a in args if isinstance(a, Tensor)}
        half = next((d for d in given if d in (torch.bfloat16, torch.float16)), None)
        if half is None or function.overloadpacket not in _MATMULS:
            return function(*args, **kwargs)
        out = kwargs.pop("out", None)
        wide = tree_map_only(Tensor, lambda t: t.float() if t.dtype == half else t, (args, kwargs))
        if out is not None:
            return out.copy_(function.overloadpacket(*wide[0], **wide[1]))
        result = function(*wide[0], **wide[1])
        # Log-normalisers of attention are float32 in both forms.
        keep = _FLOAT_RESULTS.get(function.overloadpacket, ())
        if isinstance(result, Tensor):
            return result.to(half)
        return tuple(
            r.to(half) if isinstance(r, Tensor) and r.is_floating_point() and i not in keep else r
            for i, r in enumerate(result)
        )


_aten = torch.ops.aten
_MATMULS = {
    _aten.mm,
    _aten.addmm,
    _aten.bmm,
    _aten.baddbmm,
    _aten.convolution,
    _aten.convolution_backward,
    _aten._scaled_dot_product_flash_attention_for_cpu,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward,
}
_FLOAT_RESULTS = {_aten._scaled_dot_product_flash_attention_for_cpu: (1,)}


@dataclass
class LossScale:
    """Dynamic loss scaling for float16 (Micikevicius et al. 2018, section 3.2).

    The loss is multiplied by ``scale`` before backward and the gradients divided by it before
    clipping. A non-finite gradient halves the scale and skips the update; ``growth_interval``
    good updates in a row double it.
    """

    scale: float = 65536.0
    good: int = 0
    growth_interval: int = 2000

    def after(self, finite: bool) -> None:
        """Adapt to an update whose gradients were finite or not."""
        if not finite:
            self.scale, self.good = max(self.scale / 2, 1.0), 0
            return
        self.good += 1
        if self.good == self.growth_interval:
            self.scale, self.good = min(self.scale * 2, 2.0**24), 0
