"""Batch norm's running statistics see each micro-batch once, and no update that was skipped."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megalith import step
from megalith.recipe import parse
from megalith.tasks import Batch

MODEL = {"family": "resnet", "stem": "small", "width": 8, "blocks": [1, 2]}
FACTS = {"classes": 10, "channels": 1}


def image_step(**train: Any) -> step.Step:
    recipe = parse({"model": MODEL, "task": {"name": "classify"}, "train": train})
    return step.build(recipe, FACTS, torch.device("cpu"))


def images(seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    return {
        "image": torch.randn(6, 1, 8, 8, generator=generator),
        "target": torch.randint(10, (6,), generator=generator),
    }


def buffers(of: step.Step) -> dict[str, torch.Tensor]:
    return {name: buffer.clone() for name, buffer in of.model.named_buffers()}


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_recomputation_does_not_count_a_batch_twice(mode: str) -> None:
    kept, recomputed = image_step(), image_step(checkpointing=mode)
    for one in (kept, recomputed):
        one.backward([images(0), images(1)])
    assert int(recomputed.model.get_buffer("layer1.0.bn1.num_batches_tracked")) == 2
    for name, buffer in buffers(kept).items():
        assert torch.equal(recomputed.model.get_buffer(name), buffer), name
    for name, weight in kept.model.named_parameters():
        torch.testing.assert_close(recomputed.model.get_parameter(name).grad, weight.grad)


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_recomputation_is_compiled_too(mode: str) -> None:
    torch._dynamo.reset()
    eager, compiled = image_step(checkpointing=mode), image_step(checkpointing=mode)
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    compiled.model.get_submodule("layer1.0").compile(backend="aot_eager")
    for one in (eager, compiled):
        one.backward([images(0)])
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > before
    for name, buffer in buffers(eager).items():
        torch.testing.assert_close(compiled.model.get_buffer(name), buffer)
    for name, weight in eager.model.named_parameters():
        torch.testing.assert_close(compiled.model.get_parameter(name).grad, weight.grad)


def test_a_skipped_update_leaves_no_trace_in_the_statistics() -> None:
    one = image_step()
    one.update(one.backward([images(0)]))
    before = buffers(one)
    bad = images(1)
    bad["image"][0, 0, 0, 0] = torch.inf
    measured = one.backward([images(2), bad])
    assert not measured.finite()
    one.skip()
    for name, buffer in before.items():
        assert torch.equal(one.model.get_buffer(name), buffer), name
