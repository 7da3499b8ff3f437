"""A few updates of a recipe's own step, and everything that they decide.

The same code runs on one process and on every rank of a layout.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from megalith import checkpoint, step
from megalith.layout import mesh as meshes
from megalith.layout.gather import gather
from megalith.layout.mesh import Mesh
from megalith.layout.pieces import Piece
from megalith.layout.units import named_parameters
from megalith.recipe import Recipe
from megalith.step import Step
from megalith.tasks import Batch

Update = Sequence[Batch]
"""The micro-batches of one update, over all ranks, in their order."""


@dataclass
class Outcome:
    """What a trial found; tensors are whole.

    Attributes:
        numbers: scalars by name, such as ``"loss of update 1"``.
        tensors: by kind (``gradient``, ``parameter``, ``state``, ``average``), then by name.
        narrow: numbers that are rounded to less than float64.
    """

    numbers: dict[str, float] = field(default_factory=dict)
    tensors: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    narrow: set[str] = field(default_factory=set)

    def note(self, what: str, found: Mapping[str, Tensor]) -> None:
        """Add scalars as ``"<name> of <what>"`` to those of that name."""
        for name, value in found.items():
            full = f"{name} of {what}"
            self.numbers[full] = self.numbers.get(full, 0.0) + float(value)
            if value.is_floating_point() and value.dtype != torch.float64:
                self.narrow.add(full)


@dataclass(frozen=True)
class Trial:
    """What to run.

    Attributes:
        updates: of the whole run; a rank takes its own micro-batches of each.
        evaluation: batches, of which the ranks take turns.
        facts: what the data would know, such as the size of the vocabulary.
        dtype: of weights and optimizer state.
        save: folder for a checkpoint after the last update.
        load: checkpoint to start from.
    """

    recipe: Recipe
    updates: Sequence[Update]
    evaluation: Sequence[Batch]
    facts: Mapping[str, int]
    dtype: torch.dtype
    save: Path | None = None
    load: Path | None = None


def run(trial: Trial) -> Outcome:
    """Run it on this process or rank; tensors are on the main rank, numbers on all.

    Raises:
        MegalithError: the layout cannot be built.
    """
    device = torch.device("cpu")
    mesh = meshes.build(trial.recipe.layout, device)
    built = step.build(trial.recipe, trial.facts, device, mesh, trial.dtype)
    outcome = Outcome()
    if trial.load is not None:
        checkpoint.restore(built, checkpoint.entries(trial.load)[-1], mesh)
    for number, update in enumerate(trial.updates, 1):
        measured = built.backward(_mine(update, mesh))
        scalars = {"loss": measured.loss, "count": measured.count, "norm": measured.norm}
        outcome.note(f"update {number}", {**scalars, **measured.sums})
        if number == 1:
            outcome.tensors["gradient"] = gather(_gradients(built), mesh)
        built.update(measured)
    pieces = built.pieces()
    for kind, part in {"parameter": "model", "state": "optimizer", "average": "ema"}.items():
        outcome.tensors[kind] = gather(pieces.get(part, {}), mesh)
    _evaluate(outcome, built, trial.evaluation, "evaluation")
    if built.ema is not None:
        # Weights change without a backward pass: what holds on to the old ones shows.
        with built.ema.applied():
            _evaluate(outcome, built, trial.evaluation, "evaluation of the average")
    if trial.save is not None:
        state = {**checkpoint.numbers(built), "recipe": trial.recipe.model_dump(mode="json")}
        checkpoint.save(trial.save, built.done, pieces, state, mesh)
    return outcome


def _mine(update: Update, mesh: Mesh) -> list[Batch]:
    """Micro-batch ``m`` of data rank ``d`` is the ``m * ranks + d``-th of all."""
    return list(update[mesh.data_rank :: mesh.data_ranks])


def _gradients(built: Step) -> dict[str, Piece]:
    return {
        name: built.spread.piece(name, parameter.grad)
        for name, parameter in named_parameters(built.model)
        if parameter.grad is not None
    }


def _evaluate(outcome: Outcome, built: Step, batches: Sequence[Batch], what: str) -> None:
    ranks, rank = built.mesh.data_ranks, built.mesh.data_rank
    for first in range(0, len(batches), ranks):
        batch = batches[min(first + rank, len(batches) - 1)]
        if first + rank >= len(batches):
            batch = _nothing(batch)
        outcome.note(what, built.evaluate(batch))


def _nothing(batch: Batch) -> Batch:
    """The batch without a target that counts."""
    empty = {k: torch.full_like(t, -100) for k, t in batch.items() if k in ("targets", "target")}
    sums = {k: torch.zeros_like(t) for k, t in batch.items() if k == "bytes"}
    return {**batch, **empty, **sums}
