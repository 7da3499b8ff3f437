"""The rows of ``published_runs.csv``, and what each is to the planner.

A row is described by a :class:`Program` (a loop of the publisher's own), by a recipe of ours
(:class:`Described`), or not at all, for a stated reason.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass, replace
from pathlib import Path

from planner_published.llama import Shape
from planner_published.loop import Program

from megalith.plan.accelerator import Target
from megalith.plan.machine import Machine, parse

FILE = Path(__file__).with_name("published_runs.csv")
LOCAL_COPIES = {
    "KempnerInstitute": "KempnerForge, H200",
    "llama3_h100_202412": "torchtitan 2024-12, H100",
    "asyncTP": "torchtitan 2025-06, H100, tensor parallel",
    "llama3-8b_h200": "torchtitan 2025-06, H200",
    "docs/performance": "torchtitan 2024, A100 and H100",
    "PR #135": "torchtitan pull request 135, H100",
    "llm-foundry": "llm-foundry (MPT), A100 and H100",
    "table 5": "Korthikanti et al. 2022, table 5, A100",
    "fig. 1": "Korthikanti et al. 2022, figure 1",
    "cases_april2021": "Megatron-LM 2021, A100",
    "model_table": "Megatron-LM 2024, H100",
    "NeMo": "NeMo 24.12, H100",
    "litgpt": "litgpt, LoRA on A100",
    "LLaMA-Factory": "LLaMA-Factory",
}
"""A part of each source's name in the file, and what the page calls it."""


@dataclass(frozen=True)
class Row:
    """A line of the file; ``number`` counts from 1, numbers that are not given are 0."""

    number: int
    source: str
    model: str
    gpus: int
    gpu: str
    shard: int
    tensor: int
    pipeline: int
    sequence: int
    batch: int
    whole: int
    recompute: str
    compiled: bool
    dtype: str
    memory: float
    tokens: float
    tflops: float
    note: str

    @property
    def micros(self) -> int:
        """Micro-batches of a rank in an update."""
        data = self.gpus // (self.tensor * self.pipeline)
        return max(1, self.whole // max(1, self.batch * data))

    @property
    def layout(self) -> str:
        """Such as ``shard 8, tensor 4``."""
        axes = {"shard": self.shard, "tensor": self.tensor, "pipeline": self.pipeline}
        words = [f"{name} {size}" for name, size in axes.items() if size > 1]
        words += ["interleaved"] if self.interleaved else []
        return ", ".join(words) or "one GPU"

    @property
    def interleaved(self) -> bool:
        """Whether a rank of torchtitan's pipeline has more than one stage."""
        return "Interleaved 1F1B" in self.note


@dataclass(frozen=True)
class Described:
    """A recipe of ours: a GPT of the given sizes, its layout, and recomputation.

    Attributes:
        stages: of each rank of an interleaved pipeline; 1: plain 1F1B.
    """

    width: int
    layers: int
    heads: int
    vocab: int
    zero: int = 3
    recompute: str = "none"
    sequence_parallel: bool = True
    stages: int = 1


_LLAMAS = {
    "8B": (4096, 32, 32, 8, 14336, 128256),
    "8.03B": (4096, 32, 32, 8, 14336, 128256),
    "14.84B": (5120, 40, 40, 8, 17920, 128256),
    "70B": (8192, 80, 64, 8, 28672, 128256),
    "70.55B": (8192, 80, 64, 8, 28672, 128256),
    "405B": (16384, 126, 128, 8, 53248, 128256),
    "2 7B": (4096, 32, 32, 32, 11008, 32000),
    "2 13B": (5120, 40, 40, 40, 13824, 32000),
    "2 70B": (8192, 80, 64, 8, 28672, 32000),
}
_MPT = {
    "125m": (768, 12, 12),
    "350m": (1024, 24, 16),
    "760m": (1536, 24, 12),
    "1b": (2048, 24, 16),
    "3b": (2560, 32, 32),
    "7b": (4096, 32, 32),
    "13b": (5120, 40, 40),
    "30b": (7168, 48, 56),
    "70b": (8192, 80, 64),
}
_MEGATRON = {  # width, layers, heads, stages of a rank
    "GPT 22B": (6144, 48, 64, 1),
    "GPT 175B": (12288, 96, 96, 3),
    "MT-NLG 530B": (20480, 105, 128, 3),
    "GPT 1T": (25600, 128, 160, 1),
}
_MACHINES = {
    "H100-96GB": "H100-96GB",
    "H100-95GB": "H100-96GB",
    "H100-94GB": "H100-96GB",
    "H100-80GB": "H100-SXM",
    "h100_80gb": "H100-SXM",
    "A100-80GB": "A100-80GB",
    "a100_80gb": "A100-80GB",
    "a100_40gb": "A100-40GB",
    "H200": "H200",
}
_HOW = {"none": "none", "full": "full", "selective op": "op", "selective layer": "layer"}


def read(path: Path = FILE) -> list[Row]:
    """All rows of the file."""
    with path.open(encoding="utf-8", newline="") as file:
        return [_row(n, line) for n, line in enumerate(csv.DictReader(file), 1)]


def _row(number: int, line: dict[str, str]) -> Row:
    def whole(name: str, default: int = 0) -> int:
        return int(float(line[name] or default))

    source = next(name for part, name in LOCAL_COPIES.items() if part in line["source"])
    return Row(
        number=number,
        source=source,
        model=line["model"],
        gpus=whole("gpus", 1),
        gpu=line["gpu_type"],
        shard=whole("fsdp", 1),
        tensor=whole("tp", 1),
        pipeline=whole("pp", 1),
        sequence=whole("seq"),
        batch=whole("local_bs"),
        whole=whole("global_bs"),
        recompute=line["ac"],
        compiled=line["compile"] == "1",
        dtype=line["dtype"],
        memory=float(line["peak_mem_gib"] or 0),
        tokens=float(line["tokens_per_s_per_gpu"] or 0),
        tflops=float(line["tflops_per_gpu"] or 0),
        note=line["note"],
    )


def machine(row: Row) -> Machine:
    """The catalogue's machine that stands for the row's."""
    name = next(ours for theirs, ours in _MACHINES.items() if row.gpu.startswith(theirs))
    if "4/node" not in row.gpu:
        return parse(f"{row.gpus}x{name}")
    # NVIDIA's board with four of them has no switch: each pair is joined by a third of the links.
    on = parse(f"{row.gpus}x{name},node=4")
    return replace(on, device=replace(on.device, switched=False))


def refusal(row: Row) -> str:
    """Why a row cannot be described; empty if it can."""
    if "LLaMA-Factory" in row.source:
        return "an estimate of the source, not a measurement"
    if "figure 1" in row.source:
        return "computed by a formula in the source, not measured"
    if "litgpt" in row.source:
        return "LoRA with most weights frozen, on samples whose lengths are not given"
    if "8" in row.dtype and ("float8" in row.dtype or "fp8" in row.dtype):
        return "float8: products and copies that the planner does not model"
    if "async TP" in row.note:
        return "asynchronous tensor parallelism: compiled kernels that send while they multiply"
    if "FSDP1" in row.recompute:
        return "FSDP1: flat parameters, which neither torch's FSDP2 nor ours has"
    if "Megatron-LM" in row.source:
        return "the micro-batch is not given, and the number of interleaved stages neither"
    return ""


def program(row: Row) -> Program | None:
    """The published loop of a Llama row."""
    if "Llama" not in row.model or refusal(row):
        return None
    kempner = "KempnerForge" in row.source
    how = "full" if "full" in row.recompute else _HOW.get(row.recompute, "op")
    device = machine(row).device
    return Program(
        shape=llama(row),
        shard=row.shard,
        tensor=row.tensor,
        batch=row.batch,
        micros=row.micros,
        recompute=how,
        half=kempner,
        # In March 2024 torchtitan's training loop held on to its logits.
        keeps=kempner or "request 135" in row.source,
        widened=not kempner,
        clip=row.tensor == 1,
        target=Target(device.capability, device.attention, device.memory),
        confirm=bool(row.memory) and row.tensor == 1,
        full=row.note.startswith("memory is peak reserved"),
        gathers=kempner,
        loose="torchtitan" in row.source and not row.compiled and row.tensor == 1,
    )


def llama(row: Row) -> Shape:
    """Sizes of a row's Llama."""
    names = sorted(_LLAMAS, key=len, reverse=True)
    model = row.model.replace("Llama-3 arch", "")
    return Shape(*_LLAMAS[next(n for n in names if f" {n} " in f" {model} ")], row.sequence)


def described(row: Row) -> Described | None:
    """A GPT row as a recipe of ours."""
    if refusal(row) or "Llama" in row.model:
        return None
    if "llm-foundry" in row.source:
        width, layers, heads = _MPT[row.model.removeprefix("MPT ")]
        zero = 2 if "SHARD_GRAD_OP" in row.note else 3
        return Described(width, layers, heads, 50368, zero, row.recompute)
    width, layers, heads, stages = _MEGATRON[row.model.split(" h")[0]]
    full = row.recompute == "full"
    # Recomputing the attention core is what a fused attention kernel does by itself.
    how = "full" if full else "none"
    return Described(width, layers, heads, 51200, 3, how, not full, stages)
