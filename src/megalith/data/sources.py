"""Where text comes from: files, folders, globs, JSONL, compressed or not, and the stdlib.

Everything is read as a stream, so the largest thing in memory is one piece of about a mebibyte, or
one JSONL record. A file's kind is told by its name: ``.jsonl`` and ``.ndjson`` hold one document a
line, everything else is one document; ``.gz`` and ``.zst`` on top of that are unpacked.
"""

from __future__ import annotations

import codecs
import glob
import gzip
import json
import os
import sysconfig
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import zstandard

from megalith.core.errors import DataError, RecipeError, nearest
from megalith.recipe.schema import TextData

BLOCK = 1 << 20
"""Bytes read at once."""

PIECE = 1 << 20
"""Characters from which on a document is handed on in pieces."""

# Tests are left out of the stdlib: Debian and others ship Python without them, so with them the
# text would differ most from machine to machine, and they hold files that are broken on purpose.
_NOT_STDLIB = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}


@dataclass(frozen=True)
class SourceFile:
    """One file of a source.

    Attributes:
        path: the file.
        name: how messages and manifests call it.
        records: whether it is JSONL, one document a line.
        packing: how it is compressed.
        size: bytes on disk.
        changed: the later of the file's change times.  [ns since 1970]
    """

    path: Path
    name: str
    records: bool
    packing: Literal["", "gz", "zst"]
    size: int
    changed: int


def list_sources(section: TextData) -> list[SourceFile]:
    """The files that ``section`` names, each once, in an order that depends on names alone.

    A folder stands for every file below it whose name, and whose folders' names, do not start with
    a dot. ``stdlib`` stands for the ``.py`` files of the running interpreter's standard library,
    without its tests, installed packages and the file that records how this build was configured.

    Raises:
        RecipeError: ``data.files`` names something that does not exist, or matches nothing.
    """
    if section.source == "stdlib":
        root = Path(sysconfig.get_path("stdlib"))
        found = [_describe(path, path.relative_to(root).as_posix()) for path in _stdlib(root)]
        if not found:
            raise RecipeError(
                f"data.source: this Python has no .py files in {root}; use data.files instead"
            )
        return found
    files: dict[Path, SourceFile] = {}
    for pattern in section.files:
        for path in _expand(pattern):
            files.setdefault(path.resolve(), _describe(path, path.as_posix()))
    return [files[path] for path in sorted(files)]


def _stdlib(root: Path) -> list[Path]:
    found: list[Path] = []
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(set(folders) - _NOT_STDLIB)
        found += [
            Path(folder, name)
            for name in sorted(names)
            if name.endswith(".py") and not name.startswith("_sysconfigdata")
        ]
    return found


def _expand(pattern: str) -> list[Path]:
    path = Path(pattern).expanduser()
    if path.is_dir():
        found = _below(path)
        if not found:
            raise RecipeError(f"data.files: folder '{pattern}' holds no files")
    elif path.exists():
        found = [path]
    elif glob.has_magic(pattern):
        found = sorted(Path(name) for name in glob.iglob(str(path), recursive=True))
        found = [path for path in found if path.is_file()]
        if not found:
            raise RecipeError(f"data.files: no file matches '{pattern}'")
    else:
        beside = path.parent.iterdir() if path.parent.is_dir() else ()
        hint = nearest(path.name, [other.name for other in beside])
        raise RecipeError(f"data.files: '{pattern}' does not exist{hint}")
    return found


def _below(root: Path) -> list[Path]:
    found: list[Path] = []
    for folder, folders, names in os.walk(root, followlinks=True):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        paths = (Path(folder, name) for name in sorted(names) if not name.startswith("."))
        found += [path for path in paths if path.is_file()]
    return found


def _describe(path: Path, name: str) -> SourceFile:
    suffixes = [suffix.lower() for suffix in path.suffixes]
    packing: Literal["", "gz", "zst"] = ""
    if suffixes and suffixes[-1] in (".gz", ".zst"):
        packing = "gz" if suffixes.pop() == ".gz" else "zst"
    records = bool(suffixes) and suffixes[-1] in (".jsonl", ".ndjson")
    try:
        stat = path.stat()
    except OSError as error:
        raise RecipeError(f"data.files: cannot read '{name}' ({error.strerror})") from error
    # The inode's change time too: copying tools set the other one back to the original's.
    changed = max(stat.st_mtime_ns, stat.st_ctime_ns)
    return SourceFile(path, name, records, packing, stat.st_size, changed)


def blocks(file: SourceFile) -> Iterator[bytes]:
    """The unpacked bytes of ``file``, in blocks.

    Raises:
        DataError: the file cannot be read, or its compression is damaged or cut off.
    """
    try:
        if file.packing == "gz":
            with gzip.open(file.path, "rb") as stream:
                while block := stream.read(BLOCK):
                    yield block
        else:
            with file.path.open("rb") as stream:
                raw = iter(lambda: stream.read(BLOCK), b"")
                yield from _unpack_zst(raw, file.name) if file.packing == "zst" else raw
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{file.name}: damaged gzip file ({error})") from error
    except zstandard.ZstdError as error:
        raise DataError(f"{file.name}: damaged zstd file ({error})") from error
    except OSError as error:
        raise DataError(f"{file.name}: cannot read it ({error.strerror})") from error


def _unpack_zst(raw: Iterator[bytes], name: str) -> Iterator[bytes]:
    # zstandard's own stream reader ends without a word where a file is cut off.
    frame = None
    for block in raw:
        rest = block
        while rest:
            frame = frame or zstandard.ZstdDecompressor().decompressobj()
            if unpacked := frame.decompress(rest):
                yield unpacked
            rest = b""
            if frame.eof:
                rest, frame = frame.unused_data, None
    if frame is not None:
        raise DataError(f"{name}: damaged zstd file (it is cut off)")


def pieces(file: SourceFile) -> Iterator[str]:
    """The text of ``file`` in pieces that end at a line's end where a line ends in time.

    Nothing is translated: the pieces, joined and encoded as UTF-8, are the file's bytes.

    Raises:
        DataError: with file and line, where the bytes are not UTF-8.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    waiting, lines = "", 0
    for block in blocks(file):
        waiting += _decode(decoder, block, file, lines, final=False)
        lines += block.count(b"\n")
        if len(waiting) >= PIECE:
            cut = waiting.rfind("\n") + 1 or len(waiting)
            yield waiting[:cut]
            waiting = waiting[cut:]
    waiting += _decode(decoder, b"", file, lines, final=True)
    if waiting:
        yield waiting


def _decode(
    decoder: codecs.IncrementalDecoder, block: bytes, file: SourceFile, lines: int, *, final: bool
) -> str:
    try:
        return decoder.decode(block, final)
    except UnicodeDecodeError as error:
        line = lines + 1 + error.object.count(b"\n", 0, error.start)
        raise DataError(
            f"{file.name}:{line}: not UTF-8 text ({error.reason}); "
            "convert it, or name the text files with a glob"
        ) from error


def record_text(line: bytes, field: str, place: str) -> str | None:
    """The text of one JSONL line, or ``None`` for an empty line.

    Raises:
        DataError: starting with ``place`` (file and line), where the line has no such text.
    """
    line = line.rstrip()
    if not line:
        return None
    try:
        record: Any = json.loads(line)
    except UnicodeDecodeError as error:
        raise DataError(f"{place}: not UTF-8 text ({error.reason})") from error
    except json.JSONDecodeError as error:
        raise DataError(f"{place}: not JSON ({error.msg}, column {error.colno})") from error
    if not isinstance(record, dict):
        raise DataError(f"{place}: a JSON object is needed, not {type(record).__name__}")
    if field not in record:
        hint = nearest(field, record) or f"; it has {', '.join(map(repr, list(record)[:8]))}"
        raise DataError(f"{place}: no field '{field}' (data.field){hint if record else ''}")
    text = record[field]
    if not isinstance(text, str):
        raise DataError(f"{place}: field '{field}' holds {type(text).__name__}, not text")
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            reason = f"is not valid Unicode ({error.reason})"
            raise DataError(f"{place}: field '{field}' {reason}") from error
    return text
