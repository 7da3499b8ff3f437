"""The least that a rank must send in one update of a layout, in closed form.

It counts what the layout exchanges by its definition: no padding, no scalars, nothing twice.
Sizes are bytes in float32; ``f = (n - 1) / n`` for the ``n`` ranks of an axis.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from layouts.problem import Size

from megalith.layout.mesh import Mesh
from megalith.layout.units import named_parameters
from megalith.models.layers import Absent
from megalith.recipe.schema import LayoutSection
from megalith.step import Step

_ITEM = 4  # bytes of a float32


@dataclass(frozen=True)
class Part:
    """What a rank's part of the model has; weights are whole over ranks with samples of their own.

    Attributes:
        blocks: how many of them.
        in_blocks: bytes of their weights.
        outside: bytes of all other weights.
        small: bytes of the weights that tensor parallelism does not divide.
        table: bytes of the embedding.
    """

    blocks: int
    in_blocks: int
    outside: int
    small: int
    table: int
    first: bool
    last: bool

    @property
    def weights(self) -> int:
        """Bytes of all weights."""
        return self.in_blocks + self.outside


def part(built: Step) -> Part:
    """The part that this rank holds, by the names in the decoder."""
    sizes = {name: p.numel() * _ITEM for name, p in named_parameters(built.model)}
    divided = ("query.", "key.", "value.", "up.", "output.weight", "down.weight")
    stages = built.spread.pipeline.stages.values() if built.spread.pipeline else [built.model]
    blocks = [block for stage in stages for block in stage.blocks]  # pyright: ignore
    return Part(
        blocks=sum(not isinstance(block, Absent) for block in blocks),
        in_blocks=sum(size for name, size in sizes.items() if name.startswith("blocks.")),
        outside=sum(size for name, size in sizes.items() if not name.startswith("blocks.")),
        small=sum(
            size
            for name, size in sizes.items()
            if not name.startswith(("embedding", "positions", "head"))
            and not any(word in name for word in divided)
        ),
        table=sizes.get("embedding.weight", 0),
        first=built.mesh.first_stage,
        last=built.mesh.last_stage,
    )


def minimum(size: Size, layout: LayoutSection, mesh: Mesh, here: Part) -> dict[str, float]:
    """Bytes that this rank sends in one update, by axis.

    Args:
        here: what this rank holds.
    """
    found: dict[str, float] = defaultdict(float)
    micros = size.micros // mesh.data_ranks
    tokens = size.micro_batch * size.sequence // layout.context
    hidden = tokens * size.width * _ITEM  # of one micro-batch, whole over tensor
    _data(found, layout, mesh, here, micros)
    if layout.tensor > 1:
        f = 1 - 1 / layout.tensor
        ends = here.first + here.last
        if layout.sequence_parallel:
            # Per block: gathered before and scattered after both halves, and back. The ends: the
            # embedding is scattered, what the last norm makes is gathered, and back.
            found["tensor"] += micros * f * hidden * (8 * here.blocks + 2 * ends)
            found["tensor"] += 2 * f * here.small / _sharers(layout)  # gradients of parts of work
        else:
            # Per block: two sums forward, two backward. The ends: one each.
            found["tensor"] += micros * 2 * f * hidden * (4 * here.blocks + ends)
        if here.last:  # per token: the largest logit, then three sums
            found["tensor"] += micros * 2 * f * tokens * 4 * _ITEM
    if layout.context > 1:
        f = 1 - 1 / layout.context
        held = hidden / layout.tensor  # of queries, or keys, or values, on this rank
        # Gather: keys and values of all ranks forward, their gradients back. All-to-all:
        # queries, keys, values and results, each way.
        times = 4 * layout.context if layout.exchange == "gather" else 8
        found["context"] += micros * f * held * here.blocks * times
    if layout.pipeline > 1:
        _pipeline(found, layout, mesh, here, micros, hidden)
    return dict(found)


def above(size: Size, layout: LayoutSection, mesh: Mesh, here: Part) -> float:
    """Bytes that a rank is known to send above the least, for the reason that is stated here.

    With sequence parallelism learned positions are looked up whole and then split, so each
    micro-batch gathers their gradient, ``[1, seq, width]``.
    """
    if layout.tensor == 1 or not layout.sequence_parallel or not here.first:
        return 0.0
    tokens = size.sequence // layout.context * (size.micro_batch if layout.context > 1 else 1)
    micros = size.micros // mesh.data_ranks
    return micros * (1 - 1 / layout.tensor) * tokens * size.width * _ITEM


def _sharers(layout: LayoutSection) -> int:
    """Ranks that a weight is cut over, if it is."""
    return layout.shard * layout.context if layout.shard > 1 else 1


def _data(
    found: dict[str, float], layout: LayoutSection, mesh: Mesh, here: Part, micros: int
) -> None:
    """Weights and their gradients."""
    inner, copies = _sharers(layout), layout.replicate
    f = 1 - 1 / inner
    if layout.shard == 1:
        copies *= layout.context
    elif layout.zero == 1:  # gathered once, reduced once
        found["shard"] += f * here.weights * 2
    elif layout.zero == 2:  # gathered once, reduced in every micro-batch
        found["shard"] += f * here.weights * (1 + micros)
    else:  # gathered forward and backward (once, what is outside the blocks), reduced
        found["shard"] += micros * f * (3 * here.in_blocks + 2 * here.outside)
    if copies > 1:
        found["replicate"] += 2 * (1 - 1 / copies) * here.weights / inner


def _pipeline(
    found: dict[str, float],
    layout: LayoutSection,
    mesh: Mesh,
    here: Part,
    micros: int,
    hidden: float,
) -> None:
    """Hidden states to the next stage, their gradients to the one before; the shared embedding."""
    each = layout.stages if layout.schedule == "interleaved" else 1
    share = layout.tensor if layout.sequence_parallel else 1
    edges = 2 * each - here.first - here.last
    found["pipeline"] += micros * edges * hidden / share
    if here.first or here.last:
        found["pipeline"] += here.table / _sharers(layout)  # 2 f with two ranks
