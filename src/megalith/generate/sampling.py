"""From logits to the next token: what may be drawn, and the draw.

The filters are pure functions of logits ``[..., vocab]``; what they exclude becomes ``-inf``. They
work in the order of ``transformers``: repetition penalty, temperature, top-k, top-p, min-p.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megalith.core.errors import MegalithError

COOLEST = 1e-3
"""The lowest temperature above 0; below it float32 logits could overflow."""


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn, and when to end.

    Attributes:
        max_tokens: the most tokens to generate.
        temperature: divides the logits; 0 takes the likeliest token (greedy), and then the filters
            after it have no effect.
        top_k: draw from this many likeliest tokens; ``None``: from all.
        top_p: draw from the fewest likeliest tokens that together have this probability.
        min_p: draw from tokens at least this share as likely as the likeliest.
        repetition_penalty: above 1 makes tokens of the prompt and the text so far less likely.
        stop: texts that end generation; none of them is part of the result.
        seed: of the draws.

    Raises:
        MegalithError: a value is out of its range.
    """

    max_tokens: int = 128
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        _need(_whole(self.max_tokens, 1), "max_tokens", "a whole number from 1", self.max_tokens)
        _need(
            _number(self.temperature) and (self.temperature == 0 or self.temperature >= COOLEST),
            "temperature",
            f"0 (the likeliest token) or a number from {COOLEST}",
            self.temperature,
        )
        _need(
            self.top_k is None or _whole(self.top_k, 1),
            "top_k",
            "a whole number from 1, or none",
            self.top_k,
        )
        _need(
            _number(self.top_p) and 0 < self.top_p <= 1,
            "top_p",
            "above 0 and at most 1",
            self.top_p,
        )
        _need(_number(self.min_p) and 0 <= self.min_p <= 1, "min_p", "from 0 to 1", self.min_p)
        _need(
            _number(self.repetition_penalty) and self.repetition_penalty > 0,
            "repetition_penalty",
            "a number above 0 (1: no penalty)",
            self.repetition_penalty,
        )
        texts = isinstance(self.stop, tuple | list) and all(
            isinstance(text, str) and text for text in self.stop
        )
        _need(texts, "stop", "a tuple of texts, none of them empty", self.stop)
        object.__setattr__(self, "stop", tuple(self.stop))
        _need(_whole(self.seed, 0), "seed", "a whole number from 0", self.seed)


def next_token(
    logits: Tensor, seen: Sequence[int], sampling: Sampling, generator: torch.Generator
) -> int:
    """The id that follows: filtered as ``sampling`` says, then the likeliest or a random one.

    Args:
        logits: ``[vocab]``, any floating dtype and device; the draw is made on the host.
        seen: ids of the prompt and of what was generated so far.
        generator: on the CPU; untouched at temperature 0.

    Raises:
        MegalithError: the logits are not finite numbers.
    """
    logits = logits.detach().to("cpu", torch.promote_types(logits.dtype, torch.float32))
    if not math.isfinite(logits.max()):  # the maximum of anything with NaN is NaN
        raise MegalithError("generate: the model's logits are not finite; its weights are damaged")
    logits = filtered(logits, seen, sampling)
    if sampling.temperature == 0:
        return int(logits.argmax())
    return int(torch.multinomial(logits.softmax(-1), 1, generator=generator))


def filtered(logits: Tensor, seen: Sequence[int], sampling: Sampling) -> Tensor:
    """Logits ``[..., vocab]`` after all filters that ``sampling`` asks for, in their order."""
    if sampling.repetition_penalty != 1 and seen:
        logits = penalize_repetition(logits, torch.tensor(seen), sampling.repetition_penalty)
    if sampling.temperature == 0:
        return logits
    logits = heat(logits, sampling.temperature)
    if sampling.top_k is not None:
        logits = keep_top_k(logits, sampling.top_k)
    if sampling.top_p < 1:
        logits = keep_top_p(logits, sampling.top_p)
    if sampling.min_p > 0:
        logits = keep_min_p(logits, sampling.min_p)
    return logits


def penalize_repetition(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Make tokens that have occurred less likely (Keskar et al. 2019, CTRL, section 4.1).

    The paper divides their logits by ``penalty``. That would make a negative logit likelier, so
    those are multiplied by it. How often a token has occurred makes no difference.

    Args:
        seen: int64 ids, ``[count]``, the same for all of ``logits``; repeats allowed.
    """
    found = logits[..., seen]
    changed = torch.where(found < 0, found * penalty, found / penalty)
    penalized = logits.clone()
    penalized[..., seen] = changed
    return penalized


def heat(logits: Tensor, temperature: float) -> Tensor:
    """Divide by ``temperature`` (Ackley et al. 1985): above 1 flattens, below 1 sharpens."""
    return logits / temperature


def keep_top_k(logits: Tensor, count: int) -> Tensor:
    """Keep the ``count`` likeliest (Fan et al. 2018, section 5.1); ties with the last stay too."""
    least = logits.topk(min(count, logits.shape[-1]), dim=-1).values[..., -1:]
    return logits.masked_fill(logits < least, -math.inf)


def keep_top_p(logits: Tensor, share: float) -> Tensor:
    """Keep the nucleus (Holtzman et al. 2020, section 3.1).

    The fewest likeliest tokens whose probabilities sum to ``share`` or more; at least one.
    """
    ordered, order = logits.sort(dim=-1, descending=True)
    probability = ordered.softmax(-1)
    before = probability.cumsum(-1) - probability
    outside = before >= share
    outside[..., 0] = False
    return logits.masked_fill(outside.scatter(-1, order, outside), -math.inf)


def keep_min_p(logits: Tensor, share: float) -> Tensor:
    """Keep tokens at least ``share`` times as likely as the likeliest (Nguyen et al. 2024)."""
    least = logits.amax(-1, keepdim=True) + math.log(share)
    return logits.masked_fill(logits < least, -math.inf)


def _need(holds: bool, name: str, what: str, value: object) -> None:
    if not holds:
        raise MegalithError(f"{name}: must be {what}, not {value!r}")


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
