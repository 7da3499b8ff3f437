"""From a recipe's data section to splits: prepared once, checked, rebuilt after a change."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megalith.core.errors import DataError, MegalithError, RecipeError
from megalith.data import Splits, tokenizers
from megalith.data.locks import exclusive
from megalith.data.packing import PackedText
from megalith.data.prepare import check_sources, prepare
from megalith.recipe.schema import FactoryData, ImageData, TextData


class Told:
    """What the progress callback was told."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, int]] = []

    def __call__(self, what: str, done: int, total: int) -> None:
        self.calls.append((what, done, total))

    @property
    def stages(self) -> list[str]:
        return list(dict.fromkeys(what for what, _, _ in self.calls))


def write(folder: Path, count: int = 30) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(count):
        (folder / f"{i}.txt").write_text(f"document {i}: naïve café 😀 " * (1 + i % 5))


def section(folder: Path, **fields: Any) -> TextData:
    values = {
        "files": [str(folder / "text")],
        "cache": str(folder / "cache"),
        "sequence": 16,
        "validation": 0.2,
        **fields,
    }
    return TextData.model_validate(values)


def settle() -> None:
    """Let the files become older than a clock's tick, so that their times can be trusted."""
    time.sleep(2.1)


def build(folder: Path, told: Told | None = None, **fields: Any) -> Splits:
    return prepare(section(folder, **fields), seed=0, progress=told)


def text_of(dataset: Any, tokenizer: Any) -> str:
    """All text of a split, from its samples: the first token, then every target."""
    ids = [int(dataset[0]["tokens"][0])]
    for i in range(len(dataset)):
        ids += [int(t) for t in dataset[i]["targets"] if t != -100]
    stream = tokenizer.stream()
    return "".join("|" if token == tokenizer.end else stream.feed([token]) for token in ids)


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe-300"])
def test_the_samples_are_the_texts(tmp_path: Path, tokenizer: str) -> None:
    write(tmp_path / "text")
    splits = build(tmp_path, tokenizer=tokenizer)
    assert isinstance(splits.train, PackedText)
    expected = {path.read_text() for path in (tmp_path / "text").iterdir()}
    validation = text_of(splits.validation, splits.tokenizer).removesuffix("|").split("|")
    train = text_of(splits.train, splits.tokenizer).split("|")
    assert set(validation) < expected
    assert set(train[:-1]) < expected  # the last one is cut
    assert set(train).isdisjoint(validation)
    assert len(train) + len(validation) in (30, 31)
    assert splits.facts == {"vocab": 257 if tokenizer == "bytes" else 300}
    counted = splits.description
    assert counted["train bytes"] + counted["validation bytes"] == sum(
        len(text.encode()) for text in expected
    )
    assert counted["bits per byte"] == "exact"


def test_what_is_prepared_is_found_again_without_reading(tmp_path: Path) -> None:
    write(tmp_path / "text")
    settle()
    told = [Told(), Told()]
    first, second = (build(tmp_path, each, tokenizer="bpe-300") for each in told)
    assert told[0].stages == ["reading", "training the tokenizer", "tokenising"]
    assert told[0].calls[-1][1] == told[0].calls[-1][2] > 0
    assert told[1].stages == []
    assert first.fingerprint == second.fingerprint
    assert not list((tmp_path / "cache/tokens").glob(".*"))


def test_files_as_young_as_a_clocks_tick_are_read_again(tmp_path: Path) -> None:
    write(tmp_path / "text")
    build(tmp_path)
    told = Told()
    build(tmp_path, told)
    assert told.stages == ["reading"]


def test_recipes_with_the_same_data_share_it(tmp_path: Path) -> None:
    write(tmp_path / "text")
    write(tmp_path / "elsewhere")
    first = build(tmp_path)
    told = Told()
    second = build(tmp_path, told, files=[f"{tmp_path}/elsewhere/*.txt"], sequence=8)
    assert told.stages == ["reading"]
    assert len(list((tmp_path / "cache/tokens").iterdir())) == 1
    assert first.fingerprint != second.fingerprint  # other samples of the same tokens
    apart = build(tmp_path, cross_document_attention=False)
    assert apart.fingerprint not in (first.fingerprint, second.fingerprint)
    assert set(apart.validation[0]) == {"tokens", "targets", "bytes", "documents", "positions"}


@pytest.mark.parametrize("settled", [False, True])
def test_a_changed_source_is_noticed(tmp_path: Path, settled: bool) -> None:
    write(tmp_path / "text")
    if settled:
        settle()
    first = build(tmp_path)
    path = tmp_path / "text/3.txt"
    times = path.stat()
    path.write_text(path.read_text().replace("document", "Document"))  # of the same size
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))  # and with its old time
    told = Told()
    second = build(tmp_path, told)
    assert told.stages == [
        "reading",
        "the source has changed since this data was last prepared",
        "tokenising",
    ]
    assert first.fingerprint != second.fingerprint
    both = text_of(second.train, second.tokenizer) + text_of(second.validation, second.tokenizer)
    assert "Document 3" in both


def test_a_changed_tokenizer_file_is_noticed(tmp_path: Path) -> None:
    write(tmp_path / "text")
    file = tmp_path / "t.json"
    file.write_text(tokenizers.train_bpe(["naïve café " * 9], 270).to_json(), encoding="utf-8")
    settle()
    first = build(tmp_path, tokenizer=str(file))
    file.write_text(tokenizers.train_bpe(["document 1 " * 9], 270).to_json(), encoding="utf-8")
    told = Told()
    second = build(tmp_path, told, tokenizer=str(file))
    assert "the tokenizer's file has changed since this data was last prepared" in told.stages
    assert first.fingerprint != second.fingerprint
    assert len(second.tokenizer.encode(" document")) < len(first.tokenizer.encode(" document"))


def shards(folder: Path) -> Path:
    (found,) = (folder / "cache/tokens").iterdir()
    return found


@pytest.mark.parametrize("name", ["train-00000.bin", "validation.documents.bin"])
def test_a_damaged_file_is_refused_in_one_line(tmp_path: Path, name: str) -> None:
    write(tmp_path / "text")
    build(tmp_path)
    path = shards(tmp_path) / name
    whole = path.read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    for data, what in (
        (bytes(flipped), "is damaged"),
        (whole[:-2], "bytes instead of"),
        (None, "is missing"),
    ):
        path.unlink()
        if data is not None:
            path.write_bytes(data)
        with pytest.raises(DataError, match=f"{name}: .*{what}.*; delete") as caught:
            build(tmp_path)
        assert "\n" not in str(caught.value)


def test_a_damaged_manifest_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "text")
    build(tmp_path)
    path = shards(tmp_path) / "manifest.json"
    whole = json.loads(path.read_text())
    assert len(whole["sources"]) == 30
    assert {len(source["sha256"]) for source in whole["sources"]} == {64}
    for text in ("{", json.dumps({**whole, "format": 99})):
        path.write_text(text)
        with pytest.raises(DataError, match=r"manifest\.json: .*delete"):
            build(tmp_path)


def test_work_that_was_broken_off_leaves_nothing_that_is_used(tmp_path: Path) -> None:
    write(tmp_path / "text")

    def broken(what: str, done: int, total: int) -> None:
        if what == "tokenising":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(section(tmp_path), 0, broken)
    assert list((tmp_path / "cache/tokens").iterdir()) == []
    left = tmp_path / "cache/tokens/.of-a-killed-process.tmp"
    left.mkdir()
    (tmp_path / "cache/unpacked").mkdir()
    build(tmp_path)
    assert not left.exists()
    assert not (tmp_path / "cache/unpacked").exists()


def prepare_and_tell(data: TextData, pipe: Connection) -> None:
    splits = prepare(data, 0, lambda what, done, total: pipe.send(what))
    pipe.send(splits.fingerprint)
    pipe.send(None)


def test_only_one_of_several_processes_does_the_work(tmp_path: Path) -> None:
    write(tmp_path / "text")
    (tmp_path / "cache").mkdir()
    settle()
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe(duplex=False) for _ in range(3)]
    with exclusive(tmp_path / "cache/lock", lambda: None):
        started = [
            context.Process(target=prepare_and_tell, args=(section(tmp_path), sender))
            for _, sender in pipes
        ]
        for process in started:
            process.start()
        for receiver, _ in pipes:  # all of them stand before the lock now
            assert receiver.recv().startswith("waiting for another process")
    said = [list(iter(receiver.recv, None)) for receiver, _ in pipes]
    for process in started:
        process.join()
    for work in ("reading", "tokenising"):
        assert sorted(work in lines for lines in said) == [False, False, True]
    assert len({lines[-1] for lines in said}) == 1


def test_the_lock_goes_with_its_owner(tmp_path: Path) -> None:
    script = (
        "import sys, time, pathlib; from megalith.data.locks import exclusive\n"
        "with exclusive(pathlib.Path(sys.argv[1]), lambda: None):\n"
        "    print('held', flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "lock")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "held\n"
        waited: list[bool] = []

        def waiting() -> None:
            waited.append(True)
            owner.kill()

        with exclusive(tmp_path / "lock", waiting):
            assert waited == [True]


def test_the_standard_library_within_a_limit(tmp_path: Path) -> None:
    data = TextData(cache=str(tmp_path), limit=300_000)
    splits = prepare(data, seed=0)
    read = splits.description["train bytes"] + splits.description["validation bytes"]
    assert 250_000 < read <= 300_000


def test_a_wide_vocabulary_takes_four_bytes_a_token(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"w{i}": i for i in range(70_000)} | {"[UNK]": 70_000, "</s>": 70_001}
    made = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    setattr(made, "pre_tokenizer", pre_tokenizers.WhitespaceSplit())  # noqa: B010
    made.save(str(tmp_path / "t.json"))
    (tmp_path / "text").mkdir()
    for i in range(10):
        (tmp_path / f"text/{i}.txt").write_text(f"w{69_000 + i} w{i} " * 20)
    splits = build(tmp_path, tokenizer=str(tmp_path / "t.json"))
    tokens: Any = np.concatenate([splits.train[i]["tokens"] for i in range(10)])
    assert (tokens > 65_536).any()
    assert splits.description["bits per byte"].startswith("estimate")


def refused(data: Any) -> str:
    with pytest.raises(MegalithError) as caught:
        check_sources(data)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_is_missing_is_refused_before_any_work(tmp_path: Path) -> None:
    write(tmp_path / "text", 2)
    check_sources(section(tmp_path))
    assert refused(section(tmp_path, files=["no/such.txt"])).startswith("data.files: ")
    assert refused(section(tmp_path, tokenizer="no.json")).startswith("data.tokenizer: 'no.json'")
    assert refused(section(tmp_path, tokenizer="bpe-100")).startswith("data.tokenizer: 'bpe-100'")
    images = ImageData(source="idx", folder=str(tmp_path / "none"))
    assert refused(images).startswith("data.folder: ")
    assert refused(FactoryData(factory="no_such.module:f")).startswith("data.factory: ")
    assert not (tmp_path / "cache").exists()


def test_a_sequence_longer_than_the_text_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "text", 3)
    with pytest.raises(RecipeError, match=r"data\.sequence: 4096 is too long"):
        build(tmp_path, sequence=4096)


def test_a_factory_gives_splits_or_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data_of_mine.py").write_text(
        "from megalith.data import Splits\n"
        "def good(size): return Splits(train=list(range(size)), validation=[])\n"
        "def bad(): return [1, 2]\n"
    )
    monkeypatch.chdir(tmp_path)
    good = FactoryData(factory="data_of_mine:good", args={"size": 3})
    assert list(prepare(good, seed=0).train) == [0, 1, 2]  # pyright: ignore
    with pytest.raises(RecipeError, match=r"data\.factory: 'data_of_mine:bad' returned list"):
        prepare(FactoryData(factory="data_of_mine:bad"), seed=0)


def test_images_come_from_their_own_module() -> None:
    pytest.importorskip("sklearn")
    splits = prepare(ImageData(source="digits"), seed=0)
    assert splits.facts["classes"] == 10
