"""How long a collective takes: messages that cost a latency, and bytes that cost bandwidth.

The bytes are the least that a ring sends (Thakur et al. 2005): each of ``n`` ranks sends
``(n - 1) / n`` of the whole for a gather or a reduce-scatter, twice that for a sum. The latency is
that of ``log2 n`` messages, as trees need. A group with ``k`` ranks on each node sends through the
network ports of all ``k``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megalith.layout.mesh import AXES
from megalith.plan.machine import Machine
from megalith.recipe.schema import LayoutSection


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
    latency = machine.network.latency if across else device.link_latency
    bandwidth = device.link
    if across:
        ports = 1 if "all_to_all" in name or "alltoall" in name else over.near
        bandwidth = min(bandwidth, machine.network.bandwidth * ports)
    moved = sent(name, whole, over.ranks) / (bandwidth * device.link_share)
    return times * latency * math.log2(max(2, over.ranks)) + moved
