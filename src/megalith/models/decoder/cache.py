"""Keys and values of the tokens that a decoder has seen, so that generation need not redo them.

Use::

    cache = KeyValueCache(len(model.blocks))
    logits = model(prompt, cache=cache)        # [batch, seq, vocab]; cache.length == seq
    logits = model(next_token, cache=cache)    # [batch, 1, vocab]; cache.length == seq + 1

Rows of unequal length are padded on the left: give the padding a document id of its own and
explicit ``positions`` that start at each row's first token; later calls give the row's document id
again, ``documents`` being either given to every call or to none.
"""

from __future__ import annotations

import torch
from torch import Tensor


class LayerCache:
    """One block's keys and values, in tensors with room to grow.

    With a sliding window only the last ``window - 1`` tokens are kept: nobody looks further.
    """

    def __init__(self) -> None:
        self.window: int | None = None
        self._key: Tensor | None = None
        self._value: Tensor | None = None
        self._used = 0

    def extend(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append ``[batch, kv_heads, seq, head_dim]``; what the new queries see, oldest first."""
        new = key.shape[2]
        kept = self._used if self.window is None else min(self._used, self.window - 1)
        if self._key is None or self._value is None or self._used + new > self._key.shape[2]:
            self._key = _room(self._key, key, self._used, kept, new)
            self._value = _room(self._value, value, self._used, kept, new)
            self._used = kept
        start, end = self._used - kept, self._used + new
        self._key[:, :, self._used : end] = key
        self._value[:, :, self._used : end] = value
        self._used = end
        return self._key[:, :, start:end], self._value[:, :, start:end]


class KeyValueCache:
    """What a decoder remembers between calls. Without gradients; not for training.

    Attributes:
        length: tokens seen so far in each row, padding included. The next token's default position.
        documents: their document ids, int64 ``[batch, length]``, where the calls gave any.
        layers: one :class:`LayerCache` per block.
    """

    def __init__(self, layers: int) -> None:
        self.length = 0
        self.documents: Tensor | None = None
        self.layers = [LayerCache() for _ in range(layers)]

    def advance(self, seq: int, documents: Tensor | None) -> None:
        """Note that ``seq`` tokens were seen; the decoder calls this once per forward."""
        if documents is not None:
            old = [] if self.documents is None else [self.documents]
            self.documents = torch.cat([*old, documents], dim=1)
        self.length += seq


def _room(old: Tensor | None, like: Tensor, used: int, kept: int, new: int) -> Tensor:
    """A tensor with the last ``kept`` of ``used`` tokens and room for twice what is needed now."""
    batch, heads, _, head_dim = like.shape
    # Doubling keeps the copying linear in the number of tokens; a small floor spares short prompts.
    capacity = max(2 * (kept + new), 64)
    fresh = like.new_empty(batch, heads, capacity, head_dim)
    if old is not None:
        fresh[:, :, :kept] = old[:, :, used - kept : used]
    return fresh
