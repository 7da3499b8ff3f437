"""Weights in Hugging Face's layout (safetensors, single or sharded with an index), both ways."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from megalith.core.errors import CheckpointError
from megalith.core.runs import write_whole
from megalith.models.decoder.convert_config import read_json, to_json
from megalith.recipe.families import DecoderConfig

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
HEAD = "lm_head.weight"
_SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
# Constants that older versions of transformers stored beside the weights.
_CONSTANT = re.compile(r"\.attn\.(masked_)?bias$|rotary_emb\.inv_freq$")

_LLAMA = {
    "model.embed_tokens": ("embedding",),
    "model.norm": ("norm",),
    "lm_head": ("head",),
    "model.layers.#.input_layernorm": ("blocks.#.attention_norm",),
    "model.layers.#.self_attn.q_proj": ("blocks.#.attention.query",),
    "model.layers.#.self_attn.k_proj": ("blocks.#.attention.key",),
    "model.layers.#.self_attn.v_proj": ("blocks.#.attention.value",),
    "model.layers.#.self_attn.o_proj": ("blocks.#.attention.output",),
    "model.layers.#.self_attn.q_norm": ("blocks.#.attention.query_norm",),
    "model.layers.#.self_attn.k_norm": ("blocks.#.attention.key_norm",),
    "model.layers.#.post_attention_layernorm": ("blocks.#.mlp_norm",),
    "model.layers.#.mlp.gate_proj": ("blocks.#.mlp.gate",),
    "model.layers.#.mlp.up_proj": ("blocks.#.mlp.up",),
    "model.layers.#.mlp.down_proj": ("blocks.#.mlp.down",),
}
# Experts (the last #) are tensors of their own there, and slices of one stack here.
_QWEN_EXPERTS = {
    "model.layers.#.mlp.gate": ("blocks.#.mlp.router",),
    "model.layers.#.mlp.experts.#.gate_proj": ("blocks.#.mlp.experts.gate",),
    "model.layers.#.mlp.experts.#.up_proj": ("blocks.#.mlp.experts.up",),
    "model.layers.#.mlp.experts.#.down_proj": ("blocks.#.mlp.experts.down",),
}
_MIXTRAL_EXPERTS = {
    "model.layers.#.block_sparse_moe.gate": ("blocks.#.mlp.router",),
    "model.layers.#.block_sparse_moe.experts.#.w1": ("blocks.#.mlp.experts.gate",),
    "model.layers.#.block_sparse_moe.experts.#.w3": ("blocks.#.mlp.experts.up",),
    "model.layers.#.block_sparse_moe.experts.#.w2": ("blocks.#.mlp.experts.down",),
}
_GPT2 = {
    "transformer.wte": ("embedding",),
    "transformer.wpe": ("positions",),
    "transformer.ln_f": ("norm",),
    "lm_head": ("head",),
    "transformer.h.#.ln_1": ("blocks.#.attention_norm",),
    "transformer.h.#.attn.c_attn": tuple(
        f"blocks.#.attention.{part}" for part in ("query", "key", "value")
    ),
    "transformer.h.#.attn.c_proj": ("blocks.#.attention.output",),
    "transformer.h.#.ln_2": ("blocks.#.mlp_norm",),
    "transformer.h.#.mlp.c_fc": ("blocks.#.mlp.up",),
    "transformer.h.#.mlp.c_proj": ("blocks.#.mlp.down",),
}


@dataclass(frozen=True)
class Rule:
    """One tensor of theirs and the parameters of ours that it holds, stacked along their rows.

    Attributes:
        transposed: GPT-2 keeps its matrices as ``[in, out]`` (``Conv1D``).
        expert: the tensor is this slice of ours.
    """

    theirs: str
    ours: tuple[str, ...]
    transposed: bool = False
    expert: int | None = None

    def of(self, parameters: Mapping[str, Tensor]) -> list[Tensor]:
        """Our tensors, as views."""
        found = [parameters[name].detach() for name in self.ours]
        return found if self.expert is None else [stack[self.expert] for stack in found]


def rules(kind: str, parameters: Mapping[str, Tensor]) -> list[Rule]:
    """How the decoder's ``parameters`` are named and laid out in a model of type ``kind``.

    The first rule is the embedding's.

    Raises:
        CheckpointError: a parameter, such as one of an attention core of the user's, has no place.
    """
    found: list[Rule] = []
    layers = 1 + max(
        (int(name.split(".")[1]) for name in parameters if name.startswith("blocks.")), default=-1
    )
    for theirs, ours in _names(kind).items():
        for layer in range(layers) if "#" in theirs else (0,):
            if theirs.count("#") > 1:
                names = tuple(name.replace("#", str(layer)) for name in ours)
                stack = parameters.get(names[0], ())
                place = theirs.replace("#", str(layer), 1) + ".weight"
                found += [
                    Rule(place.replace("#", str(expert)), names, expert=expert)
                    for expert in range(len(stack))
                ]
                continue
            for leaf in ("weight", "bias"):
                names = tuple(f"{name}.{leaf}".replace("#", str(layer)) for name in ours)
                if names[0] not in parameters:
                    continue
                conv = kind == "gpt2" and ".c_" in theirs and leaf == "weight"
                found.append(Rule(f"{theirs}.{leaf}".replace("#", str(layer)), names, conv))
    homeless = set(parameters).difference(*(rule.ours for rule in found))
    if homeless:
        raise CheckpointError(f"'{min(homeless)}' has no place in Hugging Face's layout ({kind})")
    return found


def _names(kind: str) -> dict[str, tuple[str, ...]]:
    further = {"mixtral": _MIXTRAL_EXPERTS, "qwen3_moe": _QWEN_EXPERTS}
    return _GPT2 if kind == "gpt2" else _LLAMA | further.get(kind, {})


@torch.no_grad()
def load_weights(module: nn.Module, config: DecoderConfig) -> None:
    """Fill ``module`` from the safetensors in ``config.path``, tensor by tensor.

    Args:
        module: a decoder on any device and in any dtype; values are converted.

    Raises:
        CheckpointError: a file or tensor is missing, damaged, unexpected or of another shape.
        RecipeError: the folder holds a model that the decoder does not cover.
    """
    assert config.path is not None
    folder = Path(config.path)
    kind = read_json(folder)["model_type"]
    parameters = dict(module.named_parameters())
    wanted = {rule.theirs: rule for rule in rules(kind, parameters)}
    stored = locate(folder, kind, list(wanted))
    with ExitStack() as stack:
        opened = {
            name: _open(stack, folder / name)
            for name in sorted({place.file for place in stored.values()})
        }

        def read(theirs: str) -> Tensor:
            place = stored[theirs]
            return _read(opened[place.file], place.name, folder / place.file)

        for theirs, rule in wanted.items():
            what = f"{folder}: '{stored[theirs].name}'"
            _copy(what, read(theirs), rule.of(parameters), rule.transposed)
        if HEAD in stored and HEAD not in wanted:
            check_tie(folder, read(HEAD), read(next(iter(wanted))))


@dataclass(frozen=True)
class Stored:
    """Where a tensor lies: its file in the folder, and the name it has there."""

    file: str
    name: str


def locate(folder: Path, kind: str, wanted: Sequence[str]) -> dict[str, Stored]:
    """Where each tensor of a model of type ``kind`` lies.

    Args:
        wanted: their names, see :func:`rules`. A head that is stored although it is tied, and so
            not wanted, is found all the same.

    Raises:
        CheckpointError: one is missing or unexpected, or there are no weights.
    """
    files = _files(folder)
    stored = {_canonical(kind, name): name for name in files if not _CONSTANT.search(name)}
    tied = {HEAD} if HEAD in stored and HEAD not in wanted else set()
    _same_names(folder, set(wanted), set(stored) - tied)
    return {theirs: Stored(files[name], name) for theirs, name in stored.items()}


def check_tie(folder: Path, head: Tensor, embedding: Tensor) -> None:
    """A head that is stored beside the embedding it is tied to must equal it.

    Raises:
        CheckpointError: it does not.
    """
    if not torch.equal(head, embedding):
        raise CheckpointError(
            f"{folder}: config.json ties the head to the embedding, but the two differ"
        )


def save_pretrained(
    module: nn.Module,
    config: DecoderConfig,
    folder: str | Path,
    *,
    max_shard_bytes: int = 5_000_000_000,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Write ``config.json`` and the weights, so that ``transformers`` loads them.

    A tied head is written once, as the embedding. Files of an earlier export are replaced.

    Args:
        module: a decoder; its weights keep their dtype.
        max_shard_bytes: a file grows up to this; one tensor alone may pass it.
        extra: further entries of ``config.json``, such as ``{"eos_token_id": 2}``.

    Raises:
        RecipeError: no model of ``transformers`` has this combination of settings.
        CheckpointError: a parameter, or a learned bias of a router, has no place in the layout.
    """
    folder = Path(folder)
    for name, buffer in module.named_buffers():
        if name.endswith(".mlp.bias") and buffer.any():
            raise CheckpointError(f"'{name}' has no place in Hugging Face's layout")
    parameters = dict(module.named_parameters())
    content = to_json(config)
    dtype = str(next(iter(parameters.values())).dtype).removeprefix("torch.")
    content |= {"torch_dtype": dtype, **(extra or {})}
    folder.mkdir(parents=True, exist_ok=True)
    temporary: list[Path] = []
    weights: list[tuple[str, int]] = []
    total = 0
    for shard in _shards(rules(content["model_type"], parameters), parameters, max_shard_bytes):
        path = folder / f".shard-{len(temporary) + 1}.tmp"
        save_file(shard, path, metadata={"format": "pt"})
        weights += [(name, len(temporary)) for name in shard]
        total += sum(tensor.nbytes for tensor in shard.values())
        temporary.append(path)
    for old in folder.glob("model*.safetensors*"):
        if old.name in (SINGLE, INDEX) or _SHARD.fullmatch(old.name):
            old.unlink()
    count = len(temporary)
    names = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    names = [SINGLE] if count == 1 else names
    for path, name in zip(temporary, names, strict=True):
        path.replace(folder / name)
    if count > 1:
        index = {
            "metadata": {"total_size": total},
            "weight_map": {name: names[shard] for name, shard in weights},
        }
        write_whole(folder / INDEX, json.dumps(index, indent=2) + "\n")
    write_whole(folder / "config.json", json.dumps(content, indent=2) + "\n")


def _shards(
    found: list[Rule], parameters: Mapping[str, Tensor], limit: int
) -> Iterator[dict[str, Tensor]]:
    """Tensors in their layout, in dicts of at most ``limit`` bytes; one dict is held at a time."""
    shard: dict[str, Tensor] = {}
    size = 0
    for rule in found:
        parts = [part.cpu() for part in rule.of(parameters)]
        tensor = parts[0] if len(parts) == 1 else torch.cat(parts)
        tensor = (tensor.t() if rule.transposed else tensor).contiguous()
        if rule.expert is not None:
            tensor = tensor.clone()  # safetensors refuses views of one memory
        if shard and size + tensor.nbytes > limit:
            yield shard
            shard, size = {}, 0
        shard[rule.theirs] = tensor
        size += tensor.nbytes
    yield shard


def _files(folder: Path) -> dict[str, str]:
    """The file that holds each stored tensor."""
    if (folder / INDEX).exists():
        try:
            return dict(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"])
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{folder / INDEX} is not an index of weights") from error
    if not (folder / SINGLE).exists():
        hint = "; pickled .bin files are never loaded" if list(folder.glob("*.bin")) else ""
        raise CheckpointError(f"{folder} has neither {SINGLE} nor {INDEX}{hint}")
    with ExitStack() as stack:
        return dict.fromkeys(_open(stack, folder / SINGLE).keys(), SINGLE)


def _open(stack: ExitStack, path: Path) -> Any:
    try:
        return stack.enter_context(safe_open(path, framework="pt"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing") from error
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error


def _read(file: Any, name: str, path: Path) -> Tensor:
    try:
        return file.get_tensor(name)
    except SafetensorError as error:
        raise CheckpointError(f"{path} does not hold '{name}': {error}") from error


def _canonical(kind: str, name: str) -> str:
    """The name with the prefix that headless models (and GPT-2's first release) leave out."""
    prefix = "transformer." if kind == "gpt2" else "model."
    return name if name.startswith((prefix, "lm_head.")) else prefix + name


def _same_names(folder: Path, wanted: set[str], stored: set[str]) -> None:
    wrong = [
        f"{len(names)} {what}, such as '{min(names)}'"
        for what, names in (("missing", wanted - stored), ("unexpected", stored - wanted))
        if names
    ]
    if wrong:
        raise CheckpointError(f"{folder}: tensors are not those of the model: {'; '.join(wrong)}")


def _copy(what: str, tensor: Tensor, targets: list[Tensor], transposed: bool) -> None:
    rows = [target.shape[0] for target in targets]
    expected = [sum(rows), *targets[0].shape[1:]]
    expected = expected[::-1] if transposed else expected
    if list(tensor.shape) != expected:
        raise CheckpointError(f"{what} has shape {list(tensor.shape)}, the model's is {expected}")
    parts = (tensor.t() if transposed else tensor).split(rows)
    for target, part in zip(targets, parts, strict=True):
        target.copy_(part)
