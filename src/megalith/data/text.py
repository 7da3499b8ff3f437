"""Text as a recipe asks for it: found, split, tokenised once, packed.

What was prepared is found again by the names, sizes and change times of the sources, without
reading them. If one of these differs, the sources are read, and the cached shards are used
only if the content is the same after all.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megalith.core.errors import DataError, RecipeError
from megalith.core.runs import write_whole
from megalith.data import Splits, tokenizers
from megalith.data.corpus import Corpus, Progress, content_hash, scan, split
from megalith.data.locks import exclusive
from megalith.data.packing import PackedText
from megalith.data.shards import (
    FORMAT,
    TokenStream,
    check_shards,
    read_manifest,
    shard_key,
    write_shards,
)
from megalith.data.sources import SourceFile, list_sources
from megalith.recipe.schema import TextData

BPE_TEXT = 1 << 29
"""Bytes of text, from the train split's beginning, that a tokenizer is trained on at most."""

# A file may be changed twice within one tick of its clock. So a time as young as this proves
# nothing, and the file is read again.
_TICK = 2_000_000_000  # ns


def check_text(section: TextData) -> None:
    """Whether the files and the tokenizer that ``section`` names are there, without reading them.

    Raises:
        RecipeError: with the field's path.
    """
    list_sources(section)
    name = section.tokenizer
    size = tokenizers.bpe_size(name)
    if size is not None and size < tokenizers.SMALLEST:
        raise RecipeError(
            f"data.tokenizer: '{name}' is too small; bpe-{tokenizers.SMALLEST} (every byte and "
            "the end token) is the least"
        )
    if size is None and name != "bytes" and not Path(name).expanduser().is_file():
        raise RecipeError(
            f"data.tokenizer: '{name}' is neither bytes, nor bpe-N, nor an existing JSON file"
        )


def prepare_text(section: TextData, progress: Progress | None = None) -> Splits:
    """Packed samples of the text that ``section`` describes; what was prepared before is reused.

    The samples do not depend on a seed. Nothing larger than a few mebibytes of text, one JSONL
    record, and the index of documents is held in memory.

    Raises:
        RecipeError: a file or folder that the section names is missing.
        DataError: a source, a tokenizer or a cached file is not what it should be.
    """
    check_text(section)
    say = progress or _silent
    cache = Path(section.cache).expanduser()
    request = _request(section)
    folder = _recall(cache, request)
    if folder is None:
        try:
            cache.mkdir(parents=True, exist_ok=True)
            waiting = f"waiting for another process that prepares data in {cache}"
            with exclusive(cache / "lock", lambda: say(waiting, 0, 0)):
                folder = _recall(cache, request) or _prepare(section, cache, request, say)
        except BrokenPipeError:  # of whoever reads the progress
            raise
        except OSError as error:
            place, reason = error.filename or cache, error.strerror or error
            raise DataError(f"{place}: cannot prepare the data ({reason})") from error
    return _open(section, folder)


def _silent(what: str, done: int, total: int) -> None:
    pass


@dataclass(frozen=True)
class _Request:
    """What is asked for, and the state of the files that it names."""

    key: str
    files: list[SourceFile]
    state: str
    tokenizer: str
    time: int


def _request(section: TextData) -> _Request:
    now = time.time_ns()
    files = list_sources(section)
    tokenizer = section.tokenizer
    if tokenizer != "bytes" and tokenizers.bpe_size(tokenizer) is None:
        tokenizer = hashlib.sha256(Path(tokenizer).expanduser().read_bytes()).hexdigest()
    asked = [
        FORMAT,
        section.source,
        [str(Path(name).expanduser().absolute()) for name in section.files],
        section.field,
        section.tokenizer,
        section.validation,
        section.limit,
    ]
    state = [[str(file.path.absolute()), file.size, file.changed] for file in files]
    return _Request(_hash(asked)[:32], files, _hash(state), tokenizer, now)


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def _record_path(cache: Path, request: _Request) -> Path:
    return cache / "requests" / f"{request.key}.json"


def _read_record(cache: Path, request: _Request) -> dict[str, Any] | None:
    try:
        return json.loads(_record_path(cache, request).read_text(encoding="utf-8"))
    except (OSError, ValueError):  # none yet, or damaged: the sources are read instead
        return None


def _recall(cache: Path, request: _Request) -> Path | None:
    record = _read_record(cache, request)
    if record is None or not record["settled"]:
        return None
    if (record["state"], record["tokenizer"]) != (request.state, request.tokenizer):
        return None
    folder = cache / "tokens" / record["tokens"]
    return folder if folder.is_dir() else None


def _prepare(section: TextData, cache: Path, request: _Request, say: Progress) -> Path:
    """Read the sources and write what is missing in ``cache``; only the lock's owner does."""
    for name in ("tokens", "tokenizers", "requests"):
        (cache / name).mkdir(exist_ok=True)
    for left in [cache / "unpacked", *(cache / "tokens").glob(".*.tmp")]:
        shutil.rmtree(left, ignore_errors=True)  # of a process that was killed
    spool = cache / "unpacked"
    spool.mkdir()
    try:
        corpus = scan(request.files, section.field, spool, say)
        train, validation = split(corpus, section.validation, section.limit)
        tokenizer = _tokenizer(section, corpus, train, cache, say)
        folder = cache / "tokens" / shard_key(content_hash(corpus, train, validation), tokenizer)
        _tell_changes(_read_record(cache, request), request, folder, say)
        if not folder.is_dir():
            _write(section, corpus, train, validation, tokenizer, folder, say)
    finally:
        shutil.rmtree(spool, ignore_errors=True)
    newest = max(file.changed for file in request.files)
    record = {
        "state": request.state,
        "tokenizer": request.tokenizer,
        "tokens": folder.name,
        "settled": newest < request.time - _TICK,
    }
    write_whole(_record_path(cache, request), json.dumps(record))
    return folder


def _tell_changes(
    record: dict[str, Any] | None, request: _Request, folder: Path, say: Progress
) -> None:
    if record is None or record["tokens"] == folder.name:
        return
    tokenizer = record["tokenizer"] != request.tokenizer
    what = "the tokenizer's file" if tokenizer else "the source"
    say(f"{what} has changed since this data was last prepared", 0, 0)


def _tokenizer(
    section: TextData, corpus: Corpus, train: NDArray[np.int64], cache: Path, say: Progress
) -> tokenizers.Tokenizer:
    if section.tokenizer == "bytes":
        return tokenizers.ByteTokenizer()
    size = tokenizers.bpe_size(section.tokenizer)
    if size is None:
        return tokenizers.load(Path(section.tokenizer).expanduser(), section.tokenizer)
    path = cache / "tokenizers" / f"bpe-{size}-{content_hash(corpus, train)[:32]}.json"
    if not path.exists():
        made = tokenizers.train_bpe(_sample(corpus, train, say), size)
        write_whole(path, made.to_json())
    return tokenizers.load(path, section.tokenizer)


def _sample(corpus: Corpus, documents: NDArray[np.int64], say: Progress) -> Iterator[str]:
    total, done = min(int(corpus.size[documents].sum()), BPE_TEXT), 0
    for document in documents.tolist():
        if done >= total:
            return
        yield from corpus.text(document)
        done += int(corpus.size[document])
        say("training the tokenizer", min(done, total), total)


def _write(
    section: TextData,
    corpus: Corpus,
    train: NDArray[np.int64],
    validation: NDArray[np.int64],
    tokenizer: tokenizers.Tokenizer,
    folder: Path,
    say: Progress,
) -> None:
    parts = {"train": train, "validation": validation}
    facts = {
        "source": section.source,
        "sources": [
            {"name": file.name, "bytes": file.size, "sha256": found}
            for file, found in zip(corpus.files, corpus.hashes, strict=True)
        ],
    }
    write_shards(
        folder,
        tokenizer,
        {name: (corpus.text(i) for i in part.tolist()) for name, part in parts.items()},
        facts,
        sum(int(corpus.size[part].sum()) for part in parts.values()),
        say,
    )


def _open(section: TextData, folder: Path) -> Splits:
    manifest = read_manifest(folder)
    check_shards(folder, manifest)
    tokenizer = tokenizers.load(folder / "tokenizer.json", manifest["tokenizer"]["name"])
    apart = not section.cross_document_attention
    splits = {
        name: PackedText(
            TokenStream(folder, manifest["dtype"], entry),
            section.sequence,
            tokenizer.token_bytes,
            apart=apart,
            whole=name == "validation",
        )
        for name, entry in manifest["splits"].items()
    }
    tokens = manifest["splits"]["train"]["tokens"]
    if not len(splits["train"]):
        raise RecipeError(
            f"data.sequence: {section.sequence} is too long for the train split's {tokens} tokens"
        )
    return Splits(
        train=splits["train"],
        validation=splits["validation"],
        facts={"vocab": tokenizer.vocab},
        tokenizer=tokenizer,
        fingerprint=_hash([folder.name, section.sequence, apart]),
        description=_describe(section, manifest, len(splits["train"])),
    )


def _describe(section: TextData, manifest: dict[str, Any], samples: int) -> dict[str, Any]:
    splits = manifest["splits"]
    counts = {
        f"{name} {what}": entry[key]
        for name, entry in splits.items()
        for what, key in (("documents", "documents"), ("tokens", "tokens"), ("bytes", "text_bytes"))
    }
    exact = all(entry["text_bytes"] == entry["token_bytes"] for entry in splits.values())
    return {
        "source": section.source if section.source == "stdlib" else ", ".join(section.files),
        "tokenizer": f"{section.tokenizer}, {manifest['tokenizer']['vocab']} tokens",
        **counts,
        "sequence": section.sequence,
        "train samples": samples,
        # Tokenizers that change the text (lower case, added spaces) only allow an estimate.
        "bits per byte": "exact" if exact else "estimate: the tokenizer changes the text",
    }
