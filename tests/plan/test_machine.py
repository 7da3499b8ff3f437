"""The catalogue of devices, and how a machine is asked for."""

from __future__ import annotations

import pytest

from megalith.core.errors import PlanError
from megalith.plan import machine
from megalith.plan.machine import parse

EVERY = machine.names()


def test_the_devices_that_people_rent_are_known() -> None:
    asked = ["A100-40GB", "A100-80GB", "H100-96GB", "H100-PCIe", "H100-SXM", "H200", "B200", "L4"]
    asked += ["L40S", "RTX-4090", "MI300X", "Ascend-910B", "Xeon-8480"]
    assert sorted(asked) == EVERY


@pytest.mark.parametrize("name", EVERY)
def test_every_row_has_a_source_and_numbers_that_agree(name: str) -> None:
    device = parse(name).device
    assert len(device.source) > 20
    assert 16e9 < device.memory < 300e9
    assert device.peak("bfloat16") >= device.peak("float32") > device.peak("float64")
    assert set(device.share) == {"matmul", "attention", "memory"}
    assert all(0 < share < 1 for share in device.share.values())
    assert device.rate("matmul", "bfloat16") < device.peak("bfloat16")
    assert device.rate("memory", "bfloat16") < device.bandwidth
    # A network between nodes is never faster than the links inside of one.
    assert machine.network(device.network).bandwidth <= device.link
    assert device.price > 0
    assert device.power > 0


def test_count_device_and_nodes() -> None:
    found = parse("64xH100")
    assert (found.count, found.device.key, found.nodes) == (64, "H100-SXM", 8)
    assert parse("8 x a100-40gb").device.key == "A100-40GB"
    assert parse("L4").count == 1
    assert "64 x NVIDIA H100" in found.describe()


def test_options_take_the_place_of_the_catalogues_numbers() -> None:
    found = parse("16xH100,network=ethernet-100,node=4,price=1.5,memory=94")
    assert (found.network.name, found.nodes, found.device.price) == ("ethernet-100", 4, 1.5)
    assert found.device.memory == 94 << 30


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("64xH10", "did you mean 'H100'?"),
        ("0xH100", "has no devices"),
        ("8xH100,network=ndr", "did you mean 'ndr-400'?"),
        ("8xH100,nodes=2", "did you mean 'node'?"),
        ("8xH100,price=cheap", "'cheap' is not a number"),
        ("8xH100,node=0", "must be more than nothing"),
    ],
)
def test_what_is_not_known_is_said_in_one_line(asked: str, said: str) -> None:
    with pytest.raises(PlanError, match=r"^--on: ") as caught:
        parse(asked)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_this_machine_is_measured() -> None:
    device = parse("this machine").device
    assert device.target() is None
    assert 1e8 < device.peak("float32") < 1e14
    assert 1e8 < device.bandwidth < 1e13
    assert device.memory > 1e8
