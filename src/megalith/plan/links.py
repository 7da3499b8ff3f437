"""How long a collective takes: messages that cost a latency, and bytes that cost bandwidth.

The bytes are the least that a ring sends (Thakur et al. 2005): each of ``n`` ranks sends
``(n - 1) / n`` of the whole for a gather or a reduce-scatter, twice that for a sum. A ring passes
them on in ``n - 1`` steps, each of which costs the latency of the link that it crosses; a sum may
also go up and down a tree, if that is quicker: the model that NCCL chooses its algorithms by
(``ncclTopoTuneModel`` in its ``tuning.cc``). A group with ``k`` ranks on each node sends through
the network ports of all ``k``; on a node without a switch, over the direct links between them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megalith.layout.mesh import AXES
from megalith.plan.machine import Machine
from megalith.recipe.schema import LayoutSection

_CALL = 8.4e-6
"""Seconds that a collective takes besides, whatever its size (NCCL's base latency of a ring)."""


@dataclass(frozen=True)
class Group:
    """``ranks`` of which ``near`` share a node."""

    ranks: int
    near: int


def group(axes: str, layout: LayoutSection, machine: Machine) -> Group:
    """The group of rank 0 over ``axes``, such as ``shard+context``, ``ends`` or ``world``."""
    if axes == "world":
        return Group(layout.ranks, min(layout.ranks, machine.node))
    if axes in ("ends", "pipeline"):  # two ranks that talk to each other
        stride = layout.ranks // layout.pipeline
        stride *= layout.pipeline - 1 if axes == "ends" else 1
        return Group(2, 2 if stride < machine.node else 1)
    chosen = axes.split("+")
    offsets, stride = [0], 1
    for axis in reversed(AXES):
        size = getattr(layout, axis)
        if axis in chosen:
            offsets = [stride * place + offset for place in range(size) for offset in offsets]
        stride *= size
    return Group(len(offsets), sum(offset < machine.node for offset in offsets))


def sent(name: str, whole: float, ranks: int) -> float:
    """Bytes that a rank sends at least for a collective on ``whole`` bytes."""
    if ranks == 1:
        return 0.0
    share = (ranks - 1) / ranks
    if "all_to_all" in name or "alltoall" in name or "gather" in name:
        return whole * share
    if "reduce_scatter" in name:
        return whole * share
    if "allreduce" in name or "all_reduce" in name:
        return 2 * whole * share
    return whole  # send, broadcast


def seconds(name: str, times: float, whole: float, over: Group, machine: Machine) -> float:
    """What ``times`` collectives on ``whole`` bytes in all take, one after the other."""
    if over.ranks == 1 or "recv" in name:  # a receive is the other side of a send
        return 0.0
    device, across = machine.device, over.ranks > over.near
    bandwidth = device.link
    if not device.switched and not across:
        bandwidth *= min(1.0, (over.near - 1) / max(1, device.node - 1))
    if across:
        ports = 1 if "all_to_all" in name or "alltoall" in name else over.near
        bandwidth = min(bandwidth, machine.network.bandwidth * ports)
    moved = sent(name, whole, over.ranks) / (bandwidth * device.link_share)
    return times * latency(name, over, machine) + moved


def latency(name: str, over: Group, machine: Machine) -> float:
    """Seconds of one collective that moves next to nothing."""
    near, far = machine.device.link_latency, machine.network.latency
    nodes = -(-over.ranks // over.near)
    within, between = over.ranks - nodes, nodes - 1
    reduces = "allreduce" in name or "all_reduce" in name
    if reduces or "gather" in name or "reduce_scatter" in name:
        ring = within * near + between * far
        tree = (over.near - 1) * near + math.ceil(math.log2(nodes)) * far
        return _CALL + (2 * min(ring, tree) if reduces else ring)
    one = far if nodes > 1 else near
    return _CALL + one * math.log2(max(2, over.ranks))
