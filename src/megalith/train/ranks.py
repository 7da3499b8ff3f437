"""What the ranks of a run agree on."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist

from megalith.core import stacks
from megalith.core.errors import MegalithError, RecipeError, TrainingError
from megalith.core.world import World
from megalith.layout.mesh import Mesh
from megalith.recipe import Recipe
from megalith.recipe.schema import LayoutSection
from megalith.train.signals import StopRequest


def fitted(recipe: Recipe, ranks: int) -> tuple[Recipe, str | None]:
    """``recipe`` for the ``ranks`` that are here, and what was changed for it.

    After a node is lost, fewer copies, and then fewer ranks to a copy, give the same updates: the
    global batch stays, each rank accumulates more micro-batches.

    Raises:
        RecipeError: the layout does not fit; the nearest number of ranks that does is named.
    """
    layout = recipe.layout
    if layout.ranks == ranks:
        return recipe, None
    if ranks < layout.ranks:
        smaller = _smaller(recipe, ranks)
        if smaller is not None:
            changed = ", ".join(
                f"layout.{axis} {getattr(layout, axis)} -> {getattr(smaller, axis)}"
                for axis in ("replicate", "shard")
                if getattr(layout, axis) != getattr(smaller, axis)
            )
            note = f"{ranks} ranks are here, and not {layout.ranks}: {changed}"
            return recipe.model_copy(update={"layout": smaller}), note
    works = [n for n in range(1, min(ranks, layout.ranks) + 1) if _smaller(recipe, n)]
    nearest = f"; {works[-1]} would work" if works and works[-1] != ranks else ""
    needed = f"layout: needs {layout.ranks} ranks, and {ranks} are here{nearest}"
    raise RecipeError(f"{needed}; change the layout, or start {layout.ranks}")


def _smaller(recipe: Recipe, ranks: int) -> LayoutSection | None:
    """The layout with fewer replicas, then fewer shards, for ``ranks``; ``None``: there is none."""
    layout, train = recipe.layout, recipe.train
    rest = layout.ranks // (layout.replicate * layout.shard)
    if ranks % rest:
        return None
    wanted = ranks // rest
    for shard in range(layout.shard, 0, -1):
        replicate = wanted // shard
        whole = replicate * shard == wanted and replicate <= layout.replicate
        together = train.micro_batch * wanted * layout.expert
        if whole and train.global_batch % together == 0:
            return layout.model_copy(update={"replicate": replicate, "shard": shard})
    return None


@contextmanager
def alike(mesh: Mesh, what: str) -> Iterator[None]:
    """Inside, ranks work alone; at the end, an error on one of them is an error on all.

    Raises:
        TrainingError: another rank failed at ``what``.
    """
    try:
        yield
    except Exception:
        mesh.sum_(torch.ones(1))
        raise
    if float(mesh.sum_(torch.zeros(1))):
        raise TrainingError(f"{what}: failed on another rank, which says why")


@contextmanager
def on_main(mesh: Mesh, context: Any, what: str) -> Iterator[None]:
    """Rank 0 enters ``context`` for all."""
    with ExitStack() as stack:
        with alike(mesh, what):
            if mesh.main:
                stack.enter_context(context)
        yield


def agree_to_stop(mesh: Mesh, stop: StopRequest) -> None:
    """A signal that any rank has received counts for all of them, after the same update."""
    if mesh.size == 1:
        return
    asked = (signal.SIGINT, signal.SIGTERM)
    votes = mesh.sum_(torch.tensor([float(stop.received == one) for one in asked]))
    for number, vote in zip(asked, votes.tolist(), strict=True):
        if vote and stop.received is None:
            stop.received = number


def table(mesh: Mesh, numbers: Sequence[float]) -> torch.Tensor:
    """The ``numbers`` of every rank, ``[ranks, len(numbers)]`` float64."""
    values = torch.zeros(mesh.size, len(numbers), dtype=torch.float64)
    values[mesh.rank] = torch.tensor(numbers, dtype=torch.float64)
    return mesh.sum_(values)


def everyones(mesh: Mesh, items: list[Any]) -> list[Any]:
    """The ``items`` of all ranks, in order of rank; for what is rare and small."""
    if mesh.size == 1:
        return items
    found: list[Any] = [None] * mesh.size
    dist.all_gather_object(found, items)
    return [item for part in found for item in part]


@contextmanager
def late_is_said(world: World, timeout: float) -> Iterator[None]:
    """A collective that took too long ends in a line that says where this rank waited.

    Raises:
        TrainingError: instead of the backend's error.
    """
    try:
        yield
    except MegalithError:
        raise
    except RuntimeError as error:
        if "timed out" not in str(error).lower():
            raise
        place = stacks.of_error(error).describe()
        raise TrainingError(
            f"ranks: rank {world.rank} waited {timeout:g} s for the others in {place}; the rank "
            "that does not say so is the one that did not come"
        ) from error


class Unheard:
    """Metrics and progress of a rank that does not speak."""

    def write(self, *args: Any, **values: Any) -> None:
        """Nothing is written."""

    def update(self, *args: Any) -> None:
        """Nothing is shown."""

    def note(self, *args: Any) -> None:
        """Nothing is said."""

    def __enter__(self) -> Unheard:
        return self

    def __exit__(self, *error: object) -> None:
        return None
