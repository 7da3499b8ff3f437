"""The recipe's own step, run once as one rank on tensors without data.

Each trace has a process of its own: an operator that aborts in C++ ends that process, and is one
line of error here. What it saw comes back as a :class:`Trace`.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from megalith import step as steps
from megalith.core import imports
from megalith.layout import mesh as meshes
from megalith.layout.mesh import Mesh
from megalith.layout.units import named_parameters
from megalith.plan import accelerator, ranks
from megalith.plan.accelerator import Target
from megalith.plan.gloo import Copies
from megalith.plan.modules import Running
from megalith.plan.record import Record
from megalith.plan.tracker import Tracker
from megalith.recipe import Recipe
from megalith.step import Step
from megalith.tasks import Batch


@dataclass(frozen=True)
class Job:
    """What to trace.

    Attributes:
        facts: of the data: vocabulary, classes.
        sample: shape and dtype of each tensor of one sample, as ``{"tokens": ([128], "int64")}``.
        rank: which rank to be.
        target: the GPU to stand in for; ``None``: the CPU.
    """

    recipe: Recipe
    facts: Mapping[str, int]
    sample: Mapping[str, tuple[tuple[int, ...], str]]
    rank: int = 0
    target: Target | None = None


@dataclass
class Trace:
    """What one rank does in one update.

    Attributes:
        record: of the update alone, with what was there before it.
        groups: of each group's name, its ranks.
        parameters: on this rank.
        micros: micro-batches of the update on this rank.
    """

    record: Record
    groups: dict[str, tuple[int, ...]] = field(default_factory=dict)
    parameters: int = 0
    micros: int = 1


def trace(job: Job) -> Trace:
    """Run ``job`` in this process, which is of no other use afterwards.

    Raises:
        MegalithError: the recipe is refused.
    """
    device, stream = torch.device("cpu"), _no_stream
    if job.target is not None:
        runtime = accelerator.install(job.target)
        device, stream = torch.device(accelerator.NAME), runtime.streams.pool
    layout = job.recipe.layout
    if layout.ranks > 1:
        ranks.join(layout.ranks, job.rank, device.type)
    mesh = meshes.build(layout, device)
    fake = ranks.fake_mode()
    _import(job.recipe)
    built = steps.build(job.recipe, job.facts, device, mesh, inside=fake)
    with fake:
        batches = _batches(job, mesh, device)
        _tell_shapes(built, batches)
        running = Running(built.model)
        tracker = Tracker(device.type, stream, running.path)
        _tell_loss(tracker, built)
        _name_state(tracker, built)
        for batch in batches:
            for tensor in batch.values():
                tracker.name(tensor, "input")
        on_gloo = Copies(tracker) if layout.ranks > 1 and job.target is None else nullcontext()
        with tracker, on_gloo, running:
            _update(tracker, built, batches[: _least(job)])
            tracker.start_over()  # the first update found neither gradients nor moments
            _update(tracker, built, batches)
    return Trace(
        record=tracker.record,
        groups=mesh.groups(),
        parameters=sum(p.numel() for _, p in named_parameters(built.model)),
        micros=len(batches),
    )


def _least(job: Job) -> int:
    """Micro-batches that an update must have at least."""
    layout = job.recipe.layout
    return layout.pipeline if layout.schedule == "interleaved" else 1


def _import(recipe: Recipe) -> None:
    """The user's code, as it would be without a trace: importing it may make tensors."""
    for section, reference in (
        ("model", getattr(recipe.model, "factory", None)),
        ("task", recipe.task.factory),
    ):
        if reference is not None:
            imports.resolve(reference, f"{section}.factory")


def _no_stream() -> int:
    return 0


def _batches(job: Job, mesh: Mesh, device: torch.device) -> list[Batch]:
    """This rank's micro-batches of one update."""
    train = job.recipe.train
    micros = train.global_batch // (train.micro_batch * mesh.data_ranks)
    return [
        {
            name: torch.zeros(
                (train.micro_batch, *shape), dtype=getattr(torch, dtype), device=device
            )
            for name, (shape, dtype) in job.sample.items()
        }
        for _ in range(micros)
    ]


def _tell_shapes(built: Step, batches: list[Batch]) -> None:
    """What a pipeline's stages would tell each other: a fake header cannot be read."""
    pipeline = built.spread.pipeline
    if pipeline is None:
        return
    built.there = ["loss", *getattr(built.task, "sums", ())]
    config: Any = next(iter(pipeline.stages.values())).config
    mesh, section = built.mesh, built.spread.section
    cut = mesh.sizes["context"] * (mesh.sizes["tensor"] if section.sequence_parallel else 1)
    # Weights gathered in half precision make a residual stream in half precision.
    half = mesh.spread("shard") and built.precision.name != "fp32"
    dtype = built.precision.dtype if half else torch.float32
    for batch in batches:
        samples, length = batch["tokens"].shape
        shape = ((samples, length // cut, config.width), dtype)
        key = steps.shape_key(built.part(batch))
        pipeline.sent[key] = pipeline.received[key] = shape


def _tell_loss(tracker: Tracker, built: Step) -> None:
    """What the head's loss allocates is known by its role; a task's other operators by name."""
    task: Any = built.task
    if not hasattr(task, "head_loss"):
        return
    loss = task.head_loss

    def head_loss(*args: Any, **kwargs: Any) -> Any:
        with tracker.inside(role="loss"):
            return loss(*args, **kwargs)

    task.head_loss = head_loss


def _name_state(tracker: Tracker, built: Step) -> None:
    for name, tensor in built.model.state_dict(keep_vars=True).items():
        del name
        tracker.name(tensor, "weights" if isinstance(tensor, nn.Parameter) else "buffers")
    if built.ema is not None:
        for tensor in built.ema.average.values():
            tracker.name(tensor, "average")
    _name_moments(tracker, built)


def _name_moments(tracker: Tracker, built: Step) -> None:
    for part in built.optimizers.parts:
        for state in part.state.values():
            for value in state.values():
                if isinstance(value, Tensor):
                    tracker.name(value, "optimizer")


def _name_gradients(tracker: Tracker, built: Step) -> None:
    for _, parameter in named_parameters(built.model):
        if parameter.grad is not None:
            tracker.name(parameter.grad, "gradients")
    for module in built.model.modules():
        if isinstance(module, FSDPModule):
            for group in module._get_fsdp_state()._fsdp_param_groups:
                for one in group.fsdp_params:
                    tracker.name(one.unsharded_accumulated_grad, "gradients")  # not reduced yet


def _update(tracker: Tracker, built: Step, batches: list[Batch]) -> None:
    """One update, told apart into its phases; the step itself knows nothing of it."""
    backward = torch.autograd.graph._engine_run_backward

    def run_backward(*args: Any, **kwargs: Any) -> Any:
        with tracker.inside(phase="backward"):
            result = backward(*args, **kwargs)
        _name_gradients(tracker, built)
        return result

    torch.autograd.graph._engine_run_backward = run_backward
    torch.autograd._engine_run_backward = run_backward  # pyright: ignore
    try:
        with tracker.inside(phase="forward"):
            measured = built.backward(batches)
    finally:
        torch.autograd.graph._engine_run_backward = backward
        torch.autograd._engine_run_backward = backward  # pyright: ignore
    with tracker.inside(phase="update"):
        built.update(measured)
    _name_moments(tracker, built)
