"""Checkpoints to folders in Hugging Face's layout and back, one tensor in memory at a time."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megalith import models
from megalith.checkpoint import catalogue, manifest, tensorfile
from megalith.checkpoint.consolidate import new_folder, whole_part, write_part
from megalith.checkpoint.read import Files, Reader
from megalith.checkpoint.store import read_entry
from megalith.checkpoint.tensorfile import DTYPES, Spec
from megalith.checkpoint.write import STATE, path_of
from megalith.core.errors import CheckpointError
from megalith.core.runs import RunFolder, write_whole
from megalith.data import tokenizers
from megalith.layout.pieces import Piece
from megalith.models.decoder.convert import HEAD, INDEX, SINGLE, Rule, check_tie, locate, rules
from megalith.models.decoder.convert_config import from_json, read_json, to_json
from megalith.recipe import Recipe, parse
from megalith.recipe.dump import dump
from megalith.recipe.families import DecoderConfig
from megalith.recipe.schema import TextData

CONFIG = "config.json"
_TOKENIZER = "tokenizer.json"


def to_hugging_face(path: Path, out: Path, shard_bytes: int = 5_000_000_000) -> None:
    """Write a decoder's checkpoint so that ``transformers`` loads it.

    Averaged weights are taken where the checkpoint has them. The run's tokenizer goes along.

    Args:
        path: the folder of the checkpoint, which has been checked.
        shard_bytes: a file grows up to this; one tensor alone may pass it.

    Raises:
        CheckpointError: the checkpoint is of another kind of model, or ``out`` is not empty.
        RecipeError: no model of ``transformers`` has this combination of settings.
    """
    config = _decoder_config(path)
    meta = dict(_on_meta(config).named_parameters())
    with ExitStack() as stack, new_folder(out) as folder:
        weights = _Weights(path, stack)
        weights.check(meta)
        content = to_json(config)
        dtype = weights.spec(next(iter(meta))).dtype
        content["torch_dtype"] = str(DTYPES[dtype]).removeprefix("torch.")
        tokenizer = _tokenizer(path)
        if tokenizer is not None:
            content["eos_token_id"] = tokenizers.load(tokenizer).end
            shutil.copyfile(tokenizer, folder / _TOKENIZER)
        found = {rule.theirs: rule for rule in rules(content["model_type"], meta)}
        shapes = {theirs: _shape(rule, meta) for theirs, rule in found.items()}
        specs = {
            theirs: Spec(weights.spec(rule.ours[0]).dtype, shapes[theirs])
            for theirs, rule in found.items()
        }
        shards = _shards(specs, shard_bytes)
        count = len(shards)
        names = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
        names = [SINGLE] if count == 1 else names
        for name, shard in zip(names, shards, strict=True):
            tensorfile.write(folder / name, shard, lambda theirs: weights.of(found[theirs]))
        if count > 1:
            index = {
                "metadata": {"total_size": sum(spec.bytes for spec in specs.values())},
                "weight_map": {
                    theirs: name
                    for name, shard in zip(names, shards, strict=True)
                    for theirs in shard
                },
            }
            write_whole(folder / INDEX, json.dumps(index, indent=2) + "\n")
        write_whole(folder / CONFIG, json.dumps(content, indent=2) + "\n")


def from_hugging_face(source: Path, out: Path) -> Path:
    """Write a run folder whose only checkpoint, of step 0, has the weights of ``source``.

    Values keep their dtype. Returns the folder of the checkpoint.

    Raises:
        CheckpointError: a tensor is missing, unexpected, damaged or of another shape, or ``out`` is
            not empty.
        RecipeError: the folder holds a model that the decoder does not cover.
    """
    raw = read_json(source)
    config = from_json(raw, str(source / CONFIG))
    recipe = _recipe(config, out)
    state = {"done": 0, "skipped": 0, "validation_loss": None, "best": None, "since": 0}
    state |= {"data": None, "recipe": recipe.model_dump(mode="json")}
    with _Released(source, raw["model_type"], _on_meta(config)) as weights, new_folder(out) as new:
        weights.check_tie()
        run = RunFolder(new)
        path = path_of(run.checkpoints, 0)
        path.mkdir(parents=True)
        written = write_part(path, "model", weights.specs, weights.read)
        written[STATE] = manifest.write_synced(path / STATE, json.dumps(state, indent=1) + "\n")
        tensors = {"model": whole_part("model", weights.specs)}
        manifest.write(path, written, tensors, ranks=1)
        write_whole(run.recipe, dump(recipe))
        if (source / _TOKENIZER).is_file():
            shutil.copyfile(source / _TOKENIZER, run.tokenizer)
    return path_of(RunFolder(out).checkpoints, 0)


class _Released:
    """Weights in Hugging Face's layout, as our tensors.

    Attributes:
        specs: of our tensors, in the dtype that theirs have.
    """

    def __init__(self, source: Path, kind: str, model: nn.Module) -> None:
        self._source, self._files = source, Files(source)
        meta = dict(model.named_parameters())
        self._rules = rules(kind, meta)
        self._stored = locate(source, kind, [rule.theirs for rule in self._rules])
        headers = catalogue.of_files(source, {place.file for place in self._stored.values()})
        self.specs: dict[str, Spec] = {}
        self._origins: dict[str, list[tuple[Rule, int]]] = {}
        for rule in self._rules:
            place = self._stored[rule.theirs]
            saved = headers[place.file.removesuffix(".safetensors")].get(place.name)
            shape = _shape(rule, meta)
            if saved is None:
                raise CheckpointError(f"{source}: '{place.name}' is missing in '{place.file}'")
            if saved.spec.shape != shape:
                raise CheckpointError(
                    f"{source}: '{place.name}' has shape {list(saved.spec.shape)}, "
                    f"the model's is {list(shape)}"
                )
            row = 0
            for name in rule.ours:
                self.specs[name] = Spec(saved.spec.dtype, tuple(meta[name].shape))
                self._origins.setdefault(name, []).append((rule, row))
                row += meta[name].shape[0]
        # What is no parameter, a router's bias, has no place in their layout and begins at zero.
        for name, value in model.state_dict().items():
            if name not in meta and value.device.type == "meta":
                self.specs[name] = tensorfile.spec(value, name)

    def __enter__(self) -> _Released:
        return self

    def __exit__(self, *error: object) -> None:
        self._files.close()

    def read(self, name: str) -> Tensor:
        """One of our tensors."""
        tensor = torch.empty(self.specs[name].shape, dtype=DTYPES[self.specs[name].dtype])
        if name not in self._origins:
            return tensor.zero_()
        for rule, row in self._origins[name]:
            rows = slice(row, row + tensor.shape[0])
            if rule.expert is not None:
                tensor[rule.expert].copy_(self._theirs(rule.theirs, slice(None)))
            elif rule.transposed:
                tensor.copy_(self._theirs(rule.theirs, slice(None), rows).t())
            else:
                tensor.copy_(self._theirs(rule.theirs, rows))
        return tensor

    def check_tie(self) -> None:
        """A head that is stored although it is tied equals the embedding."""
        embedding = self._rules[0].theirs
        if HEAD in self._stored and HEAD not in {rule.theirs for rule in self._rules}:
            every = slice(None)
            check_tie(self._source, self._theirs(HEAD, every), self._theirs(embedding, every))

    def _theirs(self, name: str, *slices: slice) -> Tensor:
        place = self._stored[name]
        return self._files.read(place.file, place.name, slices)


class _Weights:
    """A checkpoint's weights as their layout has them."""

    def __init__(self, path: Path, stack: ExitStack) -> None:
        self._path = path
        parts = [part for part in ("ema", "model") if part in manifest.tensors(path)]
        self._readers = [stack.enter_context(Reader(path, part)) for part in parts]

    def check(self, meta: Mapping[str, Tensor]) -> None:
        """The checkpoint has these parameters, and nothing else that counts."""
        for name, parameter in meta.items():
            if self.spec(name).shape != tuple(parameter.shape):
                raise CheckpointError(
                    f"{self._path}: '{name}' has shape {list(self.spec(name).shape)}, "
                    f"its recipe's model {list(parameter.shape)}"
                )
        for reader in self._readers:
            for name in reader.saved.keys() - meta.keys():
                if reader.tensor(name).any():
                    raise CheckpointError(
                        f"{self._path}: '{name}' has no place in Hugging Face's layout"
                    )

    def spec(self, name: str) -> Spec:
        """Of one of our tensors."""
        return self._reader(name).saved[name].spec

    def of(self, rule: Rule) -> Tensor:
        """One of their tensors."""
        parts = [self._part(name, rule.expert) for name in rule.ours]
        tensor = parts[0] if len(parts) == 1 else torch.cat(parts)
        return tensor.t() if rule.transposed else tensor

    def _part(self, name: str, expert: int | None) -> Tensor:
        reader = self._reader(name)
        if expert is None:
            return reader.tensor(name)
        shape = reader.saved[name].spec.shape
        local = reader.empty(name, (1, *shape[1:]))
        reader.copy(name, Piece(local, shape, (expert, *(0 for _ in shape[1:]))))
        return local[0]

    def _reader(self, name: str) -> Reader:
        for reader in self._readers:
            if name in reader.saved:
                return reader
        raise CheckpointError(f"{self._path}: '{name}' of its recipe's model is missing")


def _decoder_config(path: Path) -> DecoderConfig:
    state: dict[str, Any] = read_entry(path).state
    if "recipe" not in state:
        raise CheckpointError(f"{path}: its {STATE} has no recipe, so its model is not known")
    config = parse(state["recipe"]).model
    if not isinstance(config, DecoderConfig):
        kind = type(config).__name__.removesuffix("Model").removesuffix("Config")
        raise CheckpointError(
            f"{path}: holds a {kind} model, and only a decoder has a place in Hugging Face's "
            "layout; 'megalith export' writes others"
        )
    return config.model_copy(update={"path": None})  # the checkpoint has the weights


def _tokenizer(path: Path) -> Path | None:
    """Of the run that the checkpoint belongs to."""
    checkpoints = path.absolute().parent
    run = RunFolder(checkpoints.parent)
    return run.tokenizer if checkpoints == run.checkpoints and run.tokenizer.is_file() else None


def _on_meta(config: DecoderConfig) -> nn.Module:
    return models.build(config, 0, "meta")


def _recipe(config: DecoderConfig, out: Path) -> Recipe:
    values = {"model": config.model_dump(mode="json"), "run": {"dir": str(out)}}
    sequence = min(config.context, TextData.model_fields["sequence"].default)
    return parse({**values, "data": {"sequence": sequence}})


def _shape(rule: Rule, meta: Mapping[str, Tensor]) -> tuple[int, ...]:
    whole = torch.cat(rule.of(meta))
    return tuple((whole.t() if rule.transposed else whole).shape)


def _shards(specs: Mapping[str, Spec], limit: int) -> list[dict[str, Spec]]:
    shards: list[dict[str, Spec]] = [{}]
    size = 0
    for name, spec in specs.items():
        if shards[-1] and size + spec.bytes > limit:
            shards.append({})
            size = 0
        shards[-1][name] = spec
        size += spec.bytes
    return shards
