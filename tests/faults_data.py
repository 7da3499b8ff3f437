"""Planted faults of data parallelism, counts, norms, optimizers and weights."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from megalith import optim, step
from megalith.layout import data
from megalith.layout.apply import Spread
from megalith.layout.mesh import Mesh
from megalith.layout.pieces import Piece
from megalith.optim import clip
from megalith.step import Step
from megalith.tasks.language import Language
from planted import Fault, Patch, replace

# --- gradients -----------------------------------------------------------------------------------


def averaged_over_replicas(patch: Patch) -> None:
    def finish(right: Any, self: Any) -> None:
        right(self)
        for parameter, group in self.parameters:
            parameter.grad.div_(dist.get_world_size(group))

    replace(patch, data.Replicas, "finish", finish)


def fsdp_divides_by_default(patch: Patch) -> None:
    replace(patch, FSDPModule, "set_gradient_divide_factor", lambda right, self, factor: None)


def ddp_averages_by_default(patch: Patch) -> None:
    def bucket(right: Any, group: Any, bucket: Any) -> Any:
        bucket.buffer().div_(dist.get_world_size(group))
        return right(group, bucket)

    # DDP looks at the hook's annotations, of which a plain function has none.
    replace(patch, data, "_sum_bucket", bucket)


def hybrid_shards_never_meet(patch: Patch) -> None:
    def before(right: Any, self: Any, last: bool) -> None:
        right(self, last)
        for module in self.modules:
            module.set_requires_all_reduce(False, recurse=False)

    replace(patch, data.Sharded, "before_backward", before)


def shards_never_reduced(patch: Patch) -> None:
    def before(right: Any, self: Any, last: bool) -> None:
        right(self, last)
        for module in self.modules:
            module.set_requires_gradient_sync(False, recurse=False)

    replace(patch, data.Sharded, "before_backward", before)


def last_micro_batch_not_reduced(patch: Patch) -> None:
    def before(right: Any, self: Any, last: bool) -> None:
        if last:
            self.early = [parameter.grad.clone() for parameter, _ in self.parameters]
        right(self, False)

    def finish(right: Any, self: Any) -> None:
        late = [p.grad - early for (p, _), early in zip(self.parameters, self.early, strict=True)]
        for (parameter, _), early in zip(self.parameters, self.early, strict=True):
            parameter.grad.copy_(early)
        self._next = 0
        right(self)
        for (parameter, _), rest in zip(self.parameters, late, strict=True):
            parameter.grad.add_(rest)

    replace(patch, data.Replicas, "before_backward", before)
    replace(patch, data.Replicas, "finish", finish)


def reduced_before_all_is_there(patch: Patch) -> None:
    def before(right: Any, self: Any, last: bool) -> None:
        if self._armed:
            self.finish()
        right(self, True)

    replace(patch, data.Replicas, "before_backward", before)


def only_the_last_micro_batch_kept(patch: Patch) -> None:
    def before(right: Any, self: Any, last: bool) -> None:
        for parameter, _ in self.parameters:
            parameter.grad = None
        right(self, last)

    replace(patch, data.Replicas, "before_backward", before)


def same_samples_on_every_rank(patch: Patch) -> None:
    patch.setattr(Mesh, "data_rank", property(lambda self: 0))


# --- counts --------------------------------------------------------------------------------------


def count_of_this_rank_only(patch: Patch) -> None:
    def count(right: Any, self: Any, batches: Any) -> Any:
        return torch.stack([self.task.count(batch) for batch in batches]).sum()

    replace(patch, Step, "_count", count)


def count_of_sequences_parts_missing(patch: Patch) -> None:
    def count(right: Any, self: Any, batches: Any) -> Any:
        found = right(self, batches)
        return found // self.mesh.sizes["context"]

    replace(patch, Step, "_count", count)


def nothing_to_learn_counts_as_one(patch: Patch) -> None:
    replace(patch, Language, "count", lambda right, self, batch: right(self, batch).clamp(min=1))


# --- norm and clipping ---------------------------------------------------------------------------


def norm_counts_every_copy(patch: Patch) -> None:
    def gradients(right: Any, self: Any) -> Any:
        return [(grad, True) for grad, _ in right(self)]

    replace(patch, Spread, "gradients", gradients)


def norm_divided_by_root_of_ranks(patch: Patch) -> None:
    def total(right: Any, self: Any, sums: Any, norm: Any) -> Any:
        return right(self, sums, None if norm is None else norm / self.mesh.size**0.5)

    replace(patch, Step, "_total", total)


def clipped_by_the_norm_of_one_shard(patch: Patch) -> None:
    def clip_(right: Any, grads: Any, norm: Any, limit: float) -> None:
        grads = list(grads)
        right(grads, clip.total_norm(grads), limit)

    replace(patch, clip, "clip_", clip_)


def clip_coefficient_not_applied(patch: Patch) -> None:
    replace(patch, clip, "clip_", lambda right, grads, norm, limit: None)


# --- optimizer, average, schedule, evaluation ----------------------------------------------------


def optimizer_steps_on_the_first_rank_only(patch: Patch) -> None:
    def step_(right: Any, self: Any) -> None:
        if dist.get_rank() == 0:
            right(self)

    replace(patch, optim.Optimizers, "step", step_)


def average_moves_on_the_first_rank_only(patch: Patch) -> None:
    def update(right: Any, self: Any, updates: int) -> None:
        if dist.get_rank() == 0:
            right(self, updates)

    replace(patch, optim.Ema, "update", update)


def schedule_stepped_once_per_rank(patch: Patch) -> None:
    def build(right: Any, *args: Any) -> Any:
        schedule = right(*args)
        return lambda update: schedule(update * dist.get_world_size())

    replace(patch, optim, "build_schedule", build)


def evaluation_counts_every_tensor_rank(patch: Patch) -> None:
    def total(right: Any, self: Any, sums: Any, norm: Any) -> Any:
        mesh = self.spread.mesh
        if norm is None:
            self.spread.mesh = dataclasses.replace(mesh, place={**mesh.place, "tensor": 0})
        try:
            return right(self, sums, norm)
        finally:
            self.spread.mesh = mesh

    replace(patch, Step, "_total", total)


def gathered_weights_go_stale(patch: Patch) -> None:
    replace(patch, data.Sharded, "rest", lambda right, self: None)


# --- initial weights -----------------------------------------------------------------------------


def each_rank_draws_with_its_own_seed(patch: Patch) -> None:
    def fill(right: Any, model: Any, pieces: Any, seed: int) -> None:
        right(model, pieces, seed=seed + dist.get_rank())

    replace(patch, step, "fill", fill)


def every_shard_is_the_first(patch: Patch) -> None:
    def fill(right: Any, model: Any, pieces: Any, seed: int) -> None:
        first = {n: Piece(p.tensor, p.shape, (0,) * len(p.start)) for n, p in pieces.items()}
        right(model, first, seed=seed)

    replace(patch, step, "fill", fill)


TWO_COPIES = {"replicate": 2}
TWO_SHARDS = {"shard": 2}

FAULTS = [
    Fault(averaged_over_replicas, "sums of loss / global count are averaged",
          "row 14, section 3", TWO_COPIES, ("replicate",), factor="/ layout.replicate"),
    Fault(averaged_over_replicas, "ranks that share sequences are averaged over",
          "row 15", {"context": 2}, ("context",), factor="/ layout.context"),
    Fault(averaged_over_replicas, "the same among layouts of two axes",
          "row 18", {"replicate": 2, "tensor": 2}, ("replicate",), factor="/ layout.replicate"),
    Fault(fsdp_divides_by_default, "FSDP2's divide factor is left as it is",
          "row 14, section 3", TWO_SHARDS, ("shard",), factor="/ layout.shard"),
    Fault(fsdp_divides_by_default, "the same among layouts of two axes",
          "section 3", {"shard": 2, "pipeline": 2}, ("shard",), factor="/ layout.shard"),
    Fault(ddp_averages_by_default, "DDP averages what is divided already",
          "row 14", {"replicate": 2, "engine": "ddp"}, ("replicate",),
          factor="/ layout.replicate"),
    Fault(hybrid_shards_never_meet, "shards are summed, their copies are not: both bring it in",
          "row 14", {"replicate": 2, "shard": 2}, ("replicate", "shard")),
    Fault(shards_never_reduced, "FSDP2's flag for accumulation stays off",
          "row 29", TWO_SHARDS, ("shard",)),
    Fault(last_micro_batch_not_reduced, "accumulation goes on after the sum",
          "row 20", TWO_COPIES, ("replicate",)),
    Fault(reduced_before_all_is_there, "what was summed is summed again with the next micro-batch",
          "row 29", TWO_COPIES, ("replicate",)),
    Fault(only_the_last_micro_batch_kept, "gradients are dropped before each backward pass",
          "rows 7, 29", TWO_COPIES, ("replicate",)),
    Fault(same_samples_on_every_rank, "ranks take the same samples",
          "row 39", TWO_COPIES, ("replicate",)),
    Fault(count_of_this_rank_only, "the loss is divided by what one rank counts",
          "rows 1, 2", TWO_COPIES, ("replicate",), named="count"),
    Fault(count_of_sequences_parts_missing, "the count is divided among those who share sequences",
          "row 15", {"context": 2}, ("context",), factor="x layout.context"),
    Fault(nothing_to_learn_counts_as_one, "a micro-batch without a target counts as one",
          "row 2", TWO_COPIES, ("replicate",), named="count"),
    Fault(norm_counts_every_copy, "the norm counts each copy",
          "row 10", TWO_COPIES, ("replicate",), factor="x root of layout.replicate",
          named="norm"),
    Fault(norm_counts_every_copy, "the norm counts norms once per tensor rank",
          "row 10", {"tensor": 2}, ("tensor",), named="norm"),
    Fault(norm_counts_every_copy, "tied weights of two stages count twice in the norm",
          "section 5", {"pipeline": 2}, ("pipeline",), named="norm"),
    Fault(norm_divided_by_root_of_ranks, "the norm is divided by the root of the ranks",
          "rows 10, 18", {"tensor": 2}, ("tensor",), factor="/ root of layout.tensor",
          named="norm"),
    Fault(clipped_by_the_norm_of_one_shard, "each shard is clipped by its own norm",
          "row 10", TWO_SHARDS, ("shard",), named="blocks.0"),
    Fault(clip_coefficient_not_applied, "gradients are measured and not clipped",
          "row 30", TWO_COPIES, ("replicate",), named="exp_avg"),
    Fault(optimizer_steps_on_the_first_rank_only, "one replica stays behind",
          "row 8", TWO_COPIES, ("replicate",), named="loss of update 2"),
    Fault(average_moves_on_the_first_rank_only, "shards of the average stay behind",
          "task of issue 3", TWO_SHARDS, ("shard",)),
    Fault(average_moves_on_the_first_rank_only, "copies of the average stay behind",
          "task of issue 3", TWO_COPIES, ("replicate",), named="evaluation of the average"),
    Fault(schedule_stepped_once_per_rank, "the learning rate falls too fast",
          "row 31", TWO_COPIES, ("replicate",), named="blocks.0"),
    Fault(evaluation_counts_every_tensor_rank, "evaluation adds up what tensor ranks agree on",
          "rows 37, 38", {"tensor": 2}, ("tensor",), factor="x layout.tensor",
          named="loss of evaluation"),
    Fault(gathered_weights_go_stale, "weights gathered for evaluation outlive a change of weights",
          "section 3", {"shard": 2, "zero": 2}, ("shard",), named="evaluation of the average"),
    Fault(each_rank_draws_with_its_own_seed, "the seed depends on the rank",
          "row 8", TWO_SHARDS, ("shard",)),
    Fault(each_rank_draws_with_its_own_seed, "the same, of replicas",
          "row 8", TWO_COPIES, ("replicate",)),
    Fault(every_shard_is_the_first, "every rank draws the same shard",
          "section 0", TWO_SHARDS, ("shard",)),
]  # fmt: skip
