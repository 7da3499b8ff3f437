"""Constants of devices that runs have told, kept beside the traces and used by every later plan.

The catalogue says what a device's maker promises and which share of it is usual;
:mod:`megalith.plan.calibrate` writes here which share runs on it reached.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megalith.core.errors import PlanError
from megalith.core.runs import write_whole
from megalith.plan.machine import HERE, Device, Machine, parse, this
from megalith.recipe.schema import TrainSection

FILE = Path(".cache/megalith/devices.toml")


def machine(on: str | Machine, train: TrainSection) -> tuple[Machine, list[str]]:
    """The machine that ``on`` names, with what runs told about its device; and a note if they did.

    Args:
        train: of the recipe: which of this machine's devices is meant, and in which precision.

    Raises:
        PlanError: the machine is not known, or the file is damaged.
    """
    if isinstance(on, Machine):
        return on, []
    found = parse(this(train.device) if on == HERE else on, train.precision)
    known = _read().get(found.device.key)
    if known is None:
        return found, []
    try:
        device = replace(
            found.device,
            bandwidth=float(known["bandwidth"]),
            flops={**found.device.flops, **_floats(known["flops"])},
            share={**found.device.share, **_floats(known["share"])},
            link_share=float(known["link_share"]),
        )
        runs = ", ".join(known["runs"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise PlanError(f"{FILE}: [{found.device.key}] is damaged; delete the file") from error
    return replace(found, device=device), [f"rates of {device.name} as fitted to {runs} ({FILE})"]


def keep(device: Device, runs: Sequence[str]) -> None:
    """Let later plans use the shares of ``device``, which were fitted to ``runs``."""
    rows: dict[str, Any] = _read()
    rows[device.key] = {
        "runs": list(runs),
        # This machine's own peaks are measured anew for each plan: those that were fitted count.
        "bandwidth": device.bandwidth,
        "flops": dict(device.flops),
        "share": {name: round(value, 4) for name, value in device.share.items()},
        "link_share": round(device.link_share, 4),
    }
    FILE.parent.mkdir(parents=True, exist_ok=True)
    write_whole(FILE, _toml(rows))


def _read() -> dict[str, Any]:
    if not FILE.exists():
        return {}
    try:
        return tomllib.loads(FILE.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise PlanError(f"{FILE}: cannot be read ({error}); delete it") from error


def _floats(values: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in values.items()}


def _toml(rows: Mapping[str, Any]) -> str:
    lines = ["# Written by `megalith plan --calibrate`; without this file the catalogue holds."]
    for key, row in rows.items():
        runs = ", ".join(_quoted(run) for run in row["runs"])
        lines += ["", f"[{_quoted(key)}]", f"runs = [{runs}]"]
        for name in ("flops", "share"):
            values = ", ".join(f"{which} = {value}" for which, value in row[name].items())
            lines.append(f"{name} = {{ {values} }}")
        lines += [f"{name} = {row[name]}" for name in ("bandwidth", "link_share")]
    return "\n".join([*lines, ""])


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
