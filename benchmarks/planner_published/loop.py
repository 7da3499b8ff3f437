"""A published training loop, traced by the planner's own tracker as one rank of many.

The step is not the project's: its loops keep what the published programs keep. Bfloat16 weights and
optimizer state, logits bound during backward, and gradients that are reduced only after the last
micro-batch, so that FSDP2 holds them whole and in float32 until then.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from planner_published import llama
from planner_published.llama import Llama, Shape
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

from megalith.core.runs import write_whole
from megalith.plan import accelerator, ranks, summary
from megalith.plan.accelerator import Target
from megalith.plan.extrapolate import Point, extend
from megalith.plan.modules import Running
from megalith.plan.trace import Trace
from megalith.plan.tracker import Tracker
from megalith.plan.worker import Seen
from megalith.recipe.schema import LayoutSection


@dataclass(frozen=True)
class Program:
    """One published run.

    Attributes:
        half: weights and optimizer state in bfloat16, not float32.
        recompute: ``none``, ``op``, ``layer`` or ``full``.
        keeps: the logits (float32 ones, if widened) stay bound while backward runs.
        widened: the loss is that of float32 copies of the logits.
        clip: gradients are clipped by their norm.
        micros: micro-batches of an update; gradients are reduced after the last.
        gathers: see ``llama.split``.
        loose: see ``llama.Llama``.
        confirm: trace a third depth too, which must lie where the others say.
        full: trace all layers, for what is reserved, which is not linear in depth.
    """

    shape: Shape
    shard: int = 1
    tensor: int = 1
    batch: int = 1
    micros: int = 1
    recompute: str = "full"
    half: bool = False
    keeps: bool = False
    widened: bool = True
    clip: bool = True
    target: Target = field(default_factory=Target)
    confirm: bool = True
    full: bool = False
    gathers: bool = False
    loose: bool = False

    @property
    def layout(self) -> LayoutSection:
        """The same layout in the recipe's words."""
        return LayoutSection(shard=self.shard, tensor=self.tensor, zero=3)


def points(program: Program) -> list[Point]:
    """All layers, or few: four at least (FSDP gathers ahead), and the last trace may confirm.

    Two micro-batches stand for more: from the second on each does the same.
    """
    step = 2 if program.recompute == "layer" else 1
    few = [4 + step * n for n in range(2 + program.confirm)]
    depths = [program.shape.layers] if program.full else few
    return [Point(layers, 1, min(2, program.micros)) for layers in depths]


def see(programs: Sequence[Program], kept: Path | None = None, processes: int = 2) -> list[Seen]:
    """What each program's fullest rank does in an update.

    Args:
        kept: folder in which traces are remembered.

    Raises:
        RuntimeError: a program's traces do not lie on a line, or its peak moves with depth.
    """
    context = get_context("forkserver")
    context.set_forkserver_preload(["megalith.plan.preload", __name__])
    jobs = {(program, point, kept): None for program in programs for point in points(program)}
    with ProcessPoolExecutor(processes, context, max_tasks_per_child=1) as pool:
        traces = dict(zip(jobs, pool.map(_work, jobs), strict=True))
    seen: list[Seen] = []
    for program in programs:
        grid = points(program)
        mine = [traces[program, point, kept] for point in grid]
        goal = Point(program.shape.layers, 1, program.micros)
        whole = mine[0] if program.full else extend(grid, mine, goal)
        if whole is None:
            raise RuntimeError(f"the traces of {program} do not agree: {[s.moment for s in mine]}")
        seen.append(_repeated(whole, program.micros / grid[0].micros))
    return seen


def _repeated(seen: Seen, times: float) -> Seen:
    """The same with more micro-batches; what data ranks reduce, they reduce once."""

    def of(name: str) -> float:
        operator, phase, *rest = name.split("/")
        once = phase == "update" or ("reduce_scatter" in operator and rest == ["shard"])
        return 1.0 if once else times

    computed = {n: [v * of(n) for v in values] for n, values in seen.computed.items()}
    sent = {n: [v * of(n) for v in values] for n, values in seen.sent.items()}
    return replace(seen, computed=computed, sent=sent)


def _work(job: tuple[Program, Point, Path | None]) -> Seen:
    program, point, kept = job
    torch.set_num_threads(1)
    shape = replace(program.shape, layers=point.layers)
    small = replace(program, shape=shape, micros=point.micros, confirm=True, full=False)
    if kept is None:
        return trace(small)
    path = kept / f"{hashlib.sha256(repr(small).encode()).hexdigest()[:32]}.json"
    if not path.exists():
        kept.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(asdict(trace(small))))
    return Seen(**json.loads(path.read_text("utf-8")))


def trace(program: Program) -> Seen:
    """Trace one update of ``program`` in this process, which is of no other use afterwards."""
    runtime = accelerator.install(program.target)
    groups: dict[str, tuple[int, ...]] = {}
    meshes = _meshes(program, groups)
    with ranks.fake_mode():
        model = _model(program, meshes)
        optimizer = torch.optim.AdamW(_by_kind(model), lr=1e-4, fused=True)
        tokens = torch.zeros(
            (program.batch, program.shape.sequence), dtype=torch.int64, device=accelerator.NAME
        )
        batch = (tokens, torch.zeros_like(tokens))
        running = Running(model)
        tracker = Tracker(accelerator.NAME, runtime.streams.pool, running.path)
        for parameter in model.parameters():
            tracker.name(parameter, "weights")
        with tracker, running:
            _update(program, model, optimizer, batch, tracker)
            tracker.start_over()
            _update(program, model, optimizer, batch, tracker)
    count = sum(p.to_local().numel() if isinstance(p, DTensor) else p.numel() for p in _all(model))
    found = Trace(tracker.record, groups, count, program.micros)
    return summary.of_trace(found, program.target, program.layout)


def _meshes(program: Program, groups: dict[str, tuple[int, ...]]) -> dict[str, DeviceMesh]:
    sizes = {"shard": program.shard, "tensor": program.tensor}
    sizes = {name: size for name, size in sizes.items() if size > 1}
    if not sizes:
        return {}
    total = program.shard * program.tensor
    ranks.join(total, 0, accelerator.NAME)
    mesh = init_device_mesh(accelerator.NAME, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    found = {name: mesh[name] if len(sizes) > 1 else mesh for name in sizes}
    for one in found.values():
        group = one.get_group()
        groups[group.group_name] = tuple(dist.get_process_group_ranks(group))
    return found


def _model(program: Program, meshes: dict[str, DeviceMesh]) -> Llama:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16 if program.half else before)
    try:
        with torch.device(accelerator.NAME):
            model = Llama(program.shape, program.loose)
    finally:
        torch.set_default_dtype(before)
    if "tensor" in meshes:
        llama.split(model, meshes["tensor"], gathered=program.gathers)
    llama.recompute(model, program.recompute)
    if "shard" in meshes:
        llama.shard(model, meshes["shard"])
    return model


def _all(model: Llama) -> list[Any]:
    return list(model.parameters())


def _by_kind(model: Llama) -> list[dict[str, Any]]:
    """A fused optimizer takes no mix of tensors and DTensors, nor of meshes."""
    kinds: dict[Any, list[Any]] = {}
    for parameter in _all(model):
        kinds.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    return [{"params": kind} for kind in kinds.values()]


def _update(
    program: Program,
    model: Any,
    optimizer: torch.optim.Optimizer,
    batch: tuple[torch.Tensor, torch.Tensor],
    tracker: Tracker,
) -> None:
    divided = program.tensor > 1 and not program.gathers
    apart: AbstractContextManager[Any] = loss_parallel() if divided else nullcontext()
    mixed = not program.half and program.shard == 1
    with apart:
        for micro in range(program.micros):
            if program.shard > 1 and program.micros > 1:
                model.set_requires_gradient_sync(micro == program.micros - 1)
            with tracker.inside(phase="forward"):
                with torch.autocast(accelerator.NAME, torch.bfloat16, enabled=mixed):
                    logits = model(batch[0])
                    if program.keeps and program.widened:
                        logits = logits.float()
                    total = llama.loss(logits, batch[1], program.widened)
                    total = total / program.micros
                if not program.keeps:
                    del logits
            with tracker.inside(phase="backward"):
                total.backward()
            del total
            if program.keeps:
                del logits
    for parameter in model.parameters():
        tracker.name(parameter.grad, "gradients")
    with tracker.inside(phase="update"):
        if program.clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor):
                tracker.name(value, "optimizer")
