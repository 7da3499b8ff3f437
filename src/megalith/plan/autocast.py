"""CUDA's autocast on the fake accelerator: which operators run in half precision, and its casts.

The lists are those of torch 2.13 (ATen/autocast_mode.h). A weight's cast is kept for the rest of
the autocast context, as CUDA keeps it, since that is memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

_LOWER = """
_convolution _convolution.deprecated addbmm addmm addmv addr baddbmm bmm chain_matmul conv1d conv2d
conv3d conv_tbc conv_transpose1d conv_transpose2d.input conv_transpose3d.input convolution einsum
linalg_multi_dot linalg_vecdot linear matmul mm mv prelu scaled_dot_product_attention
_scaled_dot_product_flash_attention
"""
_FLOAT = """
acos asin binary_cross_entropy_with_logits cdist cosh cosine_embedding_loss cosine_similarity dist
erfinv exp expm1 frobenius_norm.dim group_norm hinge_embedding_loss huber_loss kl_div l1_loss
layer_norm log log10 log1p log2 logsumexp margin_ranking_loss mse_loss multi_margin_loss
multilabel_margin_loss native_layer_norm nll_loss nll_loss2d nuclear_norm nuclear_norm.dim pdist
poisson_nll_loss pow.Scalar pow.Tensor_Scalar pow.Tensor_Tensor reciprocal renorm rms_norm rsqrt
sinh smooth_l1_loss soft_margin_loss softplus tan triplet_margin_loss upsample_bicubic2d
upsample_bilinear2d upsample_linear1d upsample_nearest1d upsample_nearest2d upsample_nearest3d
upsample_trilinear3d
"""
_FLOAT_RESULT = """
cumprod cumsum linalg_matrix_norm linalg_matrix_norm.str_ord linalg_vector_norm log_softmax.int prod
prod.dim_int softmax.int sum sum.dim_IntList
"""
_WIDEST = """
addcdiv addcmul atan2 bilinear cat cross dot grid_sampler index_put scatter_add stack tensordot vdot
"""

_libraries: list[torch.library.Library] = []
"""Held for the life of the process: torch drops the kernels of a library that is collected."""


def install(name: str) -> None:
    """Register autocast's kernels for the device type ``name``."""
    casts = Casts(name)
    everything = torch.library.Library("_", "IMPL", "AutocastPrivateUse1")
    everything.fallback(torch.library.fallthrough_kernel)
    library = torch.library.Library("aten", "IMPL", "AutocastPrivateUse1")
    for names, make in (
        (_LOWER, casts.lower),
        (_FLOAT, casts.wide),
        (_FLOAT_RESULT, casts.wide_result),
        (_WIDEST, casts.widest),
    ):
        for operator in _operators(names):
            library.impl(operator, make(operator))
    _libraries.extend((everything, library))
    clear = torch.clear_autocast_cache

    def clear_both() -> None:
        casts.kept.clear()
        clear()

    torch.clear_autocast_cache = clear_both


def _operators(names: str) -> Iterator[Any]:
    for name in names.split():
        packet, _, overload = name.partition(".")
        yield getattr(getattr(torch.ops.aten, packet), overload or "default")


class Casts:
    """The casts around an operator, and the weights that have been cast in this context."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.kept: dict[int, tuple[weakref.ref[Tensor], Tensor]] = {}

    def lower(self, operator: Any) -> Callable[..., Any]:
        """All inputs in autocast's dtype."""

        def run(*args: Any, **kwargs: Any) -> Any:
            with _outside():
                return self._call(operator, args, kwargs, torch.get_autocast_dtype(self.name))

        return run

    def wide(self, operator: Any) -> Callable[..., Any]:
        """All inputs in float32."""

        def run(*args: Any, **kwargs: Any) -> Any:
            with _outside():
                return self._call(operator, args, kwargs, torch.float32)

        return run

    def wide_result(self, operator: Any) -> Callable[..., Any]:
        """The result in float32, by the operator's own argument ``dtype``."""
        names = [argument.name for argument in operator._schema.arguments]
        place = names.index("dtype")

        def run(*args: Any, **kwargs: Any) -> Any:
            given = args[place] if place < len(args) else kwargs.get("dtype")
            half = self._ours(args[0]) and args[0].dtype in (torch.float16, torch.bfloat16)
            if half and given is None:
                if place < len(args):
                    args = (*args[:place], torch.float32, *args[place + 1 :])
                else:
                    kwargs = {**kwargs, "dtype": torch.float32}
            with _outside():
                return operator(*args, **kwargs)

        return run

    def widest(self, operator: Any) -> Callable[..., Any]:
        """Inputs of several dtypes in the widest of them."""

        def run(*args: Any, **kwargs: Any) -> Any:
            with _outside():
                found = {t.dtype for t in _tensors(args) if self._ours(t)}
                if len(found) < 2:
                    return operator(*args, **kwargs)
                widest = torch.float32 if torch.float32 in found else None
                dtype = widest or torch.get_autocast_dtype(self.name)
                return operator(*self._map(args, dtype), **kwargs)

        return run

    def _call(self, operator: Any, args: Any, kwargs: Any, dtype: torch.dtype) -> Any:
        return operator(
            *self._map(args, dtype), **{k: self._map(v, dtype) for k, v in kwargs.items()}
        )

    def _map(self, value: Any, dtype: torch.dtype) -> Any:
        if isinstance(value, Tensor):
            return self._cast(value, dtype)
        if isinstance(value, list | tuple):
            return type(value)(self._map(one, dtype) for one in value)
        return value

    def _cast(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        if not self._ours(tensor) or tensor.dtype == dtype:
            return tensor
        weight = tensor.requires_grad and tensor.is_leaf and not tensor._is_view()
        if not (weight and tensor.dtype == torch.float32 and torch.is_autocast_cache_enabled()):
            return tensor.to(dtype)
        known = self.kept.get(id(tensor))
        if known is None or known[0]() is not tensor:
            known = self.kept[id(tensor)] = (weakref.ref(tensor), tensor.to(dtype))
        return known[1]

    def _ours(self, value: Any) -> bool:
        return (
            isinstance(value, Tensor)
            and value.is_floating_point()
            and value.device.type == self.name
            and value.dtype != torch.float64
        )


def _outside() -> Any:
    """Inside it, operators do not come back to autocast."""
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)  # pyright: ignore
    return torch._C._ExcludeDispatchKeyGuard(keys)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _tensors(one)
