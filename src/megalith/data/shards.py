"""Token ids on disk: written once, checked, and read through memory maps.

```
<cache>/tokens/<key>/
  train-00000.bin ...        uint16 or uint32, little-endian, one stream cut at a fixed size
  train.documents.bin        int64 [documents + 1]: where each document starts, and the end
  validation-00000.bin ...   the same for validation
  tokenizer.json             the tokenizer, as a file of the tokenizers library
  manifest.json              sources, counts and checksums
```

The stream of a split is its documents in their order, each followed by the end token. The key is a
hash of content (texts, order, split and tokenizer), so recipes with the same data share a folder,
and other content never finds it. A folder appears whole, by a rename, or not at all.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from array import array
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megalith.core.errors import DataError
from megalith.data.corpus import Progress
from megalith.data.tokenizers import Tokenizer, tokenizer_hash

FORMAT = 1
"""Raised when folders written before can no longer be read."""

SHARD_TOKENS = 1 << 27
"""Tokens in a full shard: 256 MiB of uint16."""

_BATCH = 1 << 22  # characters tokenised at once: enough for every core, and small

Documents = Iterable[Iterable[str]]
"""Documents, each in pieces."""


def shard_key(content: str, tokenizer: Tokenizer) -> str:
    """Name of the folder for texts with the hash ``content``."""
    text = f"{FORMAT} {content} {tokenizer_hash(tokenizer)}"
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def write_shards(
    folder: Path,
    tokenizer: Tokenizer,
    splits: Mapping[str, Documents],
    facts: Mapping[str, Any],
    total: int,
    progress: Progress,
    shard_tokens: int = SHARD_TOKENS,
) -> None:
    """Tokenise ``splits`` into ``folder``; a folder that another process finished first is kept.

    Args:
        folder: the final path, see :func:`shard_key`.
        splits: documents by the name of their split.
        facts: further entries of the manifest.
        total: bytes of text in all splits, for ``progress``.
        shard_tokens: tokens in a full shard.
    """
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        dtype = np.dtype("<u2" if tokenizer.vocab <= 1 << 16 else "<u4")
        done, written = 0, {}
        for name, documents in splits.items():
            writer = _Writer(temporary, name, dtype, shard_tokens)
            for text_bytes in _tokenise(documents, tokenizer, writer):
                done += text_bytes
                progress("tokenising", done, total)
            written[name] = writer.close()
        text = tokenizer.to_json()
        manifest = {
            "format": FORMAT,
            "dtype": dtype.name,
            "tokenizer": {
                "name": tokenizer.name,
                "hash": tokenizer_hash(tokenizer),
                "vocab": tokenizer.vocab,
                "end": tokenizer.end,
            },
            "splits": written,
            **facts,
        }
        _write(temporary / "tokenizer.json", text.encode())
        _write(temporary / "manifest.json", json.dumps(manifest, indent=1).encode())
        _sync(temporary)
        try:
            temporary.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
        _sync(folder.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _tokenise(documents: Documents, tokenizer: Tokenizer, writer: _Writer) -> Iterator[int]:
    """Write ``documents``; yields the bytes of text of each batch."""
    batch: list[str] = []
    last: list[bool] = []
    size = 0

    def flush() -> int:
        found = tokenizer.encode_batch(batch)
        text_bytes = sum(len(piece.encode()) for piece in batch)
        writer.text_bytes += text_bytes
        for ids, ends in zip(found, last, strict=True):
            writer.token_bytes += int(tokenizer.token_bytes[ids].sum())
            writer.add(ids)
            if ends:
                writer.end(tokenizer.end)
        batch.clear()
        last.clear()
        return text_bytes

    for document in documents:
        for piece in document:
            batch.append(piece)
            last.append(False)
            size += len(piece)
            if size >= _BATCH:
                # The last piece waits, as it may turn out to be its document's end.
                waiting = batch.pop(), last.pop()
                yield flush()
                batch.append(waiting[0])
                last.append(waiting[1])
                size = len(waiting[0])
        last[-1] = True
    if batch:
        yield flush()


class _Writer:
    """One split's stream, cut into shards."""

    def __init__(self, folder: Path, name: str, dtype: np.dtype[Any], shard_tokens: int):
        self.text_bytes = 0
        self.token_bytes = 0
        self._folder, self._name, self._dtype = folder, name, dtype
        self._shard_tokens = shard_tokens
        self._starts = array("q", [0])
        self._tokens = 0
        self._shards: list[dict[str, Any]] = []
        self._file: Any = None
        self._hash = hashlib.sha256()
        self._room = 0

    def add(self, ids: NDArray[Any]) -> None:
        self._tokens += len(ids)
        while len(ids):
            if not self._room:
                self._finish()
                name = f"{self._name}-{len(self._shards):05d}.bin"
                self._shards.append({"name": name, "tokens": 0, "sha256": ""})
                self._file = (self._folder / name).open("wb")
                self._hash, self._room = hashlib.sha256(), self._shard_tokens
            part, ids = ids[: self._room], ids[self._room :]
            data = part.astype(self._dtype).tobytes()
            self._file.write(data)
            self._hash.update(data)
            self._room -= len(part)
            self._shards[-1]["tokens"] += len(part)

    def end(self, token: int) -> None:
        self.add(np.array([token]))
        self._starts.append(self._tokens)

    def _finish(self) -> None:
        if self._file is not None:
            _sync(self._file)
            self._file.close()
            self._shards[-1]["sha256"] = self._hash.hexdigest()
            self._file = None

    def close(self) -> dict[str, Any]:
        """Finish the files; the split's entry in the manifest."""
        self._finish()
        name = f"{self._name}.documents.bin"
        starts = np.frombuffer(self._starts, np.int64).astype("<i8").tobytes()
        _write(self._folder / name, starts)
        return {
            "documents": len(self._starts) - 1,
            "tokens": self._tokens,
            "text_bytes": self.text_bytes,
            "token_bytes": self.token_bytes,
            "shards": self._shards,
            "boundaries": {"name": name, "sha256": hashlib.sha256(starts).hexdigest()},
        }


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        _sync(file)


def _sync(target: Any) -> None:
    if not isinstance(target, Path):
        target.flush()
        os.fsync(target.fileno())
    elif os.name == "posix":  # a folder's entries
        descriptor = os.open(target, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


class TokenStream:
    """One split's tokens, read from its shards through memory maps.

    Attributes:
        documents: number of documents.
        text_bytes: UTF-8 bytes of their text.
    """

    def __init__(self, folder: Path, dtype: str, entry: Mapping[str, Any]):
        self.documents: int = entry["documents"]
        self.text_bytes: int = entry["text_bytes"]
        self._folder, self._dtype = folder, np.dtype(dtype).newbyteorder("<")
        self._names = [shard["name"] for shard in entry["shards"]]
        self._boundaries_name = entry["boundaries"]["name"]
        sizes = [shard["tokens"] for shard in entry["shards"]]
        self._starts = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
        self._maps: dict[str, NDArray[Any]] = {}

    def __len__(self) -> int:
        """Number of tokens, the end tokens included."""
        return int(self._starts[-1])

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_maps": {}}  # a pickled map would carry all of the data

    @property
    def boundaries(self) -> NDArray[np.int64]:
        """[documents + 1] where each document starts, and the end of the last."""
        return self._map(self._boundaries_name, np.dtype("<i8"))

    def read(self, start: int, stop: int) -> NDArray[np.int64]:
        """Tokens ``start`` to ``stop`` (not included), int64; fewer at the stream's end."""
        stop = min(stop, len(self))
        shard = int(np.searchsorted(self._starts, start, side="right")) - 1
        parts = []
        while start < stop:
            first = int(self._starts[shard])
            part = self._map(self._names[shard], self._dtype)[start - first : stop - first]
            parts.append(part)
            start += len(part)
            shard += 1
        if len(parts) == 1:
            return parts[0].astype(np.int64)
        return np.concatenate(parts).astype(np.int64) if parts else np.empty(0, np.int64)

    def _map(self, name: str, dtype: np.dtype[Any]) -> NDArray[Any]:
        if name not in self._maps:
            self._maps[name] = np.memmap(self._folder / name, dtype, mode="r").view(np.ndarray)
        return self._maps[name]


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest in ``folder``.

    Raises:
        DataError: it is missing, or not such a manifest.
    """
    try:
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        version = manifest["format"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _damaged(folder / "manifest.json", "cannot be read", folder) from error
    if version != FORMAT:
        raise _damaged(folder / "manifest.json", f"has format {version}, not {FORMAT}", folder)
    return manifest


def check_shards(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Compare every file with its size and checksum in the manifest.

    Raises:
        DataError: a file is missing or damaged.
    """
    width = np.dtype(manifest["dtype"]).itemsize
    files: list[tuple[str, int, str]] = []
    for entry in manifest["splits"].values():
        files += [(s["name"], s["tokens"] * width, s["sha256"]) for s in entry["shards"]]
        boundaries = entry["boundaries"]
        files.append((boundaries["name"], 8 * (entry["documents"] + 1), boundaries["sha256"]))

    def check(file: tuple[str, int, str]) -> str | None:
        path = folder / file[0]
        if not path.is_file():
            return "is missing"
        if path.stat().st_size != file[1]:
            return f"has {path.stat().st_size} bytes instead of {file[1]}"
        with path.open("rb") as stream:
            same = hashlib.file_digest(stream, "sha256").hexdigest() == file[2]
        return None if same else "is damaged (its checksum is not the manifest's)"

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        for (name, _, _), wrong in zip(files, pool.map(check, files), strict=True):
            if wrong:
                raise _damaged(folder / name, wrong, folder)


def _damaged(path: Path, what: str, folder: Path) -> DataError:
    return DataError(f"{path}: {what}; delete {folder} to prepare the data again")
