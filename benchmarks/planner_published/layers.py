"""Activations that a layer keeps for backward, against Korthikanti et al. 2022, section 4.

In units of ``s b h`` bytes: tokens of a micro-batch times width. The model is their 22B one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from megalith.plan.machine import parse as device
from megalith.plan.worker import Asked, Pool, refused
from megalith.recipe import parse

_WIDTH, _HEADS, _SEQUENCE = 6144, 64, 2048
_DEPTHS = (3, 5)
_SCORES = 5 * _HEADS * _SEQUENCE / _WIDTH
"""What a layer keeps of attention's scores, if it keeps them."""


@dataclass(frozen=True)
class Case:
    """One way to run the layer, and what the paper's formula says of it.

    Attributes:
        fused: attention by one kernel, which keeps no scores; else by single operators.
        note: why the formula does not apply as it stands.
    """

    name: str
    formula: float
    tensor: int = 1
    fused: bool = True
    checkpointing: str = "none"
    note: str = ""


CASES = (
    Case(
        "scores kept",
        34 + _SCORES,
        fused=False,
        note="autocast takes the softmax in float32: a score costs 7 bytes, not 5; and 4 more",
    ),
    Case("no scores kept (selective, or fused attention)", 34),
    Case(
        "full recomputation",
        2,
        checkpointing="full",
        note="the residual stream is float32 under autocast: 4 bytes, not 2",
    ),
    Case(
        "tensor 8, sequence parallel, scores kept",
        (34 + _SCORES) / 8,
        tensor=8,
        fused=False,
        note="the inputs of query, key, value and MLP stay gathered: 7; the softmax as above",
    ),
    Case(
        "tensor 8, sequence parallel, no scores kept",
        34 / 8,
        tensor=8,
        note="the inputs of query, key, value and MLP stay gathered: 8, not 8 / 8",
    ),
    Case(
        "tensor 8, sequence parallel, full recomputation",
        2 / 8,
        tensor=8,
        checkpointing="full",
        note="the residual stream is float32, as above",
    ),
)


def table(pool: Pool, cases: Sequence[Case] = CASES) -> list[dict[str, Any]]:
    """Formula and trace of each case, in bytes per ``s b h``."""
    seen = refused(pool.see([_asked(case, depth) for case in cases for depth in _DEPTHS]))
    few, many = seen[::2], seen[1::2]
    unit = _SEQUENCE * _WIDTH * (_DEPTHS[1] - _DEPTHS[0])
    return [
        asdict(case) | {"traced": (b.most["activations"] - a.most["activations"]) / unit}
        for case, a, b in zip(cases, few, many, strict=True)
    ]


def _asked(case: Case, layers: int) -> Asked:
    made = parse(
        {
            "model": {
                "layers": layers,
                "width": _WIDTH,
                "heads": _HEADS,
                "vocab": 51200,
                "context": _SEQUENCE,
                "dropout": 0.1,
                "attention": "sdpa" if case.fused else "reference",
            },
            "data": {"sequence": _SEQUENCE},
            "train": {
                "global_batch": 1,
                "micro_batch": 1,
                "precision": "bf16",
                "checkpointing": case.checkpointing,
            },
            "layout": {"tensor": case.tensor},
        }
    )
    sample: dict[str, Any] = dict.fromkeys(("tokens", "targets"), ((_SEQUENCE,), "int64"))
    target = device("A100-80GB").device.target()
    assert target is not None
    packed = (target.capability, target.attention, target.memory)
    return Asked(made, {"vocab": 51200}, sample, 0, packed)
