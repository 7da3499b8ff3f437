"""Stand-ins for kernels allocate what the kernels do, where one can run here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from megalith.plan import kernels
from megalith.plan.accelerator import Target
from megalith.plan.memory import Memory, read
from megalith.plan.tracker import Tracker
from megalith.plan.worker import Asked, Pool, Seen
from megalith.recipe import parse

HALF = torch.bfloat16
aten: Any = torch.ops.aten


def births(work: Callable[[], Any], phase: str = "forward") -> list[int]:
    """Bytes of everything that is still there after ``work`` on meta tensors, sorted."""
    tracker = Tracker("meta")
    with tracker:
        kept = work()
    del kept
    alive = [e for e in tracker.record.memory if e.died is None and e.phase != "given"]
    return sorted(e.bytes for e in alive if e.bytes and e.operator not in ("detach", "given"))


def meta(*shape: int, dtype: torch.dtype = HALF) -> Tensor:
    return torch.empty(shape, device="meta", dtype=dtype)


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("dtype", [HALF, torch.float32])
def test_fused_rms_norm_allocates_what_the_fused_operator_does(
    dtype: torch.dtype, weighted: bool
) -> None:
    x, weight = meta(2, 16, 32, dtype=dtype), meta(32, dtype=dtype) if weighted else None
    real = aten._fused_rms_norm(x, [32], weight, 1e-5)
    x.requires_grad_()
    result = kernels._rms_norm(x, [32], weight, 1e-5)
    saved = result.grad_fn.saved_tensors
    assert [(t.shape, t.dtype) for t in (result, saved[2])] == [(t.shape, t.dtype) for t in real]
    assert saved[0] is x
    expected = functional.rms_norm(torch.zeros(2, 16, 32, dtype=dtype), [32])
    assert (result.shape, result.dtype) == (expected.shape, expected.dtype)


def test_its_backward_allocates_what_the_operators_does() -> None:
    x, weight = meta(2, 16, 32), meta(32)
    result, rstd = aten._fused_rms_norm(x, [32], weight, 1e-5)
    real = births(
        lambda: aten._fused_rms_norm_backward(result, x, [32], rstd, weight, [True, True])
    )
    for tensor in (x, weight):
        tensor.requires_grad_()
    ours = kernels._rms_norm(x, [32], weight, 1e-5)
    grads = torch.autograd.grad(ours, (x, weight), torch.empty_like(ours))
    assert sorted(g.nbytes for g in grads) == sorted(b for b in real if b in (2048, 64))
    assert [(g.shape, g.dtype) for g in grads] == [(t.shape, t.dtype) for t in (x, weight)]


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("size", [16, 20])
def test_flash_attention_keeps_its_result_and_a_number_per_row(size: int, kv_heads: int) -> None:
    batch, heads, length = 2, 4, 32
    query = meta(batch, heads, length, size)
    key = value = meta(batch, kv_heads, length, size)

    def attend(*tensors: Tensor) -> Any:
        return kernels._flash(*tensors, None, 0.0, True, None, kv_heads != heads)

    wide = -(-size // 8) * 8
    padded = meta(batch, heads, length, wide)
    real = aten._scaled_dot_product_flash_attention(padded, padded, padded, 0.0, True, False)
    result = 2 * batch * heads * length * wide
    assert [real[0].nbytes, real[1].nbytes] == [result, 4 * batch * heads * length]
    assert [real[6].nbytes, real[7].nbytes] == [16, 8]  # the state of the random numbers
    tracker = Tracker("meta")
    leaves = [t.clone().requires_grad_() for t in (query, key, value)]
    with tracker, tracker.inside(phase="forward"):
        out = attend(*leaves)
    made = [e.bytes for e in tracker.record.memory if e.operator.startswith("_scaled_dot")]
    assert sorted(b for b in made if b) == sorted([result, 4 * batch * heads * length, 16, 8])
    assert out.shape == query.shape


def attended(work: Callable[..., Tensor], dtype: torch.dtype, **options: Any) -> Memory:
    """Memory of forward and backward on the CPU, with real tensors."""
    leaves = [torch.zeros(2, 4, 32, 16, dtype=dtype).requires_grad_() for _ in range(3)]
    tracker = Tracker("cpu")
    with tracker:
        with tracker.inside(phase="forward"):
            total = work(*leaves, **options).sum()
        with tracker.inside(phase="backward"):
            total.backward()
    return read(tracker.record, None)


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize(
    ("mask", "dropout", "causal"), [(False, 0.0, False), (True, 0.0, False), (False, 0.1, True)]
)
def test_math_attention_takes_what_torchs_own_takes(
    dtype: torch.dtype, mask: bool, dropout: float, causal: bool
) -> None:
    given = torch.zeros(32, 32, dtype=dtype) if mask else None

    def ours(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return kernels._math(query, key, value, given, dropout, causal, None, False)

    def real(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            return functional.scaled_dot_product_attention(
                query, key, value, given, dropout_p=dropout, is_causal=causal
            )

    found, expected = attended(ours, dtype), attended(real, dtype)
    assert found.allocated == expected.allocated
    assert found.most["activations"] == expected.most["activations"]


ORDER = ("flash", "efficient", "math")


@pytest.mark.parametrize(
    ("capability", "dtype", "size", "value_size", "mask", "grouped", "expected"),
    [
        ((9, 0), HALF, 64, 64, False, False, "flash"),
        ((9, 0), HALF, 64, 64, False, True, "flash"),
        ((9, 0), HALF, 257, 257, False, False, "efficient"),
        ((9, 0), HALF, 64, 32, False, False, "efficient"),
        ((9, 0), HALF, 64, 64, True, False, "efficient"),
        ((9, 0), HALF, 64, 64, True, True, "math"),
        ((9, 0), torch.float32, 64, 64, False, False, "efficient"),
        ((9, 0), torch.float64, 64, 64, False, False, "math"),
        ((7, 5), HALF, 64, 64, False, False, "efficient"),
    ],
)
def test_attention_picks_the_first_kernel_that_takes_the_inputs(
    capability: tuple[int, int],
    dtype: torch.dtype,
    size: int,
    value_size: int,
    mask: bool,
    grouped: bool,
    expected: str,
) -> None:
    query, value = meta(1, 2, 8, size, dtype=dtype), meta(1, 2, 8, value_size, dtype=dtype)
    given = torch.ones(8, 8, dtype=torch.bool) if mask else None
    assert kernels.choose(ORDER, capability, query, value, given, grouped) == expected
    assert kernels.choose(("math",), capability, query, value, given, grouped) == "math"


SEQ, BATCH, WIDTH, HEADS = 256, 2, 1024, 16


def seen(layers: int, *, layout: dict[str, Any] | None = None, **more: Any) -> Seen:
    target = Target()
    model = {
        "layers": layers,
        "width": WIDTH,
        "heads": HEADS,
        "context": SEQ,
        "dropout": more.pop("dropout", 0.0),
    }
    recipe = parse(
        {
            "model": model,
            "data": {"sequence": SEQ},
            "train": {"global_batch": BATCH, "precision": "bf16", **more},
            "layout": layout or {},
        }
    )
    tokens = ((SEQ,), "int64")
    device = (target.capability, target.attention, target.memory)
    sample = {"tokens": tokens, "targets": tokens}
    return Pool(None, 1).one(Asked(recipe, {"vocab": 512}, sample, 0, device))


def per_layer(**more: Any) -> float:
    """Activations kept for backward by one more layer, in units of s b h bytes."""
    few, many = (seen(layers, **more).most["activations"] for layers in (3, 5))
    return (many - few) / 2 / (SEQ * BATCH * WIDTH)


# Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", section
# 4.1: 34 s b h bytes per layer with dropout, all in 16 bits, when attention keeps no scores. Here,
# under autocast: the MLP's activation is recomputed (- 8), the two norms keep their inputs in
# float32 (+ 4), and query, key and value each cast the norm's result (+ 4): 34 again.
def formula(dropout: bool = False, ranks: int = 1) -> float:
    """With sequence parallelism all is divided but the gathered inputs of the matmuls (8)."""
    gathered = 8 if ranks > 1 else 8 / ranks
    return gathered + (24 + 2 * dropout) / ranks


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, formula()),
        ({"dropout": 0.1}, formula(dropout=True)),
        ({"layout": {"shard": 8}, "global_batch": 8 * BATCH}, formula()),
        ({"checkpointing": "full"}, 4.0),  # the block's input, in float32
        ({"checkpointing": "full", "layout": {"shard": 8}, "global_batch": 8 * BATCH}, 2.0),
        ({"layout": {"tensor": 8}}, formula(ranks=8)),
    ],
    ids=str,
)
def test_activations_of_a_layer_follow_the_closed_form(
    options: dict[str, Any], expected: float
) -> None:
    per_row = 4 * HEADS / WIDTH / options.get("layout", {}).get("tensor", 1)  # log-normalisers
    expected += 0 if "checkpointing" in options else per_row
    assert per_layer(**options) == pytest.approx(expected, rel=0.005)
