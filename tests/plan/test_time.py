"""Time against hand counts: ring minima, the pipeline's bubble, overlap, and FLOPs by formula."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megalith.plan import flops, links
from megalith.plan.extrapolate import Part
from megalith.plan.links import Group
from megalith.plan.machine import Machine, parse
from megalith.plan.time import compute_time, fused, overlaps, pipeline_time, step_time
from megalith.plan.worker import Seen
from megalith.recipe.families import DecoderConfig
from megalith.recipe.schema import LayoutSection, TaskSection
from megalith.train.flops import model_flops

MACHINE = parse("64xH100")


def seen(computed: dict[str, list[float]], sent: dict[str, list[float]] | None = None) -> Seen:
    return Seen({}, {}, {}, {}, [], computed, sent or {})


@pytest.mark.parametrize("ranks", [2, 3, 8, 64])
def test_a_rank_sends_what_a_ring_needs_and_no_more(ranks: int) -> None:
    whole = 1e9
    least = whole * (ranks - 1) / ranks
    assert links.sent("_allgather_base_", whole, ranks) == pytest.approx(least)
    assert links.sent("reduce_scatter_tensor", whole, ranks) == pytest.approx(least)
    assert links.sent("allreduce_", whole, ranks) == pytest.approx(2 * least)
    assert links.sent("send", whole, 2) == whole
    assert links.sent("allreduce_", whole, 1) == 0


def test_groups_lie_on_nodes_as_the_mesh_nests() -> None:
    layout = LayoutSection(pipeline=2, replicate=2, shard=4, tensor=4)
    near = {
        "tensor": Group(4, 4),
        "shard": Group(4, 2),
        "replicate": Group(2, 1),
        "replicate+shard": Group(8, 2),
        "pipeline": Group(2, 1),
        "ends": Group(2, 1),
        "world": Group(64, 8),
    }
    assert {axes: links.group(axes, layout, MACHINE) for axes in near} == near


def test_a_group_over_nodes_has_the_ports_of_its_members_on_a_node() -> None:
    def rate(near: int) -> float:
        took = links.seconds("_allgather_base_", 0, 8e9, Group(64, near), MACHINE)
        return links.sent("_allgather_base_", 8e9, 64) / took

    share = MACHINE.device.link_share
    assert rate(1) == pytest.approx(50e9 * share)
    assert rate(4) == pytest.approx(200e9 * share)
    assert rate(64) == pytest.approx(450e9 * share)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize(("ranks", "micros"), [(2, 4), (4, 8), (8, 32)])
def test_the_bubble_is_that_of_the_papers(schedule: str, ranks: int, micros: int) -> None:
    layout = LayoutSection(pipeline=ranks, schedule=schedule)  # type: ignore[arg-type]
    took = pipeline_time([(1.0, 2.0)] * ranks, layout, micros, 0.0)
    assert took == pytest.approx(3.0 * (micros + ranks - 1))


def test_several_stages_on_a_rank_make_the_bubble_smaller_by_their_number() -> None:
    layout = LayoutSection(pipeline=4, schedule="interleaved", stages=2)
    took = pipeline_time([(0.5, 1.0)] * 4, layout, 16, 0.0)
    assert took == pytest.approx(3.0 * 16 + 3.0 * 3 / 2)


def test_the_slowest_stage_sets_the_pace_and_hops_are_paid_once_when_it_is_full() -> None:
    layout = LayoutSection(pipeline=3)
    slow = pipeline_time([(1.0, 2.0), (1.0, 2.0), (2.0, 4.0)], layout, 50, 0.0)
    assert slow == pytest.approx(6.0 * 50 + 2 * 3.0)
    assert pipeline_time([(1.0, 2.0)] * 3, layout, 1, 0.5) == pytest.approx(9.0 + 4 * 0.5)


def test_an_operator_takes_the_longer_of_operations_and_bytes() -> None:
    device = MACHINE.device
    by_flops = {"matmul/forward/bfloat16": [1.0, 1e15, 1e9]}
    by_bytes = {"matmul/forward/bfloat16": [1.0, 1e9, 1e12]}
    matmul, memory = device.share["matmul"], device.share["memory"]
    assert compute_time(by_flops, device)["forward"] == pytest.approx(1e15 / (989.4e12 * matmul))
    assert compute_time(by_bytes, device)["forward"] == pytest.approx(1e12 / (3.35e12 * memory))


def test_data_traffic_is_hidden_but_for_a_part_and_tensor_traffic_is_waited_for() -> None:
    layout, part = LayoutSection(shard=8, tensor=8), Part(0, 1, 1)
    device = MACHINE.device
    work = {"matmul/forward/bfloat16": [1.0, device.rate("matmul", "bfloat16"), 0.0]}  # one second

    def shown(name: str, whole: float) -> float:
        took = step_time([(part, seen(work, {name: [0.0, whole]}))], layout, 1, MACHINE)
        assert took.seconds == pytest.approx(took.compute + took.exposed)
        return took.exposed

    # Bytes that one port of eight ranks takes a second for.
    second, hidden = 50e9 * device.link_share * 8 / 7, device.shown
    assert shown("_allgather_base_/forward/shard", second / 2) == pytest.approx(hidden / 2)
    assert shown("_allgather_base_/forward/shard", 3 * second) == pytest.approx(2 + hidden)
    inside = 450e9 * device.link_share * 8 / 7
    assert shown("reduce_scatter_tensor/forward/tensor", inside) == pytest.approx(device.waited)
    assert overlaps("replicate+shard")
    assert not any(overlaps(axes) for axes in ("tensor", "context", "expert", "world"))


def test_a_ring_costs_a_step_to_each_rank_and_a_sum_may_take_a_tree() -> None:
    call, near, far = 8.4e-6, MACHINE.device.link_latency, MACHINE.network.latency
    over = Group(64, 8)  # eight nodes of eight
    ring = 56 * near + 7 * far
    assert links.latency("_allgather_base_", over, MACHINE) == pytest.approx(call + ring)
    assert links.latency("reduce_scatter_tensor", over, MACHINE) == pytest.approx(call + ring)
    tree = 7 * near + 3 * far
    assert tree < ring
    assert links.latency("allreduce_", over, MACHINE) == pytest.approx(call + 2 * tree)
    assert links.latency("send", Group(2, 1), MACHINE) == pytest.approx(call + far)


def test_a_group_on_a_node_without_a_switch_has_the_links_between_its_members() -> None:
    def rate(near: int, switched: bool) -> float:
        device = replace(MACHINE.device, node=4, switched=switched)
        on = replace(MACHINE, device=device)
        took = links.seconds("_allgather_base_", 0, 8e9, Group(near, near), on)
        return links.sent("_allgather_base_", 8e9, near) / took / device.link_share

    assert rate(2, switched=True) == pytest.approx(450e9)
    assert rate(2, switched=False) == pytest.approx(150e9)
    assert rate(4, switched=False) == pytest.approx(450e9)


def test_compilation_fuses_pointwise_operators_and_leaves_products_alone() -> None:
    names = ("memory/forward/bfloat16", "matmul/forward/bfloat16", "memory/update/float32")
    compiled = fused(seen({name: [4.0, 8.0, 16.0] for name in names}), left=0.25)
    assert [compiled.computed[name] for name in names] == [
        [1.0, 8.0, 4.0],
        [4.0, 8.0, 16.0],
        [4.0, 8.0, 16.0],
    ]


def test_the_interval_holds_the_estimate() -> None:
    work = seen({"matmul/forward/bfloat16": [1.0, 1e15, 0.0]})
    took = step_time(
        [(Part(0, 1, 1), work)], LayoutSection(), 1, Machine(1, MACHINE.device, MACHINE.network)
    )
    assert took.low < took.seconds < took.high


LLAMA = {"activation": "swiglu", "norm": "rmsnorm", "positions": "rope", "mlp_bias": False}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"kv_heads": 2, "tied": False, **LLAMA},
        {"heads": 4, "head_dim": 32, **LLAMA},
    ],
)
def test_flops_by_formula_are_those_of_the_operators(fields: dict) -> None:
    config = DecoderConfig(
        **{"layers": 3, "width": 256, "heads": 8, "vocab": 1024, "context": 128, **fields}
    )
    batch = {name: torch.zeros(2, 128, dtype=torch.int64) for name in ("tokens", "targets")}
    counted = model_flops(config, TaskSection(), batch)
    assert counted is not None
    assert flops.per_sample(config, 128) * 2 == pytest.approx(counted, rel=0.01)


def test_parameters_of_known_models() -> None:
    known = {
        "gpt3-175b": 174.6e9,
        "llama3-8b": 8.03e9,
        "llama2-70b": 68.98e9,
        "mixtral-8x7b": 46.7e9,
    }
    for preset, count in known.items():
        assert flops.parameters(DecoderConfig(preset=preset)) == pytest.approx(count, rel=0.005)
