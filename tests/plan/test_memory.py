"""What is read from a record: rounding, kinds, the moment, reserved memory, and JSON."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict

import pytest
import torch
from torch import Tensor

from megalith import step
from megalith.plan.accelerator import Target
from megalith.plan.memory import KINDS, Memory, read
from megalith.plan.record import Allocated, Record
from megalith.plan.trace import Job, Trace, trace
from megalith.recipe import parse
from megalith.recipe.schema import Recipe

LENGTH, VOCAB, WIDTH = 16, 96, 32


def piece(size: int, born: int, died: int | None = None, **more: object) -> Allocated:
    given = {"phase": "forward", "role": "", "operator": "mm", "module": "a.b", **more}
    stream = given.pop("stream", 0)
    return Allocated(
        bytes=size,
        born=born,
        died=died,
        stream=stream,  # pyright: ignore[reportArgumentType]
        shape=(size,),
        dtype="int8",
        **given,  # pyright: ignore[reportArgumentType]
    )


def record(*pieces: Allocated) -> Record:
    """Forward is events 1 to 10, backward 11 to 20."""
    return Record(memory=list(pieces), events=20, phases=[(0, "forward"), (10, "backward")])


@pytest.mark.parametrize(("target", "expected"), [(None, 192), (Target(), 1024)])
def test_sizes_are_rounded_as_the_device_rounds_them(target: Target | None, expected: int) -> None:
    assert read(record(piece(1, 1), piece(65, 2)), target).allocated == expected


def test_the_peak_is_where_most_is_alive_at_once() -> None:
    found = read(
        record(piece(640, 1, 4), piece(640, 2, 3), piece(128, 5, module="c"), piece(64, 6)), None
    )
    assert found.allocated == 1280
    assert (found.moment.event, found.moment.module, found.moment.operator) == (2, "a.b", "mm")
    assert [one.bytes for one in found.largest] == [640, 640]


def test_kinds_are_told_by_what_became_of_a_tensor() -> None:
    pieces = {
        "activations": piece(64, 1, 15),
        "temporaries": piece(128, 2, 9),
        "communication": piece(256, 3, 9, operator="all_reduce"),
        "loss": piece(512, 4, 15, operator="_log_softmax"),
        "gradients": piece(1024, 12, None, phase="backward", role="gradients"),
        "optimizer": piece(2048, 5, None, role="optimizer"),
    }
    found = read(record(*pieces.values()), None)
    assert {kind: most for kind, most in found.most.items() if most} == {
        kind: one.bytes for kind, one in pieces.items()
    }
    assert sum(found.kinds.values()) == found.allocated
    assert list(found.kinds) == list(KINDS)


def test_what_a_collective_made_is_an_activation_if_backward_needs_it() -> None:
    gathered = piece(64, 1, 15, operator="all_gather_into_tensor")
    bucket = piece(128, 12, 14, phase="backward", operator="cat", sent=True)
    other = piece(256, 2, 15, stream=3)
    most = read(record(gathered, bucket, other), None).most
    assert (most["activations"], most["communication"]) == (64, 256 + 128)


def test_reserved_memory_counts_every_stream_apart_and_the_first_update_too() -> None:
    mib = 1 << 20
    one_stream = record(piece(30 * mib, 1, 2), piece(30 * mib, 3))
    two_streams = record(piece(30 * mib, 1, 2), piece(30 * mib, 3, stream=1))
    assert read(one_stream, Target()).reserved == 30 * mib
    assert read(two_streams, Target()).reserved == 60 * mib
    later = Record(memory=[piece(mib, 5)], before=[piece(30 * mib, 1, 2)], start=4, events=6)
    found = read(later, Target())
    assert (found.allocated, found.reserved) == (mib, 32 * mib)


def decoder(**train: object) -> Recipe:
    model = {"layers": 2, "width": WIDTH, "heads": 2, "context": LENGTH}
    train = {"global_batch": 4, "micro_batch": 2, "ema": 0.9, **train}
    return parse({"model": model, "data": {"sequence": LENGTH}, "train": train})


def traced(recipe: Recipe) -> tuple[Trace, Memory]:
    tokens = ((LENGTH,), "int64")
    found = trace(Job(recipe, {"vocab": VOCAB}, {"tokens": tokens, "targets": tokens}))
    return found, read(found.record, None)


def _rounded(tensors: list[Tensor], times: int = 1) -> int:
    return sum(-(-t.nbytes // 64) * 64 * times for t in tensors)


@pytest.fixture(scope="module")
def small() -> tuple[Trace, Memory]:
    return traced(decoder())


def test_before_the_update_there_is_what_outlives_updates_and_nothing_else(
    small: tuple[Trace, Memory],
) -> None:
    built = step.build(decoder(), {"vocab": VOCAB}, torch.device("cpu"))
    weights = list(built.model.parameters())
    found = small[0].record
    start = Counter[str]()
    for entry in found.memory:
        if entry.born <= found.start:
            start[entry.role] += -(-entry.bytes // 64) * 64
    counters = 64 * len(weights)  # AdamW counts the updates of every parameter
    buffers = _rounded(list(built.model.buffers()))
    assert start == {
        "weights": _rounded(weights),
        "optimizer": _rounded(weights, 2) + counters,
        "average": _rounded(weights),
        "input": 4 * 2 * LENGTH * 8,
        **({"buffers": buffers} if buffers else {}),
    }


def test_every_kind_of_an_update_is_seen(small: tuple[Trace, Memory]) -> None:
    _, memory = small
    weights = memory.kinds["weights"]
    assert memory.most["gradients"] == weights
    assert memory.most["activations"] > 0
    assert memory.most["loss"] > VOCAB * LENGTH * 2 * 4  # the logits
    assert memory.moment.phase in ("forward", "backward")


def test_memory_is_as_large_after_an_update_as_before_it(small: tuple[Trace, Memory]) -> None:
    first, last = (
        {kind: levels[place] for kind, levels in small[1].curve.kinds.items()} for place in (0, -1)
    )
    assert {k: first[k] for k in ("weights", "optimizer", "average", "gradients")} == {
        k: last[k] for k in ("weights", "optimizer", "average", "gradients")
    }


def test_it_becomes_json_and_its_curve_stays_small(small: tuple[Trace, Memory]) -> None:
    _, memory = small
    told = json.loads(json.dumps(asdict(memory)))
    assert told["allocated"] == memory.allocated
    assert len(memory.curve.events) <= 300
    heights = [sum(level) for level in zip(*memory.curve.kinds.values(), strict=True)]
    assert max(heights) == memory.allocated


def test_checkpointing_keeps_less_and_the_moment_moves_into_recomputation_or_loss() -> None:
    kept = {
        depth: traced(decoder(checkpointing=depth))[1].most["activations"]
        for depth in ("none", "selective", "full")
    }
    assert kept["none"] > kept["selective"] > kept["full"]
