"""The one place where a model is wrapped, in the one order.

Cut into stages, divide (tensor, experts, context), recompute, compile, share out over data ranks,
and only then fill with weights: no rank ever holds more than its part.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megalith.core import seeds
from megalith.core.errors import RecipeError
from megalith.layout import (
    checkpointing,
    compile,
    context,
    data,
    expert,
    norms,
    pipeline,
    stages,
    tensor,
    vocabulary,
)
from megalith.layout.mesh import AXES, Mesh, single
from megalith.layout.pieces import Piece, local, offset
from megalith.layout.precision import Precision
from megalith.layout.units import Stages, models, named_parameters, named_tensors, units
from megalith.recipe.schema import LayoutSection, TrainSection

Box = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass
class Spread:
    """A model that is spread over a mesh, and what its update needs from the mesh.

    Attributes:
        model: this rank's part: the module, or several stages of a pipeline.
        syncs: of the model, or of each of its stages: sums gradients over the ranks that have their
            own samples.
        boxes: of divided parameters: shape of the whole, and where this rank's part begins.
        partial: parameters whose gradients are summed over the tensor-parallel ranks.
        divided_by: the axis that divides each of them.
        tied: parameters of the first stage that the last has too, if this rank holds one of both.
        ends: the ranks that hold the first and the last stage beside this one.
    """

    model: nn.Module
    mesh: Mesh = field(default_factory=single)
    section: LayoutSection = field(default_factory=LayoutSection)
    syncs: list[data.Sync] = field(default_factory=lambda: [data.Sync()])
    pipeline: pipeline.Pipeline | None = None
    boxes: dict[str, Box] = field(default_factory=dict)
    divided_by: dict[str, str] = field(default_factory=dict)
    partial: list[str] = field(default_factory=list)
    tied: list[str] = field(default_factory=list)
    ends: dist.ProcessGroup | None = None

    def settle(
        self,
        device: torch.device,
        fill: Callable[[nn.Module, dict[str, Piece]], None] | None = None,
    ) -> Spread:
        """Put weights into a model that was spread on the ``meta`` device, and watch them.

        Args:
            fill: puts weights into each parameter's and buffer's piece; left out: they are there.
        """
        if fill is not None:
            host = torch.device("cpu") if self.section.offload else device
            for part in models(self.model):
                part.to_empty(device=host)
            fill(self.model, self.pieces())
        if not self.mesh.spread("shard"):  # what watches parameters needs them as they will stay
            self.syncs = [_repeat(self, part) for part in models(self.model)]
        return self

    def run(
        self,
        micros: int,
        objective: Callable[[nn.Module, int], Tensor],
        hidden: Callable[[nn.Module, int], Tensor],
        shape_key: Callable[[int], tuple[Any, ...]],
    ) -> None:
        """Forward and backward of all micro-batches; gradients are sums over all ranks after it.

        Args:
            objective: ``f(model, micro)``, the scalar to differentiate.
            hidden: ``f(model, micro)``, the hidden states that a stage passes on.
            shape_key: equal for two micro-batches of one shape.
        """
        if self.pipeline is None:
            for micro in range(micros):
                self.syncs[0].before_backward(micro == micros - 1)
                objective(self.syncs[0].runner(self.model), micro).backward()
        else:
            of_stage = dict(zip(self.pipeline.stages, self.syncs, strict=True))
            self.pipeline.run(
                micros,
                partial(self._stage, objective, hidden),
                lambda stage, last: of_stage[stage].before_backward(last),
                shape_key,
            )
        for sync in self.syncs:
            sync.finish()
        parameters = dict(named_parameters(self.model))
        data.sum_partial([parameters[n] for n in self.partial], self.mesh.group("tensor"))
        data.sum_partial([parameters[n] for n in self.tied], self.ends)

    def forward(
        self,
        micros: int,
        objective: Callable[[nn.Module, int], Tensor],
        hidden: Callable[[nn.Module, int], Tensor],
        shape_key: Callable[[int], tuple[Any, ...]],
    ) -> None:
        """Forward passes only, as for evaluation; arguments as in :meth:`run`."""
        if self.pipeline is None:
            for micro in range(micros):
                objective(self.model, micro)
        else:
            self.pipeline.run(micros, partial(self._stage, objective, hidden), None, shape_key)
        for sync in self.syncs:
            sync.rest()

    def pieces(self) -> dict[str, Piece]:
        """This rank's part of every parameter and persistent buffer."""
        return {name: self.piece(name, t) for name, t in named_tensors(self.model)}

    def piece(self, name: str, tensor: Tensor) -> Piece:
        """``tensor`` as a part of a whole that is divided as the parameter ``name`` is."""
        shape, start = self.boxes.get(name, (tuple(tensor.shape), (0,) * tensor.ndim))
        start = tuple(a + b for a, b in zip(start, offset(tensor), strict=True))
        return Piece(local(tensor.detach()), tuple(shape), start, self.owns(name, tensor))

    def owns(self, name: str, tensor: Tensor) -> bool:
        """Whether this rank answers for its part of a tensor: of equal ones, the first does."""
        if name in self.tied and not self.mesh.first_stage:
            return False
        apart = {self.divided_by.get(name), "pipeline"}
        if isinstance(tensor, DTensor):
            apart |= {"shard", "expert", "context"}
        return all(self.mesh.place[axis] == 0 for axis in AXES if axis not in apart)

    def gradients(self) -> list[tuple[Tensor, bool]]:
        """This rank's part of every gradient, and whether it counts in the global norm."""
        return [
            (local(parameter.grad), self.owns(name, parameter))
            for name, parameter in named_parameters(self.model)
            if parameter.grad is not None
        ]

    def draw(self, model: nn.Module, micro: int, seed: int, done: int) -> None:
        """Seed dropout by the micro-batch among those of all ranks, and what a rank has of it.

        Args:
            micro: number among this rank's micro-batches of the update.
            done: updates before this one.
        """
        everywhere = micro * self.mesh.data_ranks + self.mesh.data_rank
        seeds.set_default(seed, "dropout", done, everywhere, *self.share_of(model))

    def share_of(self, model: nn.Module) -> list[int]:
        """Which part of a micro-batch's activations ``model`` works on here, for random draws.

        Empty where it works on all of them, as one process does.
        """
        place, share = self.mesh.place, []
        if self.mesh.spread("context"):
            share.append(place["context"])
        if self.mesh.spread("tensor") and self.section.sequence_parallel and not self.section.split:
            share.append(place["tensor"])
        if self.pipeline is not None:
            share += [n for n, stage in self.pipeline.stages.items() if stage is model]
        return share

    def _stage(
        self,
        objective: Callable[[nn.Module, int], Tensor],
        hidden: Callable[[nn.Module, int], Tensor],
        number: int,
        micro: int,
        received: Tensor | None,
    ) -> Tensor:
        assert self.pipeline is not None
        model = self.pipeline.stages[number]
        make = objective if number == self.pipeline.total - 1 else hidden
        with pipeline.receiving(model, received):
            return make(model, micro)


def apply(
    model: nn.Module,
    section: LayoutSection,
    mesh: Mesh,
    precision: Precision,
    train: TrainSection,
) -> Spread:
    """Spread ``model`` as the recipe says; :meth:`Spread.settle` is still to be called.

    Args:
        model: whole; changed in place or copied. On the ``meta`` device it needs no memory yet.

    Raises:
        RecipeError: the model has not the parts that the layout works on, or sizes do not divide.
    """
    spread = _cut(model, section, mesh, precision.device) if mesh.spread("pipeline") else None
    spread = spread or Spread(model, mesh, section)
    for part in models(spread.model):
        _divide(spread, part, section, mesh)
    _recompute(spread.model, train)
    _compile(spread.model, train)
    if mesh.spread("shard"):
        spread.syncs = [
            data.shard(part, mesh, section, precision, _apart(part, mesh))
            for part in models(spread.model)
        ]
    return spread


def _cut(model: nn.Module, section: LayoutSection, mesh: Mesh, device: torch.device) -> Spread:
    """This rank's stages."""
    ranks, rank = mesh.sizes["pipeline"], mesh.place["pipeline"]
    each = section.stages if section.schedule == "interleaved" else 1
    total = ranks * each
    kept = stages.cut(model, stages.part_costs(model), total, section.cuts)
    tied = stages.tied(model)
    kept[-1] = [*tied, *kept[-1]]
    mine = {n: stages.stage(model, kept[n]) for n in range(rank, total, ranks)}
    made = list(mine.values())
    spread = Spread(made[0] if each == 1 else Stages(made), mesh, section)
    spread.pipeline = pipeline.Pipeline(mesh, mine, total, section.schedule, device)
    if tied:
        spread.ends = _ends(mesh)
        if mesh.first_stage or mesh.last_stage:
            spread.tied = [
                f"{name}.{key}"
                for name in tied
                for key, _ in model.get_submodule(name).named_parameters()
            ]
    return spread


def _ends(mesh: Mesh) -> dist.ProcessGroup | None:
    """The ranks of the first and last stage beside this one; all ranks make all such groups."""
    columns = mesh.size // mesh.sizes["pipeline"]  # the pipeline is the outermost axis
    last = (mesh.sizes["pipeline"] - 1) * columns
    groups: list[Any] = [dist.new_group([column, last + column]) for column in range(columns)]
    return groups[mesh.rank % columns] if mesh.first_stage or mesh.last_stage else None


def _divide(spread: Spread, model: Any, section: LayoutSection, mesh: Mesh) -> None:
    """Experts, tensor and context parallelism, and norms over all ranks' samples."""
    if mesh.spread("expert"):
        boxes = expert.apply(model, mesh)
        spread.boxes |= boxes
        spread.divided_by |= dict.fromkeys(boxes, "expert")
    group = mesh.group("tensor")
    if group is not None:
        table = section.split or getattr(model, "split", None)
        if not table:
            raise RecipeError(
                f"layout.split: {type(model).__name__} has no table of its own; name its linear "
                'layers, such as {"blocks.*.up" = "column", "blocks.*.down" = "row"}'
            )
        if section.split:
            tensor.check_table(model, section.split)
        found = tensor.apply(
            model,
            table,
            group,
            sequence=section.sequence_parallel and not section.split,
            column_copies=bool(section.split),
        )
        spread.boxes |= found.boxes
        spread.divided_by |= dict.fromkeys(found.boxes, "tensor")
        spread.partial += found.partial
        if hasattr(model, "project"):
            vocab = model.config.vocab  # pyright: ignore
            model.project = partial(vocabulary.linear, group=group, vocab=vocab)
    group = mesh.group("context")
    if group is not None:
        context.apply(model, group, section.exchange)
        expert.share_sequences(model, group)
    group = mesh.group("replicate", "shard", "expert", "context")
    if section.synchronised_norms and group is not None:
        norms.synchronise(model, group)


def _recompute(model: nn.Module, train: TrainSection) -> None:
    if train.checkpointing != "none":
        checkpointing.apply(_parts(model, "checkpointing"), train.checkpointing)


def _compile(model: nn.Module, train: TrainSection) -> None:
    if train.compile:
        compile.apply(_parts(model, "compile"))


def _parts(model: nn.Module, field: str) -> dict[str, nn.Module]:
    parts = units(model)
    if not parts:
        raise RecipeError(
            f"train.{field}: works on repeated parts, and this model names none; give it an "
            "attribute 'units' with patterns of module names"
        )
    return parts


def _apart(model: nn.Module, mesh: Mesh) -> list[nn.Module]:
    """Parts whose weights differ between ranks that have their own samples."""
    return expert.parts(model) if mesh.spread("expert") else []


def _repeat(spread: Spread, model: nn.Module) -> data.Sync:
    """Sum the gradients of ``model`` over the ranks that have samples, or parts of them."""
    section, mesh = spread.section, spread.mesh
    every = mesh.group("replicate", "expert", "context")
    if every is None:
        return data.Sync()
    if section.engine == "ddp":
        return data.Ddp(model, every)
    own = mesh.group("replicate", "context")  # of an expert's weights
    return data.Replicas(
        [
            (parameter, group)
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
            and (group := own if spread.divided_by.get(name) == "expert" else every) is not None
        ]
    )


@torch.no_grad()
def fill(model: nn.Module, pieces: dict[str, Piece], seed: int) -> None:
    """Put initial weights into the parts, equal to ``megalith.models.initialise``'s bit for bit.

    One whole parameter at a time is held, on the host.
    """
    for part in models(model):
        if hasattr(part, "init_buffers"):
            part.init_buffers()  # pyright: ignore
        for name, _ in part.named_parameters():
            host = torch.empty(pieces[name].shape, dtype=torch.float32)
            part.init_weight(name, host, seeds.generator(seed, "init", name))  # pyright: ignore
            pieces[name].tensor.copy_(host[pieces[name].box])
