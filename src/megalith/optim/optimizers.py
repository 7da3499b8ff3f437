"""Optimizers and their parameter groups."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megalith.core import imports
from megalith.core.errors import RecipeError
from megalith.layout.units import models, named_parameters, units
from megalith.recipe.schema import OptimSection

Group = dict[str, Any]
_NUMBER = ":number"


class Optimizers:
    """One or more torch optimizers that step together.

    Attributes:
        parts: the optimizers; every group holds ``base_lr``, its learning rate at factor 1.
        names: each parameter's name in the model.
    """

    def __init__(self, parts: Iterable[torch.optim.Optimizer], names: dict[Tensor, str]) -> None:
        self.parts = list(parts)
        self.names = names
        for group in self.groups:
            group["base_lr"] = float(group["lr"])

    @property
    def groups(self) -> list[Group]:
        """The parameter groups of all parts."""
        return [group for part in self.parts for group in part.param_groups]

    def set_factor(self, factor: float) -> None:
        """Set each group's learning rate to ``factor`` times its own."""
        for group in self.groups:
            group["lr"] = group["base_lr"] * factor

    def step(self) -> None:
        """Update the parameters from their gradients."""
        for part in self.parts:
            part.step()

    def zero_grad(self) -> None:
        """Drop the gradients; they take no memory until the next backward."""
        for part in self.parts:
            part.zero_grad(set_to_none=True)

    def state_tensors(self) -> dict[str, Tensor]:
        """State as ``"<parameter>/<key>"``; a number is a float64 scalar ``"<key>:number"``."""
        found: dict[str, Tensor] = {}
        for part in self.parts:
            for parameter, state in part.state.items():
                for key, value in state.items():
                    if value is None:
                        continue
                    if isinstance(value, int | float):
                        key, value = f"{key}{_NUMBER}", torch.tensor(value, dtype=torch.float64)
                    if not isinstance(value, Tensor):
                        raise RecipeError(
                            f"optim: state '{key}' of {type(part).__name__} is a "
                            f"{type(value).__name__}; only tensors and numbers can be saved"
                        )
                    found[f"{self.names[parameter]}/{key}"] = value
        return found

    def load_state_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Put back what :meth:`state_tensors` gave, or a rank's part of it, bit for bit."""
        by_name = {name: parameter for parameter, name in self.names.items()}
        owner = {p: part for part in self.parts for g in part.param_groups for p in g["params"]}
        for path, value in tensors.items():
            name, _, key = path.rpartition("/")
            parameter = by_name[name]
            kept: Any = value.clone()
            if key.endswith(_NUMBER):
                key, kept = key.removesuffix(_NUMBER), value.item()
            elif value.ndim:
                # Scalars stay where they were made: torch keeps most counters on the host.
                kept = _like(parameter, kept.to(parameter.device))
            owner[parameter].state[parameter][key] = kept


def _like(parameter: Tensor, value: Tensor) -> Tensor:
    """State in the shape of a sharded parameter's part is sharded as the parameter is."""
    if not isinstance(parameter, DTensor) or isinstance(value, DTensor):
        return value
    if value.shape != parameter.to_local().shape:
        return value
    return DTensor.from_local(
        value,
        parameter.device_mesh,
        parameter.placements,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def build(section: OptimSection, model: nn.Module) -> Optimizers:
    """The recipe's optimizer over ``model``'s trainable parameters.

    Norms, biases, embeddings and other vectors are not decayed unless ``decay_all``. AdamW is
    Loshchilov and Hutter 2019 (torch, fused); Muon is Jordan et al. 2024 (torch's, with AdamW's
    learning rate by matching the update's size, Liu et al. 2025) on the matrices of the repeated
    blocks, the rest by AdamW; Adafactor is Shazeer and Stern 2018 (torch's).

    Raises:
        RecipeError: a group's pattern matches no parameter, or your factory's arguments are off.
    """
    names: dict[Tensor, str] = {p: n for n, p in named_parameters(model) if p.requires_grad}
    if not names:
        raise RecipeError("model: no parameter requires a gradient, so there is nothing to train")
    groups = _groups(section, model, names)
    if section.factory is not None:
        optimizer = imports.resolve(section.factory, "optim.factory")(
            groups, lr=section.lr, **section.args
        )
        return Optimizers([optimizer], names)
    try:
        return Optimizers(_built_in(section, groups, model), names)
    except TypeError as error:
        raise RecipeError(f"optim.args: {error}") from error


def _built_in(
    section: OptimSection, groups: list[Group], model: nn.Module
) -> list[torch.optim.Optimizer]:
    if section.name == "sgd":
        return [
            torch.optim.SGD(
                groups,
                lr=section.lr,
                momentum=section.momentum,
                nesterov=section.nesterov,
                # torch has no fused rule for sharded tensors here; it has for AdamW.
                fused=not any(isinstance(p, DTensor) for g in groups for p in g["params"]),
                **section.args,
            )
        ]
    if section.name == "adafactor":
        return [torch.optim.Adafactor(groups, lr=section.lr, **section.args)]
    if section.name == "muon":
        matrices, rest = _split_for_muon(groups, model)
        muon = torch.optim.Muon(
            matrices,
            lr=section.lr,
            momentum=section.momentum,
            adjust_lr_fn="match_rms_adamw",
            **section.args,
        )
        return [muon, *([_adamw(section, rest)] if rest else [])]
    return [_adamw(section, groups, **section.args)]


def _adamw(section: OptimSection, groups: list[Group], **args: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(
        groups,
        lr=section.lr,
        betas=section.betas,
        eps=section.eps,
        **{"fused": True, **args},
    )
    _allocate(optimizer)
    return optimizer


def _allocate(optimizer: torch.optim.Optimizer) -> None:
    """Give AdamW its moments now, as zeros, which is what its first step would do.

    Made during the first step they would lie scattered between gradients that are freed right
    after, and the heap would keep the holes.
    """
    for group in optimizer.param_groups:
        amsgrad = group.get("amsgrad", False)
        for parameter in group["params"]:
            host = parameter if group["fused"] or group["capturable"] else torch.tensor(0.0)
            state = optimizer.state[parameter]
            state["step"] = torch.zeros((), dtype=torch.float32, device=host.device)
            for name in ("exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if amsgrad else [])):
                state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)


def _groups(section: OptimSection, model: nn.Module, names: dict[Tensor, str]) -> list[Group]:
    """Parameters by (learning rate, decay) and by what divides them, in the model's order."""
    undecayed = set() if section.decay_all else _undecayed(model)
    unused = {group.match for group in section.groups}
    found: dict[tuple[float, float, Any], list[Tensor]] = {}
    for parameter, name in names.items():
        lr = section.lr
        decay = 0.0 if parameter in undecayed else section.weight_decay
        for group in section.groups:
            if fnmatchcase(name, group.match):
                unused.discard(group.match)
                lr = group.lr if group.lr is not None else lr
                decay = group.weight_decay if group.weight_decay is not None else decay
                break
        # Fused updates work on tensors of one kind and one device mesh at a time.
        kind = getattr(parameter, "device_mesh", None)
        found.setdefault((lr, decay, kind), []).append(parameter)
    if unused:
        example = next(iter(names.values()))
        raise RecipeError(
            f"optim.groups: '{sorted(unused)[0]}' matches no parameter (names look like {example})"
        )
    return [
        {"params": parameters, "lr": lr, "weight_decay": decay}
        for (lr, decay, _), parameters in found.items()
    ]


def _undecayed(model: nn.Module) -> set[Tensor]:
    """Vectors (norms, biases) and every weight that an embedding looks up."""
    modules = [module for part in models(model) for module in part.modules()]
    embeddings = {m.weight for m in modules if isinstance(m, nn.Embedding)}
    return {p for m in modules for p in m.parameters(recurse=False) if p.ndim < 2} | embeddings


def _split_for_muon(groups: list[Group], model: nn.Module) -> tuple[list[Group], list[Group]]:
    """Muon orthogonalises the matrices of the repeated parts; embeddings and head stay outside."""
    inside = {p for unit in units(model).values() for p in unit.parameters() if p.ndim == 2}

    def part(matrices: bool) -> list[Group]:
        chosen = [
            {**group, "params": [p for p in group["params"] if (p in inside) == matrices]}
            for group in groups
        ]
        return [group for group in chosen if group["params"]]

    if not (matrices := part(True)):
        raise RecipeError("optim.name: muon needs repeated parts with weight matrices; none here")
    return matrices, part(False)
