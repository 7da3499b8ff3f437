"""Documents: found wherever they are, read exactly, split by content, refused in one line."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import zstandard

from megalith.core.errors import DataError, RecipeError
from megalith.data.corpus import Corpus, content_hash, scan, split
from megalith.data.sources import PIECE, list_sources
from megalith.recipe.schema import TextData

TEXTS = ["first\nfile\r\n", "zweite Datei: Straße\n", "第三 😀 no newline at the end"]


def text_data(*files: Path | str, **fields: object) -> TextData:
    return TextData.model_validate({"files": [str(file) for file in files], **fields})


def quiet(what: str, done: int, total: int) -> None:
    pass


def read(section: TextData, spool: Path) -> Corpus:
    spool.mkdir(exist_ok=True)
    return scan(list_sources(section), section.field, spool, quiet)


def texts(corpus: Corpus) -> list[str]:
    return ["".join(corpus.text(i)) for i in range(len(corpus))]


def pack(data: bytes, packing: str) -> bytes:
    if packing == ".gz":
        return gzip.compress(data)
    if packing == ".zst":  # two frames, as parallel compressors write them
        half = len(data) // 2
        writer = zstandard.ZstdCompressor(write_checksum=True)
        return b"".join(writer.compress(part) for part in (data[:half], data[half:]))
    return data


@pytest.mark.parametrize("packing", ["", ".gz", ".zst"])
def test_a_file_is_one_document_with_exactly_its_characters(tmp_path: Path, packing: str) -> None:
    for i, text in enumerate(TEXTS):
        (tmp_path / f"{i}.txt{packing}").write_bytes(pack(text.encode(), packing))
    assert texts(read(text_data(tmp_path), tmp_path / ".spool")) == TEXTS


@pytest.mark.parametrize("packing", ["", ".gz", ".zst"])
def test_a_jsonl_line_is_one_document(tmp_path: Path, packing: str) -> None:
    lines = [json.dumps({"id": i, "body": text}) for i, text in enumerate(TEXTS)]
    data = "\n\n".join(lines).encode()  # with empty lines, and none at the end
    (tmp_path / f"x.jsonl{packing}").write_bytes(pack(data, packing))
    section = text_data(tmp_path / f"x.jsonl{packing}", field="body")
    assert texts(read(section, tmp_path / ".spool")) == TEXTS


def test_long_documents_come_in_pieces_that_end_with_a_line(tmp_path: Path) -> None:
    long = "".join(f"line {i} é\n" for i in range(PIECE // 2))
    without_lines = "ü" * (2 * PIECE + 7)
    (tmp_path / "a.txt").write_bytes(long.encode())
    (tmp_path / "b.txt").write_bytes(without_lines.encode())
    corpus = read(text_data(tmp_path), tmp_path / ".spool")
    assert texts(corpus) == [long, without_lines]
    found = list(corpus.text(0))
    assert len(found) > 2
    assert all(piece.endswith("\n") for piece in found)
    assert max(len(piece) for piece in [*found, *corpus.text(1)]) < 3 * PIECE


def test_folders_globs_and_files_list_each_file_once_and_skip_hidden_ones(tmp_path: Path) -> None:
    for name in ("b/two.py", "a.txt", "b/.hidden/x.py", ".git/config", "b/c/three.md"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    names = [file.name for file in list_sources(text_data(tmp_path, tmp_path / "a.txt"))]
    assert names == [str(tmp_path / name) for name in ("a.txt", "b/c/three.md", "b/two.py")]
    globbed = [file.name for file in list_sources(text_data(f"{tmp_path}/**/*.py"))]
    assert globbed == [str(tmp_path / "b/two.py")]


def test_the_standard_library_is_megabytes_of_text_without_tests(tmp_path: Path) -> None:
    files = list_sources(TextData())
    names = {file.name for file in files}
    assert {"argparse.py", "json/decoder.py"} <= names
    assert not any(name.startswith(("test/", "site-packages/", "_sysconfigdata")) for name in names)
    corpus = read(TextData(), tmp_path)
    assert corpus.size.sum() > 5e6
    argparse = next(i for i, file in enumerate(files) if file.name == "argparse.py")
    document = corpus.file.tolist().index(argparse)
    assert "".join(corpus.text(document)).encode() == files[argparse].path.read_bytes()


def many(folder: Path, start: int = 0, stop: int = 200) -> None:
    folder.mkdir(exist_ok=True)
    for i in range(start, stop):
        (folder / f"{i}.txt").write_text(f"document number {i} " * (1 + i % 7))


def test_no_text_is_in_both_splits_whatever_its_name(tmp_path: Path) -> None:
    many(tmp_path / "a")
    (tmp_path / "a/copy.txt").write_bytes((tmp_path / "a/0.txt").read_bytes())
    lines = [json.dumps({"text": (tmp_path / f"a/{i}.txt").read_text()}) for i in range(100)]
    (tmp_path / "again.jsonl").write_text("\n".join(lines))
    corpus = read(text_data(tmp_path / "a", tmp_path / "again.jsonl"), tmp_path / "spool")
    train, validation = split(corpus, 0.2, None)
    found = texts(corpus)
    assert len(train) + len(validation) == 301
    assert {found[i] for i in train}.isdisjoint({found[i] for i in validation})
    assert 0.1 < len(validation) / 301 < 0.3


def test_names_and_listing_order_have_no_part_in_order_and_split(tmp_path: Path) -> None:
    many(tmp_path / "a")
    (tmp_path / "b").mkdir()
    for i in range(200):
        (tmp_path / f"b/{7 * i % 200:03d}.md").write_bytes((tmp_path / f"a/{i}.txt").read_bytes())
    first = read(text_data(tmp_path / "a"), tmp_path / "s1")
    second = read(text_data(tmp_path / "b"), tmp_path / "s2")
    listed = texts(first)
    halves = [
        [found[i] for i in part]
        for corpus, found in ((first, listed), (second, texts(second)))
        for part in split(corpus, 0.1, None)
    ]
    assert halves[:2] == halves[2:]
    assert content_hash(first, *split(first, 0.1, None)) == content_hash(
        second, *split(second, 0.1, None)
    )
    assert halves[0] != [text for text in listed if text in halves[0]]  # shuffled


def test_new_documents_move_none_of_the_old_between_the_splits(tmp_path: Path) -> None:
    many(tmp_path / "a")
    before = read(text_data(tmp_path / "a"), tmp_path / "s")
    listed = texts(before)
    old = {listed[i] for i in split(before, 0.1, None)[1]}
    many(tmp_path / "a", 200, 300)
    after = read(text_data(tmp_path / "a"), tmp_path / "s")
    listed = texts(after)
    new = {listed[i] for i in split(after, 0.1, None)[1]}
    assert old < new


def test_limit_takes_shuffled_documents_that_fit(tmp_path: Path) -> None:
    many(tmp_path / "a")
    corpus = read(text_data(tmp_path / "a"), tmp_path / "s")
    train, validation = split(corpus, 0.1, 4000)
    chosen = corpus.size[[*train, *validation]].sum()
    assert 4000 - corpus.size.min() < chosen <= 4000
    assert max(train) > 100  # from all over the source
    assert len(train) > 2 * len(validation)  # taken before the split, and independently of it


@pytest.mark.parametrize("share", [1e-9, 1 - 1e-9])
def test_both_splits_always_hold_something(tmp_path: Path, share: float) -> None:
    many(tmp_path / "a", stop=3)
    train, validation = split(read(text_data(tmp_path / "a"), tmp_path / "s"), share, None)
    assert len(train)
    assert len(validation)
    assert len(train) + len(validation) == 3


def refused(section: TextData, tmp_path: Path) -> str:
    with pytest.raises((DataError, RecipeError)) as caught:
        split(read(section, tmp_path / ".spool"), 0.1, section.limit)
    message = str(caught.value)
    assert "\n" not in message
    return message.replace(str(tmp_path), "DIR")


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").write_text("x")
    message = refused(text_data(tmp_path / "corpis.txt"), tmp_path)
    assert message == ("data.files: 'DIR/corpis.txt' does not exist; did you mean 'corpus.txt'?")
    message = refused(text_data(f"{tmp_path}/*.md"), tmp_path)
    assert message == "data.files: no file matches 'DIR/*.md'"
    (tmp_path / "empty").mkdir()
    message = refused(text_data(tmp_path / "empty"), tmp_path)
    assert message == "data.files: folder 'DIR/empty' holds no files"


def test_bytes_that_are_no_text_are_named_with_their_line(tmp_path: Path) -> None:
    good = "x" * 99 + "\n"
    data = (good * 20_000).encode() + b"caf\xe9 au lait\n"  # beyond the first block
    (tmp_path / "a.txt").write_bytes(data)
    assert refused(text_data(tmp_path), tmp_path).startswith("DIR/a.txt:20001: not UTF-8 text")
    (tmp_path / "a.txt").write_bytes(b"one\ntwo\xe2\x82")  # cut inside a character
    assert refused(text_data(tmp_path), tmp_path).startswith("DIR/a.txt:2: not UTF-8 text")


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ('{"txet": "a"}', "DIR/x.jsonl:2: no field 'text' (data.field); did you mean 'txet'?"),
        ('{"a": 1, "b": 2}', "DIR/x.jsonl:2: no field 'text' (data.field); it has 'a', 'b'"),
        ('{"text": ', "DIR/x.jsonl:2: not JSON (Expecting value, column 9)"),
        ('["text"]', "DIR/x.jsonl:2: a JSON object is needed, not list"),
        ('{"text": 5}', "DIR/x.jsonl:2: field 'text' holds int, not text"),
        ('{"text": "\\ud83d"}', "DIR/x.jsonl:2: field 'text' is not valid Unicode"),
    ],
)
def test_a_bad_record_is_named_with_its_line(tmp_path: Path, line: str, what: str) -> None:
    (tmp_path / "x.jsonl").write_text('{"text": "fine"}\n' + line + "\n")
    assert refused(text_data(tmp_path / "x.jsonl"), tmp_path).startswith(what)


@pytest.mark.parametrize("packing", [".gz", ".zst"])
def test_damaged_and_cut_off_compression_is_refused(tmp_path: Path, packing: str) -> None:
    whole = pack("".join(f"{i} {i * i}\n" for i in range(5000)).encode(), packing)
    path = tmp_path / f"a.txt{packing}"
    for data in (whole[:-100], whole[:50] + b"\0" * 20 + whole[70:], b"no such format"):
        path.write_bytes(data)
        assert refused(text_data(path), tmp_path).startswith(f"DIR/a.txt{packing}: damaged")


def test_a_single_document_cannot_be_split(tmp_path: Path) -> None:
    for name in ("a.txt", "same.txt"):
        (tmp_path / name).write_text("only this")
    assert "single document" in refused(text_data(tmp_path), tmp_path)
    (tmp_path / "b.txt").write_text("another text")
    assert refused(text_data(tmp_path, limit=3), tmp_path).startswith("data.limit: ")


def test_a_text_that_changes_after_it_was_indexed_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("as it was")
    (tmp_path / "b.jsonl").write_text('{"text": "as it was too"}')
    corpus = read(text_data(tmp_path), tmp_path / ".spool")
    (tmp_path / "a.txt").write_text("as it is.")
    (tmp_path / "b.jsonl").write_text('{"text": "as it is now."}')
    for document in range(2):
        with pytest.raises(DataError, match="changed while it was being prepared"):
            list(corpus.text(document))
