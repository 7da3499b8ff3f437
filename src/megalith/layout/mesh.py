"""The mesh: where a rank stands on each axis of the layout, and who shares an axis with it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from megalith.core.errors import RecipeError
from megalith.recipe.schema import LayoutSection

AXES = ("pipeline", "replicate", "shard", "expert", "context", "tensor")
"""From the outside in: neighbours on the last axis are neighbours in rank."""

DATA = ("replicate", "shard", "expert")
"""Axes whose ranks get samples of their own."""


@dataclass
class Mesh:
    """One rank's view of all ranks. One process is a mesh too: every axis has size 1.

    Attributes:
        sizes: ranks on each axis.
        place: this rank's coordinate on each axis.
    """

    sizes: dict[str, int]
    place: dict[str, int]
    _devices: DeviceMesh | None = None
    _joined: dict[tuple[str, ...], DeviceMesh] = field(default_factory=dict, repr=False)

    @property
    def size(self) -> int:
        """All ranks."""
        product = 1
        for size in self.sizes.values():
            product *= size
        return product

    @property
    def rank(self) -> int:
        """This rank among all."""
        return _position(self, AXES)

    @property
    def data_ranks(self) -> int:
        """Ranks, or groups of ranks, that get samples of their own."""
        return self.sizes["replicate"] * self.sizes["shard"] * self.sizes["expert"]

    @property
    def data_rank(self) -> int:
        """Which of them this rank belongs to."""
        return _position(self, DATA)

    @property
    def main(self) -> bool:
        """Whether this rank is the one that speaks: it prints and writes what is written once."""
        return self.rank == 0

    @property
    def first_stage(self) -> bool:
        """Whether this rank holds the beginning of the model."""
        return self.place["pipeline"] == 0

    @property
    def last_stage(self) -> bool:
        """Whether this rank holds the end of the model."""
        return self.place["pipeline"] == self.sizes["pipeline"] - 1

    def spread(self, *axes: str) -> bool:
        """Whether any of ``axes`` has more than one rank."""
        return any(self.sizes[axis] > 1 for axis in axes)

    def devices(self, *axes: str) -> DeviceMesh:
        """The one-dimensional device mesh of the ranks that differ from this one on ``axes`` only.

        At least one of them must be spread; the first call with new axes must be made by all ranks.
        """
        chosen = tuple(axis for axis in AXES if axis in axes and self.sizes[axis] > 1)
        assert self._devices is not None, "one process has no device mesh"
        assert chosen, f"none of {axes} is spread"
        if chosen not in self._joined:
            part = self._devices[chosen]
            self._joined[chosen] = part if len(chosen) == 1 else part._flatten("_".join(chosen))
        return self._joined[chosen]

    def grid(self, outer: tuple[str, ...], inner: tuple[str, ...]) -> DeviceMesh:
        """Two dimensions, the ranks over ``outer`` by those over ``inner``; both are spread."""
        found = [self.devices(*axes).mesh_dim_names for axes in (outer, inner)]
        assert self._devices is not None
        return self._devices[tuple(names[0] for names in found if names)]

    def group(self, *axes: str) -> dist.ProcessGroup | None:
        """The ranks that differ from this one on ``axes`` only; ``None`` if it is alone."""
        return self.devices(*axes).get_group() if self.spread(*axes) else None

    def groups(self) -> dict[str, tuple[int, ...]]:
        """The ranks of each group that this rank has used, by the group's name."""
        made = [self._joined[axes].get_group() for axes in self._joined]
        world = [dist.group.WORLD] if self.size > 1 else []
        return {
            group.group_name: tuple(dist.get_process_group_ranks(group))
            for group in [*made, *world]
            if group is not None
        }

    def sum_(self, values: Tensor) -> Tensor:
        """Add up ``values`` over all ranks, in place; the same on every rank afterwards."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def barrier(self) -> None:
        """Wait until all ranks are here."""
        if self.size > 1:
            dist.barrier()


def single() -> Mesh:
    """One process."""
    return Mesh(dict.fromkeys(AXES, 1), dict.fromkeys(AXES, 0))


def build(section: LayoutSection, device: torch.device) -> Mesh:
    """The mesh of the ranks that have joined; every rank calls it.

    Raises:
        RecipeError: their number is not the product of the layout's axes.
    """
    if section.ranks == 1:
        return single()
    joined = dist.get_world_size() if dist.is_initialized() else 1
    if joined != section.ranks:
        sizes = " x ".join(f"{axis} {size}" for axis, size in sizes_of(section).items() if size > 1)
        raise RecipeError(f"layout: {sizes} needs {section.ranks} ranks, and {joined} are here")
    sizes = sizes_of(section)
    spread = [axis for axis in AXES if sizes[axis] > 1]
    devices = init_device_mesh(
        device.type, tuple(sizes[axis] for axis in spread), mesh_dim_names=tuple(spread)
    )
    place = {axis: devices.get_local_rank(axis) if axis in spread else 0 for axis in AXES}
    return Mesh(sizes, place, devices)


def sizes_of(section: LayoutSection) -> dict[str, int]:
    """Ranks on each axis, from the outside in."""
    return {axis: getattr(section, axis) for axis in AXES}


def _position(mesh: Mesh, axes: tuple[str, ...]) -> int:
    position = 0
    for axis in axes:
        position = position * mesh.sizes[axis] + mesh.place[axis]
    return position
