"""Packed samples: every token is a target once, and documents kept apart never touch."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from megalith.data.packing import PackedText
from megalith.data.shards import TokenStream, read_manifest, write_shards
from megalith.data.tokenizers import ByteTokenizer, Tokenizer

END = 256


def quiet(what: str, done: int, total: int) -> None:
    pass


def stream(
    folder: Path,
    documents: Sequence[str],
    tokenizer: Tokenizer | None = None,
    shard_tokens: int = 1 << 20,
) -> TokenStream:
    parts = {"train": ([text] for text in documents)}
    target = folder / "shards"
    write_shards(target, tokenizer or ByteTokenizer(), parts, {}, 1, quiet, shard_tokens)
    manifest = read_manifest(target)
    return TokenStream(target, manifest["dtype"], manifest["splits"]["train"])


def pack(
    source: TokenStream, sequence: int, *, apart: bool = False, whole: bool = True
) -> list[dict[str, torch.Tensor]]:
    packed = PackedText(source, sequence, ByteTokenizer().token_bytes, apart=apart, whole=whole)
    return [packed[i] for i in range(len(packed))]


def column(samples: list[dict[str, torch.Tensor]], name: str) -> list[object]:
    return [sample[name].tolist() for sample in samples]


def test_joined_documents_by_hand(tmp_path: Path) -> None:
    samples = pack(stream(tmp_path, ["abc", "d", "efgh"]), 4)
    a, b, c, d, e, f, g, h = range(97, 105)
    assert column(samples, "tokens") == [[a, b, c, END], [d, END, e, f], [g, h, END, END]]
    assert column(samples, "targets") == [[b, c, END, d], [END, e, f, g], [h, END, -100, -100]]
    assert column(samples, "bytes") == [3, 3, 1]
    assert set(samples[0]) == {"tokens", "targets", "bytes"}
    assert {tensor.dtype for sample in samples for tensor in sample.values()} == {torch.int64}


def test_documents_kept_apart_by_hand(tmp_path: Path) -> None:
    samples = pack(stream(tmp_path, ["abc", "d", "efgh"]), 5, apart=True)
    a, b, c, d, e, f, g, h = range(97, 105)
    assert column(samples, "tokens") == [[a, b, c, END, d], [END, e, f, g, h]]
    assert column(samples, "targets") == [[b, c, END, -100, END], [-100, f, g, h, END]]
    assert column(samples, "documents") == [[0, 0, 0, 0, 1], [0, 1, 1, 1, 1]]
    assert column(samples, "positions") == [[0, 1, 2, 3, 0], [0, 0, 1, 2, 3]]
    assert column(samples, "bytes") == [2, 3]


def test_padding_is_a_document_of_its_own(tmp_path: Path) -> None:
    samples = pack(stream(tmp_path, ["abc", "d", "ef"]), 5, apart=True)
    assert column(samples, "targets")[1] == [-100, ord("f"), END, -100, -100]
    assert column(samples, "documents")[1] == [0, 1, 1, 2, 2]
    assert column(samples, "positions")[1] == [0, 0, 1, 0, 1]
    assert {sample["documents"].dtype for sample in samples} == {torch.int64}
    assert {sample["positions"].dtype for sample in samples} == {torch.int64}


def random_documents(seed: int, count: int) -> list[str]:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 30, count)
    return ["".join(map(chr, rng.integers(32, 400, length))) for length in lengths]


@pytest.mark.parametrize("sequence", [1, 2, 7, 64, 10_000])
@pytest.mark.parametrize("shard_tokens", [64, 1 << 20])
def test_any_length_and_any_shards_against_a_plain_loop(
    tmp_path: Path, sequence: int, shard_tokens: int
) -> None:
    documents = random_documents(sequence, 25)
    found = pack(stream(tmp_path, documents, shard_tokens=shard_tokens), sequence, apart=True)
    rows = [
        (token, number, place, place == len(text.encode()))
        for number, text in enumerate(documents)
        for place, token in enumerate([*text.encode(), END])
    ]
    total = 0
    for index, sample in enumerate(found):
        first = index * sequence
        part = rows[first : first + sequence]
        for j in range(sequence):
            if first + j + 1 >= len(rows):  # the padding
                assert sample["targets"][j] == -100
                continue
            token, number, place, last = part[j]
            start = max(first, first + j - place)
            assert sample["tokens"][j] == token
            assert sample["targets"][j] == (-100 if last else rows[first + j + 1][0])
            assert sample["positions"][j] == first + j - start
            assert sample["documents"][j] == number - part[0][1]
        total += int(sample["bytes"])
    assert len(found) == -(-(len(rows) - 1) // sequence)
    text_bytes = sum(len(text.encode()) for text in documents)
    # A document's first byte has nothing before it to be predicted from.
    assert total == text_bytes - len(documents)


def test_bytes_of_all_samples_are_the_texts_bytes(tmp_path: Path) -> None:
    documents = random_documents(0, 40)
    source = stream(tmp_path, documents)
    total = sum(int(sample["bytes"]) for sample in pack(source, 16))
    assert total == sum(len(text.encode()) for text in documents) - 1  # but the first one
    assert source.text_bytes == total + 1


def test_a_train_split_drops_the_remainder_and_shares_no_target(tmp_path: Path) -> None:
    source = stream(tmp_path, random_documents(1, 30))
    samples, kept = pack(source, 16, whole=False), pack(source, 16)
    assert len(samples) == (len(source) - 1) // 16 == len(kept) - 1
    targets = [target for sample in kept for target in sample["targets"].tolist()]
    everything = source.read(0, len(source)).tolist()
    assert [target for target in targets if target != -100] == everything[1:]


def test_separate_documents_have_the_same_loss(tmp_path: Path) -> None:
    """With a model that sees a document's tokens and positions, and nothing else."""
    documents = ["one text", "another", "x", "the last text of all"]
    sample = pack(stream(tmp_path, documents), 64, apart=True)[0]
    table = torch.randn(257, 257, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    places = torch.randn(64, 257, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def loss(
        tokens: torch.Tensor, positions: torch.Tensor, same: torch.Tensor, targets: torch.Tensor
    ) -> torch.Tensor:
        states = table[tokens] + places[positions]
        mask = same.tril().double()
        logits = (mask / mask.sum(-1, keepdim=True)) @ states
        return torch.nn.functional.cross_entropy(logits, targets, reduction="sum")

    same = sample["documents"][:, None] == sample["documents"]
    packed = loss(sample["tokens"], sample["positions"], same, sample["targets"])
    alone = torch.zeros((), dtype=torch.float64)
    for text in documents:
        ids = torch.tensor([*text.encode(), END])
        length = len(ids) - 1
        every = torch.ones(length, length, dtype=torch.bool)
        alone += loss(ids[:-1], torch.arange(length), every, ids[1:])
    torch.testing.assert_close(packed, alone, rtol=1e-14, atol=0)


def test_beyond_the_end_there_is_no_sample(tmp_path: Path) -> None:
    packed = PackedText(
        stream(tmp_path, ["abc"]), 2, ByteTokenizer().token_bytes, apart=False, whole=False
    )
    assert len(packed) == 1
    with pytest.raises(IndexError):
        packed[1]


def test_a_stream_travels_to_other_processes_without_its_data(tmp_path: Path) -> None:
    source = stream(tmp_path, ["some text " * 1000])
    source.read(0, 10)
    carried = pickle.dumps(source)
    assert len(carried) < 2000
    assert (pickle.loads(carried).read(5, 50) == source.read(5, 50)).all()
