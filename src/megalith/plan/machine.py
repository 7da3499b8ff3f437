"""The machine that a plan is for: how many of which device, in nodes of how many, on which network.

The numbers stand in ``devices.toml``, each with its source. ``this machine`` is measured instead.
"""

from __future__ import annotations

import functools
import importlib.resources
import re
import time
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from megalith.core import devices
from megalith.core.errors import PlanError, nearest
from megalith.plan.accelerator import Target

HERE = "this machine"
"""What ``--on`` calls the machine that the planner runs on; left out means the same."""

_SHORT = {"A100": "A100-80GB", "H100": "H100-SXM", "4090": "RTX-4090", "910B": "Ascend-910B"}
_ASKED = re.compile(r"(?:(\d+)\s*x\s*)?([^,]+)((?:,[^,]*)*)", re.IGNORECASE)
_NAMES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}


@dataclass(frozen=True)
class Network:
    """What joins nodes: bytes/s in each direction and device, and seconds for a message."""

    name: str
    bandwidth: float
    latency: float


@dataclass(frozen=True)
class Device:
    """One device; the fields are those of ``devices.toml``.

    Attributes:
        share: of the peak rates that large operators reach.
        spread: a step's time may be this share shorter or longer than the estimate.
        switched: whether a switch joins the devices of a node, so that any of them get all of
            ``link``; else it is divided among direct links to each of the others.
        link_latency: seconds for a step of a collective within a node.
        link_share: of the links' and the network's bandwidth that large messages reach.
        shown: share of the shorter of operators and data traffic that does not hide behind the
            other: kernels of both want the same processors and memory.
        waited: what a collective that is waited for takes beyond its own time, as a factor:
            kernels drain before it and fill up after it.
    """

    key: str
    name: str
    memory: int
    bandwidth: float
    flops: Mapping[str, float]
    share: Mapping[str, float]
    link: float
    network: str
    source: str = ""
    called: tuple[str, ...] = ()
    kind: str = "gpu"
    spread: float = 0.25
    capability: tuple[int, int] = (8, 0)
    attention: tuple[str, ...] = ("flash", "efficient", "math")
    power: float = 0.0
    price: float = 0.0
    node: int = 8
    context: int = 600 << 20
    collective: int = 1 << 30
    switched: bool = True
    link_latency: float = 3.4e-6
    link_share: float = 0.75
    shown: float = 0.28
    waited: float = 1.0

    def rate(self, kind: str, dtype: str) -> float:
        """FLOP/s that operators of ``kind`` reach in ``dtype``; bytes/s for ``memory``."""
        if kind == "memory":
            return self.bandwidth * self.share["memory"]
        return self.peak(dtype) * self.share[kind]

    def peak(self, dtype: str) -> float:
        """FLOP/s of dense matrix products in ``dtype`` (torch's name of it)."""
        name = _NAMES.get(dtype, "fp32")
        return self.flops.get(name, self.flops["fp32"] / (2 if name == "fp64" else 1))

    def target(self) -> Target | None:
        """What a trace stands in for; ``None`` for the CPU."""
        if self.kind == "cpu":
            return None
        return Target(self.capability, self.attention, self.memory)


@dataclass(frozen=True)
class Machine:
    """``count`` devices in nodes of ``node``.

    Attributes:
        asked: how the user called it.
    """

    count: int
    device: Device
    network: Network
    asked: str = field(default=HERE)

    @property
    def node(self) -> int:
        """Devices of a node."""
        return self.device.node

    @property
    def nodes(self) -> int:
        """Nodes, the last one perhaps not full."""
        return -(-self.count // self.node)

    def describe(self) -> str:
        """In a few words."""
        many = f"{self.count} x {self.device.name}"
        if self.nodes == 1:
            return many
        return f"{many}, {self.nodes} nodes of {self.node}, {self.network.name}"

    def part(self, count: int) -> Machine:
        """The first ``count`` devices of it."""
        return replace(self, count=count)


def parse(asked: str, precision: str = "fp32") -> Machine:
    """The machine that ``asked`` names: ``64xH100``, ``8xA100-40GB,network=ethernet-100,node=4``.

    Args:
        asked: count and device of the catalogue; with ``network``, ``node``, ``price`` (dollars per
            device and hour) and ``memory`` (GiB) in their place.
        precision: of this machine's measured rate, where it is asked for.

    Raises:
        PlanError: the device, the network or an option is not known.
    """
    found = _ASKED.fullmatch(asked.strip())
    if found is None:
        raise PlanError(f"--on: '{asked}' is not a machine, such as 64xH100 or 8xA100-40GB")
    count, name, rest = int(found[1] or 1), found[2].strip(), found[3]
    if count < 1:
        raise PlanError(f"--on: {asked} has no devices")
    device = here(precision) if name.lower() in (HERE, "here", "cpu") else _find(name)
    for word in filter(None, rest.split(",")):
        device = _changed(device, word)
    return Machine(count, device, network(device.network), asked)


def here(precision: str = "fp32") -> Device:
    """This machine's CPU, measured: the rate of matrix products and of copies, and its memory."""
    device, dtype = torch.device("cpu"), devices.DTYPES[precision]
    computing = dtype if devices.multiplies_natively(device, dtype) else torch.float32
    measured = devices.matmul_peak(device, computing, seconds=0.5)
    bandwidth = _copy_rate()
    return Device(
        key="cpu",
        name="this machine's CPU",
        memory=devices.memory_total(device),
        bandwidth=bandwidth,
        flops={"fp32": measured, precision: measured},
        # Of the best rates, in updates of four decoders and a ResNet (docs/lab-notes.md): GELU and
        # its like take longer than their bytes do.
        share={"matmul": 0.75, "attention": 0.48, "memory": 0.36},
        link=bandwidth / 2,
        network="ethernet-25",
        source="measured when asked for",
        kind="cpu",
        spread=0.35,
        node=1 << 20,
        context=300 << 20,
        collective=0,
        link_latency=50e-6,
    )


def this(device: str = "auto", count: int | None = None) -> str:
    """What ``--on`` calls the device that ``train.device`` picks here; the CPU if it is no other.

    Args:
        count: of devices; left out: all that are here.

    Raises:
        PlanError: an accelerator that the catalogue does not know.
        RecipeError: ``train.device`` is not in this machine.
    """
    chosen = devices.pick(device)
    if not devices.is_accelerator(chosen):
        return HERE
    called = devices.describe(chosen)
    key = key_of(called)
    if key is None:
        raise PlanError(
            f"--on: this machine's '{called}' is not in the catalogue; name the nearest"
        )
    return f"{count or torch.accelerator.device_count()}x{key}"


def names() -> list[str]:
    """The devices of the catalogue."""
    return sorted(_catalogue()["devices"])


def key_of(called: str) -> str | None:
    """The device of the catalogue that torch calls so; ``None``: there is none."""
    known = _catalogue()["devices"].items()
    return next((key for key, row in known if called in row.get("called", ())), None)


def network(name: str) -> Network:
    """A network of the catalogue.

    Raises:
        PlanError: there is none of this name.
    """
    known = _catalogue()["networks"]
    if name not in known:
        raise PlanError(f"--on: no network '{name}'{nearest(name, known)}; {', '.join(known)}")
    return Network(name, known[name]["bandwidth"], known[name]["latency"])


def _find(name: str) -> Device:
    known = _catalogue()["devices"]
    by_lower = {key.lower(): key for key in known}
    by_lower |= {short.lower(): key for short, key in _SHORT.items()}
    key = by_lower.get(name.lower().replace(" ", "-"))
    if key is None:
        hint = nearest(name.upper(), [*known, *_SHORT])
        raise PlanError(f"--on: no device '{name}'{hint}; known are {', '.join(known)}, and cpu")
    row = dict(known[key])
    for field_ in ("capability", "attention", "called"):
        if field_ in row:
            row[field_] = tuple(row[field_])
    return Device(key=key, **row)


def _changed(device: Device, word: str) -> Device:
    field_, _, value = word.strip().partition("=")
    kinds: dict[str, Any] = {"network": str, "node": int, "price": float, "memory": float}
    if field_ not in kinds:
        raise PlanError(f"--on: no option '{field_}'{nearest(field_, kinds)}; {', '.join(kinds)}")
    try:
        given = kinds[field_](value)
    except ValueError:
        raise PlanError(f"--on: {field_} = '{value}' is not a number") from None
    if field_ != "network" and given <= 0:
        raise PlanError(f"--on: {field_} = {value} must be more than nothing")
    return replace(device, **{field_: int(given * 2**30) if field_ == "memory" else given})


@functools.cache
def _catalogue() -> dict[str, Any]:
    text = importlib.resources.files("megalith.plan").joinpath("devices.toml").read_text("utf-8")
    return tomllib.loads(text)


def _copy_rate() -> float:
    """Bytes read and written in a second by a copy of 64 MiB, the best of five."""
    source = torch.ones(16 << 20)
    out, best = torch.empty_like(source), float("inf")
    for _ in range(5):
        start = time.perf_counter()
        out.copy_(source)
        best = min(best, time.perf_counter() - start)
    return 2 * source.numel() * source.element_size() / best
