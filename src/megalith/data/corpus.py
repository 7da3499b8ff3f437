"""An index of documents: one pass over the sources, then any document in any order.

The index holds about 40 bytes a document; the text stays on disk. What is decided here depends on
the documents' content alone, never on names, listing order or a seed:

- the order is that of the first half of each document's hash, which is as good as a shuffle;
- the split is by the second half, so a text never is in both splits, and adding documents
  moves none of the old ones between the splits.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megalith.core.errors import DataError
from megalith.data.sources import PIECE, SourceFile, blocks, pieces, record_text

Progress = Callable[[str, int, int], None]
"""Told what is being done, how much of it is done, and how much there is; 0 of 0 is a message."""

_DIGEST = 16  # bytes


@dataclass(frozen=True)
class Corpus:
    """The documents of a source, empty ones left out.

    Attributes:
        files: the files they are in.
        hashes: SHA-256 of each file's unpacked bytes, in hex.
        field: the text's name in JSONL.
        paths: for each file, where its records are read from (an unpacked copy, if need be).
        file: [documents] int32, index into ``files``.
        offset: [documents] int64, where a JSONL record starts in ``paths``; 0 for a whole file.
        size: [documents] int64, bytes of text.
        digest: [documents, 16] uint8, the start of the text's SHA-256.
    """

    files: list[SourceFile]
    hashes: list[str]
    field: str
    paths: list[Path]
    file: NDArray[np.int32]
    offset: NDArray[np.int64]
    size: NDArray[np.int64]
    digest: NDArray[np.uint8]

    def __len__(self) -> int:
        return len(self.file)

    def text(self, document: int) -> Iterator[str]:
        """The text of one document, in pieces of about a mebibyte.

        Raises:
            DataError: the text is no longer the one that was indexed.
        """
        file = self.files[self.file[document]]
        found = hashlib.sha256()
        for piece in self._record(document) if file.records else pieces(file):
            found.update(piece.encode())
            yield piece
        if found.digest()[:_DIGEST] != self.digest[document].tobytes():
            raise _changed(file)

    def _record(self, document: int) -> Iterator[str]:
        file = self.file[document]
        with self.paths[file].open("rb") as stream:
            stream.seek(int(self.offset[document]))
            try:
                text = record_text(stream.readline(), self.field, self.files[file].name)
            except DataError as error:
                raise _changed(self.files[file]) from error
        for start in range(0, len(text or ""), PIECE):
            yield (text or "")[start : start + PIECE]


def _changed(file: SourceFile) -> DataError:
    return DataError(f"{file.name}: changed while it was being prepared; start again")


def scan(files: list[SourceFile], field: str, spool: Path, progress: Progress) -> Corpus:
    """Read every file once and index its documents.

    Args:
        spool: an existing folder for unpacked copies of compressed JSONL files, whose records could
            not be read in any order otherwise.

    Raises:
        DataError: a file is damaged, not UTF-8, or lacks the field, with its line.
    """
    columns = array("i"), array("q"), array("q")
    digests, hashes, paths = bytearray(), [], []
    total, done = sum(file.size for file in files), 0
    for index, file in enumerate(files):
        progress("reading", done, total)
        path = file.path
        if file.records:
            if file.packing:
                path = spool / f"{index}.jsonl"
                with path.open("wb") as copy:
                    copy.writelines(blocks(file))
            found = _records(file, path, field, whole := hashlib.sha256())
        else:
            found = _whole(file, whole := hashlib.sha256())
        for offset, size, document in found:
            if size:
                for column, value in zip(columns, (index, offset, size), strict=True):
                    column.append(value)
                digests += document
        paths.append(path)
        hashes.append(whole.hexdigest())
        done += file.size
    progress("reading", total, total)
    return Corpus(
        files,
        hashes,
        field,
        paths,
        np.frombuffer(columns[0], np.int32),
        np.frombuffer(columns[1], np.int64),
        np.frombuffer(columns[2], np.int64),
        np.frombuffer(bytes(digests), np.uint8).reshape(-1, _DIGEST),
    )


def _whole(file: SourceFile, whole: Any) -> Iterator[tuple[int, int, bytes]]:
    size = 0
    for piece in pieces(file):
        data = piece.encode()
        whole.update(data)
        size += len(data)
    yield 0, size, whole.digest()[:_DIGEST]


def _records(
    file: SourceFile, path: Path, field: str, whole: Any
) -> Iterator[tuple[int, int, bytes]]:
    offset = 0
    try:
        stream = path.open("rb")
    except OSError as error:
        raise DataError(f"{file.name}: cannot read it ({error.strerror})") from error
    with stream:
        for number, line in enumerate(stream, start=1):
            whole.update(line)
            text = (record_text(line, field, f"{file.name}:{number}") or "").encode()
            yield offset, len(text), hashlib.sha256(text).digest()[:_DIGEST]
            offset += len(line)


def split(
    corpus: Corpus, validation: float, limit: int | None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Documents of the train and of the validation split, each in its shuffled order.

    Where chance leaves a split empty, the nearest document is moved there.

    Args:
        validation: the share of documents that goes to validation, in expectation.
        limit: take documents, in shuffled order, while their text fits into this many bytes.

    Raises:
        DataError: there are no two different documents, or none that fits into ``limit``.
    """
    if not len(corpus):
        raise DataError("data: the source holds no text")
    halves = np.ascontiguousarray(corpus.digest).view(">u8")  # [documents, 2]
    order = np.lexsort((halves[:, 1], halves[:, 0])).astype(np.int64)
    if limit is not None:
        order = order[_fitting(corpus.size[order], limit)]
        if not len(order):
            raise DataError(f"data.limit: no document fits into {limit} bytes")
    place = halves[order, 1]
    if place.min() == place.max():
        raise DataError(
            "data: a single document cannot be split into train and validation; give several "
            "files or JSONL records (split -n l/20 TEXT cuts a file into twenty)"
        )
    kept = place.astype(np.float64) / 2.0**64 < validation
    if not kept.any():
        kept = place == place.min()
    elif kept.all():
        kept = place != place.max()
    return order[~kept], order[kept]


def _fitting(sizes: NDArray[np.int64], limit: int) -> list[int]:
    taken, smallest = [], int(sizes.min())
    for index, size in enumerate(sizes.tolist()):
        if size <= limit:
            taken.append(index)
            limit -= size
        if limit < smallest:
            break
    return taken


def content_hash(corpus: Corpus, *documents: NDArray[np.int64]) -> str:
    """Hash of the texts of lists of documents, in their order."""
    found = hashlib.sha256()
    for part in documents:
        found.update(len(part).to_bytes(8, "little"))
        found.update(corpus.digest[part].tobytes())
    return found.hexdigest()
