"""Planted faults of divided models: tensor, context, pipeline, experts, norms; and checkpoints."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from megalith import step
from megalith.checkpoint import read, state, write
from megalith.layout import (
    apply,
    collectives,
    context,
    expert,
    norms,
    pipeline,
    tensor,
    vocabulary,
)
from megalith.layout.apply import Spread
from megalith.layout.pieces import Piece
from megalith.models.decoder.attention import Sdpa
from megalith.models.decoder.moe import MoE
from megalith.step import Step
from planted import Fault, Patch, replace, scaled

# --- tensor --------------------------------------------------------------------------------------


def partial_gradients_not_summed(patch: Patch) -> None:
    def apply_(right: Any, *args: Any, **options: Any) -> Any:
        return dataclasses.replace(right(*args, **options), partial=[])

    replace(patch, tensor, "apply", apply_)


def row_bias_added_on_every_rank(patch: Patch) -> None:
    def row(right: Any, module: Any, group: Any, sequence: bool) -> Any:
        add_up = tensor._sum(sequence)
        return lambda x: add_up(F.linear(x, module.weight, module.bias), group)

    replace(patch, tensor, "_row", row)


def row_parts_not_summed(patch: Patch) -> None:
    def row(right: Any, module: Any, group: Any, sequence: bool) -> Any:
        return lambda x: F.linear(x, module.weight, module.bias)

    replace(patch, tensor, "_row", row)


def columns_summed_instead_of_gathered(patch: Patch) -> None:
    def gather(right: Any, x: Tensor, dim: int, group: Any) -> Tensor:
        return torch.cat([collectives.total(x, group)] * dist.get_world_size(group), dim)

    replace(patch, collectives, "gather", gather)


def copy_without_the_backward_sum(patch: Patch) -> None:
    replace(patch, collectives, "copy", lambda right, x, group: x)


def total_sums_in_backward_too(patch: Patch) -> None:
    def total(right: Any, x: Tensor, group: Any) -> Tensor:
        return right(scaled(x, dist.get_world_size(group)), group)

    replace(patch, collectives, "total", total)


def rows_of_other_ranks_not_masked(patch: Patch) -> None:
    def lookup(right: Any, module: Any, group: Any, sequence: bool) -> Any:
        add_up = tensor._sum(sequence)
        first = dist.get_rank(group) * -(-module.num_embeddings // dist.get_world_size(group))

        def forward(tokens: Tensor) -> Tensor:
            local = (tokens - first).clamp(0, module.weight.shape[0] - 1)
            return add_up(F.embedding(local, module.weight), group)

        return forward

    replace(patch, tensor, "_lookup", lookup)


def exponentials_not_summed(patch: Patch) -> None:
    parts = {**vars(collectives), "sum_now": lambda x, group: x}
    patch.setattr(vocabulary, "collectives", SimpleNamespace(**parts))


def largest_logit_not_agreed(patch: Patch) -> None:
    parts = {**vars(collectives), "max_now": lambda x, group: x}
    patch.setattr(vocabulary, "collectives", SimpleNamespace(**parts))


# --- context -------------------------------------------------------------------------------------


def positions_start_at_zero_on_every_rank(patch: Patch) -> None:
    def part(right: Any, batch: Any, sequences: Any, ranks: int, *rest: Any) -> Any:
        found = right(batch, sequences, ranks, *rest)
        if ranks > 1:
            length = found["tokens"].shape[1]
            found["positions"] = torch.arange(length).expand_as(found["tokens"])
        return found

    replace(patch, context, "part", part)


def keys_in_the_order_of_ranks(patch: Patch) -> None:
    replace(patch, context, "_in_order", lambda right, x, dim, ranks, exchange: x)


def key_gradients_not_summed(patch: Patch) -> None:
    def gather_used(right: Any, x: Tensor, dim: int, group: Any) -> Tensor:
        ours = dim == context.TOKENS + 1  # the other callers are tensor parallelism's
        return collectives.gather(x, dim, group) if ours else right(x, dim, group)

    replace(patch, collectives, "gather_used", gather_used)


def causal_mask_aligned_to_the_first_key(patch: Patch) -> None:
    def forward(right: Any, self: Any, query: Any, key: Any, value: Any, **how: Any) -> Tensor:
        if how["mask"] is not None:
            how["mask"] = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril()
        return right(self, query, key, value, **how)

    replace(patch, Sdpa, "forward", forward)


def heads_come_back_in_another_order(patch: Patch) -> None:
    def swap(right: Any, x: Tensor, whole: int, divided: int, group: Any) -> Tensor:
        found = right(x, whole, divided, group)
        if divided != context.HEADS:
            return found
        ranks = dist.get_world_size(group)
        return found.unflatten(divided, (ranks, -1)).transpose(1, 2).flatten(1, 2)

    replace(patch, collectives, "swap", swap)


# --- pipeline ------------------------------------------------------------------------------------


def gradients_divided_by_micro_batches(patch: Patch) -> None:
    def run(right: Any, self: Any, micros: int, forward: Any, before: Any, key: Any) -> None:
        right(self, micros, forward, before, key)
        for stage in self.stages.values() if before is not None else ():
            for parameter in stage.parameters():
                parameter.grad.div_(micros)

    replace(patch, pipeline.Pipeline, "run", run)


def gradients_become_a_moving_average(patch: Patch) -> None:
    def run(right: Any, self: Any, micros: int, forward: Any, before: Any, key: Any) -> None:
        def halve(stage: int, last: bool) -> None:
            before(stage, last)
            for parameter in self.stages[stage].parameters():
                if parameter.grad is not None:
                    parameter.grad.div_(2)

        right(self, micros, forward, before and halve, key)

    replace(patch, pipeline.Pipeline, "run", run)


def last_micro_batch_dropped(patch: Patch) -> None:
    def run(right: Any, self: Any, micros: int, forward: Any, before: Any, key: Any) -> None:
        def dropping(stage: int, micro: int, received: Any) -> Tensor:
            made = forward(stage, micro, received)
            # The micro-batch before the last: the very last one has no targets.
            end = before is not None and stage == self.total - 1 and micro == micros - 2
            return scaled(made, 0.0) if end else made

        right(self, micros, dropping, before, key)

    replace(patch, pipeline.Pipeline, "run", run)


def gradient_of_another_micro_batch(patch: Patch) -> None:
    held: dict[tuple[int, ...], Tensor] = {}

    def backward(right: Any, made: Any, grad: Any) -> Any:
        if grad is not None:
            grad, held[tuple(grad.shape)] = held.get(tuple(grad.shape), grad), grad
        return right(made, grad)

    replace(patch, pipeline, "_backward", backward)


def tied_ends_not_summed(patch: Patch) -> None:
    replace(patch, apply, "_ends", lambda right, mesh: None)


def tied_ends_start_apart(patch: Patch) -> None:
    def fill(right: Any, model: Any, pieces: Any, seed: int) -> None:
        right(model, pieces, seed=seed)
        if dist.get_rank() == dist.get_world_size() - 1:
            model.embedding.weight.data.mul_(-1)

    replace(patch, step, "fill", fill)


# --- experts -------------------------------------------------------------------------------------


def expert_gradients_scaled(patch: Patch) -> None:
    def run(right: Any, self: Any, *args: Any) -> None:
        right(self, *args)
        for name, parameter in self.model.named_parameters():
            if self.divided_by.get(name) == "expert":
                parameter.grad.div_(self.mesh.sizes["expert"])

    replace(patch, Spread, "run", run)


def rows_return_to_other_tokens(patch: Patch) -> None:
    def exchange(right: Any, *args: Any) -> Tensor:
        return right(*args).roll(1, 0)

    replace(patch, expert, "exchange", exchange)


def balance_counted_twice(patch: Patch) -> None:
    replace(patch, MoE, "_balance", lambda right, *args: 2 * right(*args))


def balance_of_each_part_of_a_sequence(patch: Patch) -> None:
    replace(patch, expert, "share_sequences", lambda right, model, group: None)


def expert_load_of_one_rank(patch: Patch) -> None:
    replace(patch, Step, "_sum_loads", lambda right, self, loads: loads)


# --- norms with statistics -----------------------------------------------------------------------


def statistics_without_the_backward_sum(patch: Patch) -> None:
    replace(patch, norms, "_over_ranks", lambda right, x, group: collectives.total(x, group))


# --- checkpoints ---------------------------------------------------------------------------------

UP = "blocks.0.mlp.up.weight"


def _elsewhere(piece: Piece, shift: int) -> Piece:
    """A piece that says that it begins ``shift`` rows further on, around the end."""
    return dataclasses.replace(
        piece, start=((piece.start[0] + shift) % piece.shape[0], *piece.start[1:])
    )


def shards_written_in_another_order(patch: Patch) -> None:
    def write_pieces(right: Any, path: Any, number: int, parts: Any, mesh: Any) -> None:
        piece = parts["model"][UP]
        moved = {**parts["model"], UP: _elsewhere(piece, piece.shape[0] // 2)}
        right(path, number, {**parts, "model": moved}, mesh)

    replace(patch, write, "write_pieces", write_pieces)


def shard_written_one_row_too_low(patch: Patch) -> None:
    def write_pieces(right: Any, path: Any, number: int, parts: Any, mesh: Any) -> None:
        moved = {**parts["model"], UP: _elsewhere(parts["model"][UP], -1)} if mesh.rank else {}
        right(path, number, {**parts, "model": {**parts["model"], **moved}}, mesh)

    replace(patch, write, "write_pieces", write_pieces)


def optimizer_state_of_another_rank(patch: Patch) -> None:
    def copy(right: Any, self: Any, name: str, piece: Piece) -> None:
        if name.startswith(f"{UP}/") and piece.start:
            piece = _elsewhere(piece, piece.shape[0] // 2)
        right(self, name, piece)

    replace(patch, read.Reader, "copy", copy)


def optimizer_state_dropped_at_load(patch: Patch) -> None:
    replace(patch, state, "_restore_optimizer", lambda right, *args: None)


TENSOR = {"tensor": 2}
WHOLE = {"tensor": 2, "sequence_parallel": False}
CONTEXT = {"context": 2}
STAGES = {"pipeline": 2}
EXPERT = {"expert": 2}
SHARDS = {"shard": 2}

FAULTS = [
    Fault(partial_gradients_not_summed, "norms' gradients stay each rank's part",
          "row 11", TENSOR, ("tensor",), named="norm"),
    Fault(partial_gradients_not_summed, "the same among layouts of two axes",
          "row 11", {"shard": 2, "tensor": 2}, ("tensor",), named="norm"),
    Fault(partial_gradients_not_summed, "query and key norms see a part of the heads each",
          "row 13", WHOLE, ("tensor",), recipe="qwen", named="query_norm"),
    Fault(row_bias_added_on_every_rank, "the bias is added before the sum",
          "section 4", WHOLE, ("tensor",)),
    Fault(row_parts_not_summed, "a row layer's parts are not added up",
          "task of issue 3", WHOLE, ("tensor",)),
    Fault(columns_summed_instead_of_gathered, "logits are summed instead of gathered",
          "task of issue 3", TENSOR, ("tensor",), recipe="own loss"),
    Fault(copy_without_the_backward_sum, "what all ranks use gets one rank's gradient",
          "row 13", WHOLE, ("tensor",), named="gradient"),
    Fault(total_sums_in_backward_too, "the sum's gradient is summed once more",
          "task of issue 3", WHOLE, ("tensor",), named="gradient"),
    Fault(rows_of_other_ranks_not_masked, "ranks add rows of tokens that they do not hold",
          "task of issue 3", TENSOR, ("tensor",)),
    Fault(exponentials_not_summed, "the softmax is over a part of the vocabulary",
          "task of issue 3", TENSOR, ("tensor",)),
    Fault(largest_logit_not_agreed, "exponentials of different scale are added up",
          "task of issue 3", TENSOR, ("tensor",)),
    Fault(positions_start_at_zero_on_every_rank, "positions are those within the part",
          "section 7", CONTEXT, ("context",)),
    Fault(keys_in_the_order_of_ranks, "gathered keys keep the zig-zag order",
          "section 7", CONTEXT, ("context",)),
    Fault(key_gradients_not_summed, "keys get the gradient of one rank's queries",
          "row 15", CONTEXT, ("context",), named="key"),
    Fault(key_gradients_not_summed, "the same among layouts of two axes",
          "row 15", {"context": 2, "tensor": 2}, ("context",), named="key"),
    Fault(causal_mask_aligned_to_the_first_key, "late queries see the first keys only",
          "section 7", CONTEXT, ("context",)),
    Fault(heads_come_back_in_another_order, "heads are reshaped wrongly after the exchange",
          "row 17", {"context": 2, "exchange": "all-to-all"}, ("context",)),
    Fault(gradients_divided_by_micro_batches, "the schedule divides what is divided already",
          "rows 4, 5", STAGES, ("pipeline",), factor="/ the micro-batches of a rank"),
    Fault(gradients_become_a_moving_average, "each micro-batch divides those before it too",
          "row 4", STAGES, ("pipeline",)),
    Fault(last_micro_batch_dropped, "a micro-batch goes forward and not back",
          "row 7", STAGES, ("pipeline",), named="gradient"),
    Fault(gradient_of_another_micro_batch, "a received gradient is taken for another micro-batch",
          "task of issue 3", STAGES, ("pipeline",), named="gradient"),
    Fault(tied_ends_not_summed, "each end of a tied weight learns alone",
          "row 34, section 5", STAGES, ("pipeline",), named="embedding"),
    Fault(tied_ends_not_summed, "the same among layouts of two axes",
          "row 34", {"replicate": 2, "pipeline": 2}, ("pipeline",), named="embedding"),
    Fault(tied_ends_start_apart, "the last stage draws a head of its own",
          "rows 8, 34", STAGES, ("pipeline",)),
    Fault(expert_gradients_scaled, "experts' gradients are divided by the ranks that share them",
          "row 22, section 8", EXPERT, ("expert",), recipe="experts", factor="/ layout.expert"),
    Fault(rows_return_to_other_tokens, "experts' results return to other tokens",
          "section 8", EXPERT, ("expert",), recipe="experts"),
    Fault(balance_counted_twice, "the balance loss is added twice",
          "row 23", {"replicate": 2}, ("replicate",), recipe="experts", factor="is 2 times",
          named="balance"),
    Fault(balance_of_each_part_of_a_sequence, "the balance loss is of parts of sequences",
          "row 23", CONTEXT, ("context",), recipe="experts", named="balance"),
    Fault(expert_load_of_one_rank, "the router's bias follows the load of one rank",
          "row 23", {"replicate": 2}, ("replicate",), recipe="bias", named="bias"),
    Fault(statistics_without_the_backward_sum, "the statistics' gradient stays on its rank",
          "row 42", {"replicate": 2, "synchronised_norms": True}, ("replicate",),
          recipe="resnet", named="gradient"),
    Fault(shards_written_in_another_order, "a file says of two shards that they lie the other way",
          "row 33, section 9", SHARDS, ("shard",), named=f"{UP} (after loading"),
    Fault(shard_written_one_row_too_low, "pieces in files overlap",
          "section 9", SHARDS, ("shard",), failure=UP),
    Fault(optimizer_state_of_another_rank, "a shard goes on with another one's moments",
          "row 33", SHARDS, ("shard",), named=UP),
    Fault(optimizer_state_dropped_at_load, "moments start anew after loading",
          "row 33", SHARDS, ("shard",), named="exp_avg"),
]  # fmt: skip
