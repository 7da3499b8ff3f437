"""Tensor parallelism: each rank holds a part of every matrix (Shoeybi et al. 2019, Megatron-LM).

A table of name patterns says what each part of a model is:

==============  ==========================================================================
``column``      a linear layer whose outputs are divided
``row``         a linear layer whose inputs are divided; its output is summed
``vocabulary``  an embedding or head with its rows divided (an uneven last part is allowed)
``gathered``    a norm before column layers: its output is whole on every rank
``sequence``    an output that is added to the residual stream
``own``         a part whose input is divided by heads: its gradients differ and are summed
``heads``       attention: its dropout differs from rank to rank
==============  ==========================================================================

With *sequence parallelism* (Korthikanti et al. 2022, section 4.2) the residual stream between
``row`` and ``gathered`` is divided along the sequence, and norms and dropouts work on a part each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from megalith.core import devices, seeds
from megalith.core.errors import RecipeError
from megalith.layout import collectives

SEQUENCE = 1  # of [batch, sequence, width]


@dataclass
class Divided:
    """What tensor parallelism did to a model's parameters.

    Attributes:
        boxes: of the divided ones: shape of the whole, and where this rank's part begins.
        partial: whole ones whose gradients are the sum of what the ranks find.
    """

    boxes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    partial: list[str] = field(default_factory=list)


def apply(
    model: nn.Module,
    table: Mapping[str, str],
    group: dist.ProcessGroup,
    *,
    sequence: bool,
    column_copies: bool = False,
) -> Divided:
    """Divide the parts of ``model`` that ``table`` names, in place.

    Args:
        table: kind by shell pattern on module names.
        sequence: with sequence parallelism.
        column_copies: column layers take care of their input's gradient themselves, for models
            whose table has no ``gathered`` parts.

    Raises:
        RecipeError: a size does not divide over the group, or a pattern names another kind of part.
    """
    divided = Divided()
    seen: dict[Tensor, str] = {}
    for name, module in model.named_modules():
        kind = next((kind for pattern, kind in table.items() if _names(pattern, name)), None)
        if kind is None:
            continue
        for key, parameter in module.named_parameters(recurse=False):
            if parameter in seen and kind in ("column", "row"):
                raise RecipeError(
                    f"layout.split: '{name}' shares its weight with '{seen[parameter]}'; "
                    "a shared weight cannot be divided by name"
                )
            seen[parameter] = name
            _divide(divided, module, f"{name}.{key}", key, kind, group, sequence)
        _wrap(module, kind, group, sequence, column_copies)
    return divided


def _names(pattern: str, name: str) -> bool:
    return fnmatchcase(name, pattern) and name.count(".") == pattern.count(".")


def _divide(
    divided: Divided,
    module: nn.Module,
    name: str,
    key: str,
    kind: str,
    group: dist.ProcessGroup,
    sequence: bool,
) -> None:
    """Keep this rank's part of one parameter, or note that its gradient will be partial."""
    dim = {"column": 0, "vocabulary": 0, "row": 1}.get(kind)
    parameter: Tensor = getattr(module, key)
    if kind == "own" or (sequence and (kind == "gathered" or (kind, key) == ("row", "bias"))):
        divided.partial.append(name)
    if dim is None or (kind, key) == ("row", "bias"):
        return
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    size = parameter.shape[dim]
    share = -(-size // ranks)
    if (kind != "vocabulary" and size % ranks) or share * (ranks - 1) >= size:
        what = {"column": "outputs", "row": "inputs", "vocabulary": "rows"}[kind]
        raise RecipeError(f"layout.tensor: {ranks} ranks do not divide the {size} {what} of {name}")
    first = rank * share
    part = parameter.detach().narrow(dim, first, min(share, size - first)).clone()
    setattr(module, key, nn.Parameter(part, requires_grad=parameter.requires_grad))
    start = [0] * parameter.ndim
    start[dim] = first
    divided.boxes[name] = (tuple(parameter.shape), tuple(start))


def _wrap(
    module: nn.Module, kind: str, group: dist.ProcessGroup, sequence: bool, column_copies: bool
) -> None:
    """Give one part the communication that its kind needs."""
    if kind == "gathered":
        after = partial(collectives.gather_used, dim=SEQUENCE, group=group)
        whole = partial(collectives.copy, group=group)
        _after(module, after if sequence else whole)
    elif kind == "sequence" and sequence:
        _after(module, partial(collectives.split, dim=SEQUENCE, group=group))
    elif kind == "row":
        _expect(module, nn.Linear, kind)
        module.forward = _row(module, group, sequence)
    elif kind == "vocabulary" and isinstance(module, nn.Embedding):
        module.forward = _lookup(module, group, sequence)  # pyright: ignore
    elif kind == "column":
        _expect(module, nn.Linear, kind)
        if column_copies:
            module.forward = _column(module, group)
    elif kind == "heads" and not sequence:
        module.forward = _own_masks(module, dist.get_rank(group))


def _after(module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    inner = module.forward

    def forward(x: Tensor) -> Tensor:
        return change(inner(x))

    module.forward = forward


def _sum(sequence: bool) -> Callable[[Tensor, dist.ProcessGroup], Tensor]:
    if sequence:
        return lambda x, group: collectives.scatter(x, SEQUENCE, group)
    return collectives.total


def _row(module: Any, group: dist.ProcessGroup, sequence: bool) -> Callable[[Tensor], Tensor]:
    add_up = _sum(sequence)

    def forward(x: Tensor) -> Tensor:
        total = add_up(F.linear(x, module.weight), group)
        return total if module.bias is None else total + module.bias

    return forward


def _column(module: Any, group: dist.ProcessGroup) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        return F.linear(collectives.copy(x, group), module.weight, module.bias)

    return forward


def _lookup(module: Any, group: dist.ProcessGroup, sequence: bool) -> Callable[[Tensor], Tensor]:
    add_up = _sum(sequence)
    first = dist.get_rank(group) * -(-module.num_embeddings // dist.get_world_size(group))

    def forward(tokens: Tensor) -> Tensor:
        weight = module.weight
        local = tokens - first
        here = (local >= 0) & (local < weight.shape[0])
        found = F.embedding(local.clamp(0, weight.shape[0] - 1), weight)
        return add_up(found * here.unsqueeze(-1), group)

    return forward


def drawn() -> int:
    """A number that all ranks of a group draw alike."""
    return int(torch.randint(1 << 62, ()))


def _own_masks(module: nn.Module, rank: int) -> Callable[..., Any]:
    """Draw dropout from a generator of this rank's; the shared one moves alike on all ranks."""
    inner = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not module.training or not kwargs.get("dropout"):
            return inner(*args, **kwargs)
        shared = drawn()
        device = kwargs["query"].device if "query" in kwargs else args[0].device
        others = [device.index] if devices.is_accelerator(device) else []
        with torch.random.fork_rng(devices=others, device_type=_forked(device)):
            seeds.set_default("tensor", shared, rank)
            return inner(*args, **kwargs)

    return forward


def _forked(device: torch.device) -> str:
    """A device type that ``fork_rng`` takes; the host's state is kept in any case."""
    accelerator = torch.accelerator.current_accelerator()
    return accelerator.type if accelerator is not None else device.type


def _expect(module: nn.Module, kind: type[nn.Module], word: str) -> None:
    if not isinstance(module, kind):
        raise RecipeError(
            f"layout.split: '{word}' is for {kind.__name__} layers, not {type(module).__name__}"
        )


def check_table(model: nn.Module, table: Mapping[str, str]) -> None:
    """Refuse a table of the user's with a pattern that fits nothing, or fits a shared weight.

    Raises:
        RecipeError: the pattern, and a name that there is.
    """
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    holders: dict[Tensor, list[str]] = {}
    for name, module in model.named_modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                holders.setdefault(parameter, []).append(name)
    for found in holders.values():
        named = [name for name in found if any(_names(pattern, name) for pattern in table)]
        if named and len(found) > 1:
            other = next(name for name in found if name != named[0])
            raise RecipeError(
                f"layout.split: '{named[0]}' shares its weight with '{other}'; a shared weight "
                "cannot be divided by name"
            )
    for pattern in table:
        if not any(_names(pattern, name) for name in names):
            example = names[0] if names else "none"
            raise RecipeError(
                f"layout.split: '{pattern}' matches no linear layer (names look like {example})"
            )
