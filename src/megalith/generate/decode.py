"""Decoding: one token after the other, with or without a key-value cache.

Both ways feed the model the same window of tokens, so they give the same tokens. A text longer
than the model's ``context`` is seen through a window that moves in strides of half the context:
when the window is full its older half is dropped, and positions count anew from its start. That
is the same for learned and rotary positions, costs one pass over half the context per stride, and
depends on nothing but the tokens.
"""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalith.core import seeds
from megalith.core.errors import MegalithError
from megalith.data.tokenizers import Tokenizer
from megalith.generate.sampling import Sampling, next_token
from megalith.generate.stops import StopFilter
from megalith.models.decoder import Decoder, KeyValueCache


def generate(
    model: Decoder, tokenizer: Tokenizer, prompt: str, sampling: Sampling | None = None
) -> str:
    """The text with which ``model`` continues ``prompt``; see :func:`stream`."""
    return "".join(stream(model, tokenizer, prompt, sampling))


def stream(
    model: Decoder, tokenizer: Tokenizer, prompt: str, sampling: Sampling | None = None
) -> Iterator[str]:
    """The continuation of ``prompt`` in pieces of whole characters, each as soon as it is known.

    It ends at the tokenizer's end token, before a stop text, or after ``max_tokens``. The pieces
    depend on the arguments alone, not on torch's global random state.

    Args:
        model: in either mode; it computes in evaluation mode, and its mode returns at the end.
        prompt: not repeated in the pieces. An empty one stands for the beginning of a document.

    Raises:
        MegalithError: at once, if ``prompt`` is not valid text or model and tokenizer do not fit.
    """
    sampling = sampling or Sampling()
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise MegalithError(f"prompt: not valid text ({error.reason})") from error
    ids = tokenizer.encode(prompt) or [tokenizer.end]
    tokens = generate_tokens(model, ids, sampling, end=tokenizer.end, vocab=tokenizer.vocab)
    return _pieces(tokenizer, ids, tokens, sampling)


def generate_tokens(
    model: Decoder,
    tokens: Sequence[int],
    sampling: Sampling | None = None,
    *,
    end: int | None = None,
    vocab: int | None = None,
    use_cache: bool = True,
) -> Generator[int, None, None]:
    """Up to ``max_tokens`` ids that continue ``tokens``; stop texts play no part here.

    Args:
        model: see :func:`stream`.
        tokens: at least one id. Beyond the model's context only the last ones are seen, see the
            module's docstring.
        end: id at which to end; it is not given out.
        vocab: draw from ids below this; left out: from all that the model knows.
        use_cache: keep keys and values; false computes everything anew for each token.

    Raises:
        MegalithError: at once, if ``tokens`` is empty or holds an id that the model does not know.
    """
    known = model.head_weight.shape[0]
    if not tokens:
        raise MegalithError("generate: there is no token to start from")
    outside = next((token for token in tokens if not 0 <= token < known), None)
    if outside is not None:
        raise MegalithError(
            f"generate: token {outside} is outside of the model's vocabulary of {known}; "
            "is this the model's tokenizer?"
        )
    sampling = sampling or Sampling()
    return _tokens(model, [int(token) for token in tokens], sampling, end, vocab, use_cache)


def window_start(length: int, context: int) -> int:
    """The first of ``length`` tokens that a model with ``context`` positions sees.

    0 while they fit, then a multiple of half the context.
    """
    stride = max(context // 2, 1)
    return max(0, -(-(length - context) // stride)) * stride


def _tokens(
    model: Decoder,
    ids: list[int],
    sampling: Sampling,
    end: int | None,
    vocab: int | None,
    use_cache: bool,
) -> Generator[int, None, None]:
    generator = seeds.generator(sampling.seed, "generate")
    cache: KeyValueCache | None = None
    start = -1
    with _evaluating(model):
        for _ in range(sampling.max_tokens):
            first = window_start(len(ids), model.config.context)
            if use_cache and first != start:
                cache, start = KeyValueCache(len(model.blocks)), first
            fed = first + (cache.length if cache is not None else 0)
            logits = _next_logits(model, ids[fed:], cache)[:vocab]
            token = next_token(logits, ids, sampling, generator)
            if token == end:
                return
            ids.append(token)
            yield token


@torch.no_grad()
def _next_logits(model: Decoder, ids: list[int], cache: KeyValueCache | None) -> Tensor:
    """Logits ``[vocab]`` after ``ids``, which follow what ``cache`` holds."""
    tokens = torch.tensor([ids], device=model.head_weight.device)
    with _not_compiled():
        return model(tokens, cache=cache, head=_last_logits)


def _not_compiled() -> AbstractContextManager[object]:
    """Blocks that training compiled would be compiled anew for the cache's growing shapes."""
    if "torch._dynamo" not in sys.modules:
        return nullcontext()  # nothing can be compiled, and its import takes seconds
    return torch.compiler.set_stance("force_eager")


def _last_logits(hidden: Tensor, weight: Tensor) -> Tensor:
    return F.linear(hidden[0, -1], weight)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside; afterwards each module is in the mode in which it was."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _pieces(
    tokenizer: Tokenizer, prompt: list[int], tokens: Generator[int, None, None], sampling: Sampling
) -> Iterator[str]:
    text = tokenizer.stream()
    text.feed(prompt)  # some tokenizers write a token differently at the beginning of a text
    stops = StopFilter(sampling.stop)
    with closing(tokens):
        for token in tokens:
            piece = stops.feed(text.feed([token]))
            if piece:
                yield piece
            if stops.met:
                return
    rest = stops.feed(text.close()) + stops.close()
    if rest:
        yield rest
