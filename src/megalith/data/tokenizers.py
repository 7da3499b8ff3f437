"""Text to token ids and back: bytes, a ``tokenizers`` file, or a byte-level BPE of our own.

Tokenizers for text in streams: encoding goes in batches, decoding can go token by token without
ever splitting a character. A special token's text inside a document is encoded as ordinary text, so
a document cannot end another one.
"""

from __future__ import annotations

import codecs
import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import tokenizers as library
from numpy.typing import NDArray
from tokenizers import decoders, models, pre_tokenizers, trainers

from megalith.core.errors import DataError

END = "<|endoftext|>"
"""The end-of-document token of tokenizers that we make."""

SMALLEST = 257
"""Bytes and the end token: a byte-level BPE cannot have fewer tokens."""

_ENDS = (END, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "<|end▁of▁sentence|>", "[SEP]")


class TextStream(Protocol):
    """Incremental decoding."""

    def feed(self, ids: Iterable[int]) -> str:
        """The text that is complete after ``ids``: whole characters only, possibly none."""
        ...

    def close(self) -> str:
        """What is left; an unfinished character becomes U+FFFD."""
        ...


class Tokenizer(Protocol):
    """What Megalith asks of a tokenizer.

    Attributes:
        name: for reports.
        vocab: number of ids.
        end: id of the end-of-document token.
        token_bytes: [vocab] int64, UTF-8 bytes that each token stands for; 0 for special tokens.
    """

    name: str
    vocab: int
    end: int
    token_bytes: NDArray[np.int64]

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.unsignedinteger[Any]]]:
        """Ids of each text, no special tokens added."""
        ...

    def encode(self, text: str) -> list[int]:
        """Ids of one text, no special tokens added."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """The text; special tokens and ids beyond the vocabulary stand for none."""
        ...

    def stream(self) -> TextStream:
        """A new incremental decoder."""
        ...

    def to_json(self) -> str:
        """The tokenizer as a file of the ``tokenizers`` library; :func:`parse` reads it."""
        ...


class _ByteStream:
    """Bytes of tokens through an incremental UTF-8 decoder."""

    def __init__(self, table: Sequence[bytes]):
        self._table = table
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, ids: Iterable[int]) -> str:
        return self._decoder.decode(_join(self._table, ids))

    def close(self) -> str:
        return self._decoder.decode(b"", True)


def _join(table: Sequence[bytes], ids: Iterable[int]) -> bytes:
    return b"".join(table[i] for i in map(int, ids) if i < len(table))


class ByteTokenizer:
    """One token per UTF-8 byte, and the end token."""

    name = "bytes"
    vocab = SMALLEST
    end = 256

    def __init__(self) -> None:
        self.token_bytes = np.ones(self.vocab, np.int64)
        self.token_bytes[self.end] = 0
        self._table = [bytes([i]) for i in range(256)] + [b""]

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.unsignedinteger[Any]]]:
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Iterable[int]) -> str:
        return _join(self._table, ids).decode("utf-8", "replace")

    def stream(self) -> TextStream:
        return _ByteStream(self._table)

    def to_json(self) -> str:
        vocabulary = {letter: byte for byte, letter in enumerate(_letters())}
        made = _byte_level(models.BPE(vocab=vocabulary, merges=[]))
        made.add_special_tokens([END])
        return made.to_str()


class LibraryTokenizer:
    """A tokenizer of the ``tokenizers`` library."""

    def __init__(self, made: library.Tokenizer, name: str):
        self.name = name
        made.no_padding()
        made.no_truncation()
        made.encode_special_tokens = True
        known = made.get_vocab(with_added_tokens=True)
        end = next((token for token in _ENDS if token in known), None)
        if end is None:
            made.add_special_tokens([END])
            known, end = made.get_vocab(with_added_tokens=True), END
        self.end = known[end]
        self.vocab = max(known.values()) + 1
        self._made = made
        self._byte_level = "ByteLevel" in _kinds(json.loads(made.to_str()).get("decoder"))
        self._table = _token_table(made, known, self._byte_level)
        self.token_bytes = np.array([len(piece) for piece in self._table], np.int64)
        if self.token_bytes[self.end]:  # an end token that the file does not mark as special
            self._table[self.end] = b""
            self.token_bytes[self.end] = 0

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.unsignedinteger[Any]]]:
        found = self._made.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, np.uint32) for encoding in found]

    def encode(self, text: str) -> list[int]:
        return self._made.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Iterable[int]) -> str:
        if self._byte_level:
            return _join(self._table, ids).decode("utf-8", "replace")
        return self._made.decode([int(i) for i in ids if i != self.end and i < self.vocab])

    def stream(self) -> TextStream:
        if self._byte_level:
            return _ByteStream(self._table)
        return _LibraryStream(self, self._made)

    def to_json(self) -> str:
        return self._made.to_str()


class _LibraryStream:
    """Incremental decoding of tokenizers whose tokens are not plain bytes."""

    def __init__(self, tokenizer: LibraryTokenizer, made: library.Tokenizer):
        self._tokenizer, self._made = tokenizer, made
        self._decoder = decoders.DecodeStream(skip_special_tokens=True)
        self._ids: list[int] = []
        self._given = ""

    def feed(self, ids: Iterable[int]) -> str:
        fresh = [int(i) for i in ids if i != self._tokenizer.end and i < self._tokenizer.vocab]
        self._ids += fresh
        text = "".join(self._decoder.step(self._made, i) or "" for i in fresh)
        self._given += text
        return text

    def close(self) -> str:
        return self._tokenizer.decode(self._ids).removeprefix(self._given)


def train_bpe(texts: Iterable[str], vocab: int) -> LibraryTokenizer:
    """A byte-level BPE (Sennrich et al. 2016; on bytes: Radford et al. 2019), GPT-2's word rule.

    The same texts give the same tokenizer, whatever their order and the number of threads. Texts
    with too few different pairs give fewer than ``vocab`` tokens.

    Args:
        texts: read once, as a stream.
        vocab: number of tokens, the end token (id 0) and the 256 bytes among them.
    """
    made = _byte_level(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(_batches(texts), trainer)
    return LibraryTokenizer(made, f"bpe-{vocab}")


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    batch, size = [], 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= 1 << 22:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def bpe_size(name: str) -> int | None:
    """``N`` of the tokenizer name ``bpe-N``; ``None`` for any other name."""
    prefix, _, number = name.partition("-")
    return int(number) if prefix == "bpe" and number.isdecimal() else None


def parse(text: str, name: str) -> Tokenizer:
    """The tokenizer in a file of the ``tokenizers`` library.

    An end token is looked for under its usual names, and added if there is none.

    Args:
        text: the file's JSON.
        name: for messages and reports.

    Raises:
        DataError: ``text`` is no such file.
    """
    try:
        made = library.Tokenizer.from_str(text)
        model = json.loads(text)["model"]
    except Exception as error:  # the library raises plain Exception
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(f"{name}: not a tokenizers JSON file ({reason})") from error
    if model.get("merges") == [] and list(model["vocab"]) == _letters():
        return ByteTokenizer()
    return LibraryTokenizer(made, name)


def load(path: str | Path, name: str | None = None) -> Tokenizer:
    """:func:`parse` the file at ``path``.

    Raises:
        DataError: it cannot be read or is no tokenizer.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot read the tokenizer ({error})") from error
    return parse(text, name or str(path))


def tokenizer_hash(tokenizer: Tokenizer) -> str:
    """SHA-256 of everything that decides a tokenizer's ids, in hex."""
    return hashlib.sha256(tokenizer.to_json().encode()).hexdigest()


def _byte_level(model: models.Model) -> library.Tokenizer:
    made = library.Tokenizer(model)
    # The library types these two attributes as read-only; its own guide sets them.
    setattr(made, "pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=False))  # noqa: B010
    setattr(made, "decoder", decoders.ByteLevel())  # noqa: B010
    return made


def _letters() -> list[str]:
    """The printable character that byte-level tokenizers write for each of the 256 bytes.

    Bytes that are printable in Latin-1 stand for themselves, the others are numbered from U+0100
    (the rule of GPT-2's encoder).
    """
    itself = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in itself else next(others)) for byte in range(256)]


def _kinds(decoder: Any) -> set[str]:
    if not decoder:
        return set()
    return {decoder["type"]}.union(*(_kinds(part) for part in decoder.get("decoders", [])))


def _token_table(made: library.Tokenizer, known: dict[str, int], byte_level: bool) -> list[bytes]:
    """The bytes of every id. Exact for byte-level tokenizers, near for the others."""
    table = [b""] * (max(known.values()) + 1)
    byte_of = {letter: byte for byte, letter in enumerate(_letters())}
    for token, index in known.items():
        if byte_level and all(letter in byte_of for letter in token):
            table[index] = bytes(byte_of[letter] for letter in token)
        elif len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            table[index] = bytes([int(token[3:5], 16)])
        else:
            table[index] = token.removeprefix("##").replace("▁", " ").encode()
    for index, added in made.get_added_tokens_decoder().items():
        table[index] = b"" if added.special else added.content.encode()
    return table
