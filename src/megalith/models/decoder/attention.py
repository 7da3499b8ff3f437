"""Attention cores: what happens between the projections. ``model.attention`` picks one.

A core of the user's own is an ``nn.Module`` class with this interface::

    class Mine(nn.Module):
        def __init__(self, config: DecoderConfig, layer: int) -> None: ...

        def forward(self, query, key, value, mask, causal, dropout) -> Tensor: ...

Args of ``forward``:
    query: ``[batch, heads, queries, head_dim]``, rotated.
    key: ``[batch, kv_heads, keys, head_dim]``; query head ``h`` belongs to key head
        ``h // (heads // kv_heads)``.
    value: like ``key``.
    mask: bool ``[batch or 1, 1, queries, keys]``, True where a query may look; or ``None``.
    causal: query ``i`` sees keys up to ``i``; only with ``mask=None`` and as many queries as keys.
        With ``mask=None`` and ``causal=False`` every query sees every key.
    dropout: probability that a weight is dropped; 0 outside training.

It returns ``[batch, heads, queries, head_dim]``. Its parameters, if any, are filled by its own
``init_weight(name, tensor, generator)``, or like the decoder's where it has none.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalith.core import imports
from megalith.core.errors import RecipeError
from megalith.recipe.families import DecoderConfig


class Sdpa(nn.Module):
    """``F.scaled_dot_product_attention``: the fastest kernel the device has."""

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        causal: bool,
        dropout: float,
    ) -> Tensor:
        """See the module's docstring."""
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            dropout_p=dropout,
            is_causal=causal,
            enable_gqa=query.shape[1] != key.shape[1],
        )


class Reference(nn.Module):
    """Scale, scores, softmax, weighted sum (Vaswani et al. 2017, equation 1), in the open.

    Memory grows with the square of the sequence. Scores and softmax are float32 whatever autocast
    says, or float64 in a float64 model.
    """

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        causal: bool,
        dropout: float,
    ) -> Tensor:
        """See the module's docstring."""
        wide = torch.promote_types(query.dtype, torch.float32)
        with torch.autocast(query.device.type, enabled=False):
            query = query.unflatten(1, (key.shape[1], -1))  # [batch, kv_heads, group, queries, dim]
            scores = torch.einsum("bhgqd,bhkd->bhgqk", query.to(wide), key.to(wide))
            scores = scores / math.sqrt(query.shape[-1])
            if causal:
                mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
            elif mask is not None:
                mask = mask.unsqueeze(1)
            if mask is not None:
                scores = scores.masked_fill(~mask, -math.inf)
            weights = torch.softmax(scores, dim=-1).to(value.dtype)
            if dropout:
                weights = F.dropout(weights, dropout)
            return torch.einsum("bhgqk,bhkd->bhgqd", weights, value).flatten(1, 2)


def core(config: DecoderConfig, layer: int) -> nn.Module:
    """The attention core that ``config.attention`` names, for block ``layer``.

    Raises:
        RecipeError: ``model.attention`` names no class, or one that is not an ``nn.Module``.
    """
    own = {"sdpa": Sdpa, "reference": Reference}
    kind = own.get(config.attention) or imports.resolve(config.attention, "model.attention")
    try:
        made = kind(config, layer)
    except TypeError as error:
        raise RecipeError(
            f"model.attention: '{config.attention}' cannot be made from (config, layer): {error}"
        ) from error
    if not isinstance(made, nn.Module):
        raise RecipeError(f"model.attention: '{config.attention}' is not an nn.Module class")
    return made
