"""The decoder, whole: GPT-2/3, Llama, Mistral and Qwen are settings of this one model.

It knows nothing of ranks, data or tasks. Everything that depends on the sequence's length, such as
rotary tables and masks, is computed once in :meth:`Decoder.forward` and handed to the blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar, cast, overload

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalith.core.errors import MegalithError, RecipeError
from megalith.models.decoder.attention import core
from megalith.models.decoder.cache import KeyValueCache, LayerCache
from megalith.models.decoder.moe import MoE, mixtures, total
from megalith.models.decoder.sharding import TENSOR
from megalith.models.layers import Absent, FeedForward, RMSNorm, norm, rotary_tables, rotate
from megalith.recipe.families import DecoderConfig

T = TypeVar("T")


class Attention(nn.Module):
    """Causal self-attention with grouped key and value heads (Ainslie et al. 2023).

    Query, key and value are three matrices: one fused matrix was measured no faster on CPU, and
    three are what checkpoints hold and what tensor parallelism splits by heads.
    """

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        width, inner = config.width, config.heads * config.head_dim
        inner_kv = config.kv_heads * config.head_dim
        self.head_dim = config.head_dim
        self.dropout = config.dropout
        self.query = nn.Linear(width, inner, bias=config.qkv_bias)
        self.key = nn.Linear(width, inner_kv, bias=config.qkv_bias)
        self.value = nn.Linear(width, inner_kv, bias=config.qkv_bias)
        self.output = nn.Linear(inner, width, bias=config.output_bias)
        self.query_norm = self.key_norm = None
        if config.qk_norm:
            self.query_norm = RMSNorm(config.head_dim, eps=config.norm_eps)
            self.key_norm = RMSNorm(config.head_dim, eps=config.norm_eps)
        self.core = core(config, layer)

    def forward(
        self,
        hidden: Tensor,
        cos: Tensor | None,
        sin: Tensor | None,
        mask: Tensor | None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """``[batch, seq, width]`` to the same; the other arguments are :meth:`Block.forward`'s."""
        query, key, value = self.query(hidden), self.key(hidden), self.value(hidden)
        # The number of heads is not named: under tensor parallelism a rank has a part of them.
        query = query.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        key = key.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        value = value.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        if cos is not None and sin is not None:
            query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        if cache is not None:
            key, value = cache.extend(key, value)
        causal = False
        if mask is None and query.shape[2] > 1:
            causal = True  # by a branch: compiled with an open length, the comparison is symbolic
        dropout = self.dropout if self.training else 0.0
        mixed = self.core(query, key, value, mask=mask, causal=causal, dropout=dropout)
        return self.output(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and feed-forward, each normalised before and added to the residual stream.

    Attributes:
        window: how many tokens back this block sees, itself included; ``None``: all.
    """

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        self.window = config.window if layer >= config.window_from else None
        self.dropout = config.dropout
        self.attention_norm = norm(config.norm, config.width, config.norm_eps)
        self.attention = Attention(config, layer)
        self.mlp_norm = norm(config.norm, config.width, config.norm_eps)
        if config.experts and layer >= config.dense_layers:
            self.mlp = MoE(config)
        else:
            self.mlp = FeedForward(config.width, config.hidden, config.activation, config.mlp_bias)

    def forward(
        self,
        hidden: Tensor,
        cos: Tensor | None,
        sin: Tensor | None,
        mask: Tensor | None,
        cache: LayerCache | None = None,
    ) -> Tensor | tuple[Tensor, Tensor | None, Tensor]:
        """Run the block.

        Args:
            hidden: ``[batch, seq, width]``.
            cos: rotary table ``[batch or 1, 1, seq, head_dim / 2]``, float32 or float64; or None.
            sin: like ``cos``.
            mask: bool ``[batch or 1, 1, seq, keys]``, True where a query may look; or None: causal.
            cache: this block's part of a :class:`KeyValueCache`.

        Returns:
            ``[batch, seq, width]``; with experts and in training, the balance loss and the load
            of :meth:`MoE.forward` besides.
        """
        mixed = self.attention(self.attention_norm(hidden), cos, sin, mask, cache)
        hidden = hidden + F.dropout(mixed, self.dropout, self.training)
        mixed = self.mlp(self.mlp_norm(hidden))
        if isinstance(mixed, tuple):
            mixed, balance, load = mixed
            hidden = hidden + F.dropout(mixed, self.dropout, self.training)
            return (hidden, balance, load) if self.training else hidden
        return hidden + F.dropout(mixed, self.dropout, self.training)


class Decoder(nn.Module):
    """A causal language model.

    A tied head is no second parameter: ``head`` is then ``None`` and :attr:`head_weight` is the
    embedding's, so that nothing (sharding, saving, quantising) can untie the two.

    Attributes:
        balance: in training, the sum of the last forward's balance losses, with its graph; or
            ``None``: evaluation, or nothing to balance.
        mask: what builds attention masks, :func:`attention_mask`; a layout may put its own here.
        project: what makes logits of hidden states and the head's weight, likewise.

    Raises:
        RecipeError: ``config.vocab`` is not known yet, or ``model.attention`` is not usable.
    """

    units = ("blocks.*",)
    split = TENSOR

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        if config.vocab is None:
            raise RecipeError("model.vocab: is needed here, there is no tokenizer that gives it")
        self.config = config
        self.embedding = nn.Embedding(config.vocab, config.width)
        learned = config.positions == "learned"
        self.positions = nn.Embedding(config.context, config.width) if learned else None
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.layers))
        self.norm = norm(config.norm, config.width, config.norm_eps)
        self.head = None if config.tied else nn.Linear(config.width, config.vocab, bias=False)
        self.balance: Tensor | None = None
        self.mask = attention_mask
        self.project: Callable[[Tensor, Tensor], Tensor] = F.linear

    @property
    def head_weight(self) -> Tensor:
        """The matrix that turns hidden states into logits, ``[vocab, width]``."""
        return self.embedding.weight if self.head is None else self.head.weight

    @overload
    def forward(
        self,
        tokens: Tensor,
        *,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        cache: KeyValueCache | None = None,
        hidden: Tensor | None = None,
        head: None = None,
    ) -> Tensor: ...

    @overload
    def forward(
        self,
        tokens: Tensor,
        *,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        cache: KeyValueCache | None = None,
        hidden: Tensor | None = None,
        head: Callable[[Tensor, Tensor], T],
    ) -> T: ...

    def forward(
        self,
        tokens: Tensor,
        *,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        cache: KeyValueCache | None = None,
        hidden: Tensor | None = None,
        head: Callable[[Tensor, Tensor], T] | None = None,
    ) -> Tensor | T:
        """Logits of the next token at every place.

        Args:
            tokens: int64 ``[batch, seq]``.
            positions: int64 ``[batch, seq]``; left out: 0, 1, 2 ..., after the cache's tokens.
            documents: int64 ``[batch, seq]``; a token sees only earlier tokens of the same id.
            cache: see :mod:`megalith.models.decoder.cache`; filled by this call. With ``dynamic``
                rotary scaling past the context, keys keep the rotation they were stored with.
            hidden: ``[batch, seq, width]``, what the first blocks returned if they are elsewhere.
            head: ``f(hidden, weight)``, called in place of ``hidden @ weight.T`` with
                ``[batch, seq, width]`` and ``[vocab, width]``: a loss in chunks, or the last
                token's logits alone, without logits of the whole sequence.

        Returns:
            Logits ``[batch, seq, vocab]``, or what ``head`` returns; where the last blocks are
            elsewhere, the hidden states that they take.

        Raises:
            MegalithError: more tokens than learned positions; documents given to some calls only.
        """
        past = 0 if cache is None else cache.length
        seq = tokens.shape[1]
        if self.positions is not None and positions is None and past + seq > self.config.context:
            raise MegalithError(
                f"{past + seq} tokens are more than the model's {self.config.context} positions "
                "(model.context)"
            )
        if positions is None:
            positions = torch.arange(past, past + seq, device=tokens.device)[None]
        states = self._embed(tokens, positions) if hidden is None else hidden
        cos = sin = None
        if self.positions is None:
            cos, sin = self._rotary(positions, states.dtype)

        if cache is not None:
            if past and (documents is None) != (cache.documents is None):
                raise MegalithError("documents must be given to every call with a cache or to none")
            cache.advance(seq, documents)
        seen = documents if cache is None else cache.documents
        blocks = {i: cast(Block, b) for i, b in enumerate(self.blocks) if not isinstance(b, Absent)}
        masks = {
            window: self.mask(seq, past, window, documents, seen, tokens.device)
            for window in dict.fromkeys(block.window for block in blocks.values())
        }
        balances: list[Tensor | None] = []
        for index, block in blocks.items():
            layer = None if cache is None else cache.layers[index]
            if layer is not None:
                layer.window = block.window
            made = block(states, cos, sin, masks[block.window], layer)
            if isinstance(made, tuple):
                made, balance, load = made
                balances.append(balance)
                cast(MoE, block.mlp).observe(load)
            states = cast(Tensor, made)
        self.balance = total(balances)
        if isinstance(self.norm, Absent):
            return states
        states = self.norm(states)
        if head is not None:
            return head(states, self.head_weight)
        return self.project(states, self.head_weight)

    def init_weight(self, name: str, tensor: Tensor, generator: torch.Generator) -> None:
        """Fill ``tensor`` in place with the initial value of the parameter ``name``.

        Normal with ``init_std``; the two matrices that write to the residual stream are smaller by
        ``sqrt(2 * layers)``, so that its variance does not grow with depth (Radford et al. 2019,
        GPT-2, section 2.3). Norms start as ones, biases as zeros.
        """
        owner, _, rest = name.partition(".attention.core.")
        if rest:
            own = getattr(self.get_submodule(f"{owner}.attention.core"), "init_weight", None)
            if own is not None:
                own(rest, tensor, generator)
                return
        if name.endswith("bias"):
            tensor.zero_()
        elif tensor.ndim < 2:
            tensor.fill_(1.0)
        else:
            std = self.config.init_std
            if name.endswith(("attention.output.weight", "down.weight", "experts.down")):
                std /= math.sqrt(2 * self.config.layers)
            tensor.normal_(0.0, std, generator=generator)

    def init_buffers(self) -> None:
        """No expert is preferred."""
        for part in mixtures(self):
            if part.bias is not None:
                part.bias.zero_()

    def _embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        if self.positions is not None:
            hidden = hidden + self.positions(positions)
        return F.dropout(hidden, self.config.dropout, self.training)

    def _rotary(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        config = self.config
        wide = torch.promote_types(dtype, torch.float32)
        return rotary_tables(
            positions,
            config.head_dim,
            config.rope_theta,
            config.rope_scaling,
            config.context,
            wide,
        )


def attention_mask(
    seq: int,
    past: int,
    window: int | None,
    documents: Tensor | None,
    seen: Tensor | None,
    device: torch.device,
) -> Tensor | None:
    """Where each of ``seq`` new tokens may look, or ``None`` where plain causality says it all.

    Args:
        past: tokens before the new ones. A block with a window has kept ``window - 1`` of them.
        documents: ids of the new tokens, ``[batch, seq]``.
        seen: ids of all tokens, ``[batch, past + seq]``.

    Returns:
        bool ``[batch or 1, 1, seq, keys]``, True where a query may look.
    """
    kept = past if window is None else min(past, window - 1)
    if documents is None and (seq == 1 or (kept == 0 and (window is None or seq <= window))):
        return None
    query = torch.arange(kept, kept + seq, device=device)[:, None]
    key = torch.arange(kept + seq, device=device)
    mask = key <= query
    if window is not None:
        mask = mask & (key > query - window)
    mask = mask[None, None]
    if documents is not None and seen is not None:
        same = documents[:, :, None] == seen[:, None, seen.shape[1] - kept - seq :]
        mask = mask & same[:, None]
    return mask
