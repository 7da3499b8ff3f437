"""Tokenizers: exact round trips, exact byte counts, streams that never break a character."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer as LibraryFile
from tokenizers import decoders, models, pre_tokenizers, trainers

from megalith.core.errors import DataError
from megalith.data import tokenizers
from megalith.data.tokenizers import ByteTokenizer, Tokenizer

TEXTS = [
    "",
    "def f(x):\n    return x  # comment\n\n\n",
    "  leading, trailing and\t tabs \r\n",
    "Grüße, Ελληνικά, 日本語, עברית, नमस्ते",
    "emoji 😀👩‍👩‍👧‍👦🏳️‍🌈 and \U0010ffff",
    "a special token's text <|endoftext|> is text like any other",
    "\x00\x01\x7f\x85\u2028\ufeff\ufffd",
]


def corpus() -> list[str]:
    words = random.Random(0)
    letters = "abcdeéß漢😀 "
    return ["".join(words.choices(letters, k=300)) for _ in range(50)] + TEXTS


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    folder = tmp_path_factory.mktemp("tokenizers")
    trained = tokenizers.train_bpe(corpus(), 400)
    (folder / "file.json").write_text(trained.to_json(), encoding="utf-8")
    return {
        "bytes": ByteTokenizer(),
        "bpe": trained,
        "file": tokenizers.load(folder / "file.json"),
    }


KINDS = ["bytes", "bpe", "file"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", TEXTS)
def test_round_trip_is_exact(everything: dict[str, Tokenizer], kind: str, text: str) -> None:
    tokenizer = everything[kind]
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.end not in ids
    (batched,) = tokenizer.encode_batch([text])
    assert batched.tolist() == ids


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", TEXTS)
def test_token_bytes_add_up_to_the_text(
    everything: dict[str, Tokenizer], kind: str, text: str
) -> None:
    tokenizer = everything[kind]
    ids = np.array([*tokenizer.encode(text), tokenizer.end])
    assert tokenizer.token_bytes.shape == (tokenizer.vocab,)
    assert tokenizer.token_bytes[ids].sum() == len(text.encode())
    assert tokenizer.token_bytes[tokenizer.end] == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_gives_whole_characters_only(everything: dict[str, Tokenizer], kind: str) -> None:
    tokenizer = everything[kind]
    for text in TEXTS:
        stream = tokenizer.stream()
        given = ""
        for token in [*tokenizer.encode(text), tokenizer.end]:
            given += stream.feed([token])
            assert text.startswith(given)
        assert stream.close() == ""
        assert given == text


@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_of_nonsense_equals_its_decoding(
    everything: dict[str, Tokenizer], kind: str
) -> None:
    tokenizer = everything[kind]
    for seed in range(20):
        ids = np.random.default_rng(seed).integers(0, tokenizer.vocab + 5, 60).tolist()
        stream = tokenizer.stream()
        given = "".join(stream.feed([token]) for token in ids) + stream.close()
        assert given == tokenizer.decode(ids)


def test_bpe_merges_what_is_frequent_and_has_the_size_asked_for() -> None:
    tokenizer = tokenizers.train_bpe(["the cat the dog the end "] * 50 + corpus(), 400)
    assert tokenizer.vocab == 400
    assert len(tokenizer.encode(" the the the")) == 3
    assert len(tokenizer.encode("日本")) == 6  # never seen: bytes


def test_training_is_deterministic_over_processes_threads_and_order() -> None:
    script = (
        "import sys; sys.path.insert(0, sys.argv[1]); import test_tokenizers as t; "
        "from megalith.data import tokenizers as m; "
        "texts = t.corpus(); texts = texts[::-1] if sys.argv[2] == 'back' else texts; "
        "print(m.tokenizer_hash(m.train_bpe(texts, 400)))"
    )
    here = str(Path(__file__).parent)
    started = [
        subprocess.Popen(
            [sys.executable, "-c", script, here, order],
            env={**os.environ, "RAYON_NUM_THREADS": threads},
            stdout=subprocess.PIPE,
            text=True,
        )
        for order, threads in (("forth", "1"), ("back", "4"))
    ]
    found = {process.communicate()[0].strip() for process in started}
    assert found == {tokenizers.tokenizer_hash(tokenizers.train_bpe(corpus(), 400))}


@pytest.mark.parametrize("kind", KINDS)
def test_a_tokenizer_survives_its_file(everything: dict[str, Tokenizer], kind: str) -> None:
    tokenizer = everything[kind]
    again = tokenizers.parse(tokenizer.to_json(), "again")
    assert type(again) is type(tokenizer)
    assert tokenizers.tokenizer_hash(again) == tokenizers.tokenizer_hash(tokenizer)
    library = LibraryFile.from_str(tokenizer.to_json())
    for text in TEXTS[:5]:
        assert again.encode(text) == tokenizer.encode(text)
        assert library.encode(text, add_special_tokens=False).ids == tokenizer.encode(text)
    assert library.id_to_token(tokenizer.end) == tokenizers.END


def test_files_that_are_not_byte_level_work_too(tmp_path: Path) -> None:
    made = LibraryFile(models.BPE(byte_fallback=True, unk_token="<unk>"))
    setattr(made, "pre_tokenizer", pre_tokenizers.Metaspace())  # noqa: B010
    pieces = [decoders.ByteFallback(), decoders.Metaspace()]
    setattr(made, "decoder", decoders.Sequence(pieces))  # noqa: B010
    fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<unk>", "</s>", *fallback], show_progress=False
    )
    made.train_from_iterator(["plain words and more words"] * 20, trainer)
    made.save(str(tmp_path / "t.json"))
    tokenizer = tokenizers.load(tmp_path / "t.json")
    assert tokenizer.end == made.token_to_id("</s>")
    text = "more words and plain words"
    ids = tokenizer.encode(text)
    assert tokenizer.decode([*ids, tokenizer.end]) == text
    stream = tokenizer.stream()
    assert "".join(stream.feed([token]) for token in ids) + stream.close() == text


def test_a_file_without_an_end_token_gets_one(tmp_path: Path) -> None:
    made = LibraryFile(models.WordLevel({"a": 0, "b": 1, "[UNK]": 2}, unk_token="[UNK]"))
    made.save(str(tmp_path / "t.json"))
    tokenizer = tokenizers.load(tmp_path / "t.json")
    assert (tokenizer.end, tokenizer.vocab) == (3, 4)


def test_what_is_no_tokenizer_is_refused_in_one_line(tmp_path: Path) -> None:
    for text in ("{}", "not json", '{"model": {"type": "BPE"}}'):
        (tmp_path / "t.json").write_text(text)
        with pytest.raises(DataError, match="not a tokenizers JSON file") as caught:
            tokenizers.load(tmp_path / "t.json")
        assert "\n" not in str(caught.value)
    with pytest.raises(DataError, match="cannot read the tokenizer"):
        tokenizers.load(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("name", "size"), [("bpe-4096", 4096), ("bytes", None), ("bpe-x.json", None), ("bpe-", None)]
)
def test_names_of_trained_tokenizers(name: str, size: int | None) -> None:
    assert tokenizers.bpe_size(name) == size
