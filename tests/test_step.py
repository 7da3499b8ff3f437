"""The step's contracts: one division, exact gradients, clipping, precision, recomputation."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from megalith.core import seeds
from megalith.layout.precision import LossScale
from megalith.tasks.language import Language
from toys import gradients, ragged_batch, split, toy_step


def reference_gradients(step, batch):
    """The contract in five lines: mean over all valid targets, by plain autograd."""
    model = step.model
    logits = model(batch["tokens"]).flatten(0, 1)
    loss = F.cross_entropy(logits, batch["targets"].flatten(), ignore_index=-100)
    names, parameters = zip(*model.named_parameters(), strict=True)
    return loss, dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))


@pytest.mark.parametrize("sizes", [[6], [1, 5], [2, 2, 2], [1, 1, 1, 1, 1, 1], [3, 1, 2]])
def test_any_split_into_micro_batches_gives_the_gradient_of_one_big_batch(sizes: list[int]):
    step, batch = toy_step(), ragged_batch(6)
    loss, wanted = reference_gradients(step, batch)
    measured = step.backward(split(batch, sizes))
    torch.testing.assert_close(measured.loss, loss.detach(), rtol=1e-12, atol=0)
    torch.testing.assert_close(gradients(step.model), wanted, rtol=1e-11, atol=1e-14)
    norm = torch.stack([g.norm() for g in wanted.values()]).norm()
    torch.testing.assert_close(measured.norm, norm, rtol=1e-11, atol=0)
    assert int(measured.count) == int((batch["targets"] != -100).sum())


def test_a_loss_of_the_users_own_is_divided_once_too():
    def smoothed(logits, targets):
        return F.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), reduction="sum", label_smoothing=0.2
        )

    whole = toy_step(task=Language(loss=smoothed))
    parts = toy_step(task=Language(loss=smoothed))
    built_in = toy_step(task=Language(label_smoothing=0.2))
    batch = ragged_batch(6)
    whole.backward([batch])
    for other in (parts, built_in):
        other.backward(split(batch, [1, 2, 3]))
        torch.testing.assert_close(
            gradients(other.model), gradients(whole.model), rtol=1e-11, atol=1e-14
        )


def test_a_regularizer_counts_once_per_update():
    batch = ragged_batch(6)
    plain, whole, parts = toy_step(), toy_step(), toy_step()
    for step in (whole, parts):
        step.regularizer = lambda model: 0.5 * model.embedding.weight.square().sum()
    plain.backward([batch])
    whole.backward([batch])
    parts.backward(split(batch, [2, 2, 2]))
    wanted = gradients(plain.model)
    wanted["embedding.weight"] += plain.model.embedding.weight.detach()
    torch.testing.assert_close(gradients(whole.model), wanted, rtol=1e-11, atol=1e-14)
    torch.testing.assert_close(gradients(parts.model), wanted, rtol=1e-11, atol=1e-14)


def test_clipping_scales_the_whole_gradient_to_the_limit():
    step, batch = (
        toy_step(
            train__clip=0.01,
            optim__name="sgd",
            optim__momentum=0.0,
            optim__weight_decay=0.0,
            optim__schedule="constant",
            optim__lr=1.0,
        ),
        ragged_batch(6),
    )
    before = {n: p.detach().clone() for n, p in step.model.named_parameters()}
    measured = step.backward([batch])
    raw = gradients(step.model)
    assert measured.norm > 0.01
    step.update(measured)
    for name, parameter in step.model.named_parameters():
        wanted = before[name] - raw[name] * 0.01 / (measured.norm + 1e-6)
        torch.testing.assert_close(parameter.detach(), wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("mode", ["selective", "full"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_recomputation_changes_no_gradient_and_replays_dropout(mode: str, dropout: float):
    kept = toy_step(dropout=dropout)
    recomputed = toy_step(dropout=dropout, train__checkpointing=mode)
    micro_batches = split(ragged_batch(6), [3, 3])
    kept.backward(micro_batches)
    recomputed.backward(micro_batches)
    wanted = gradients(kept.model)
    assert gradients(recomputed.model).keys() == wanted.keys()
    torch.testing.assert_close(gradients(recomputed.model), wanted, rtol=1e-12, atol=1e-15)


def test_dropout_is_a_function_of_seed_update_and_micro_batch():
    batch = ragged_batch(2)
    first, again = toy_step(dropout=0.5), toy_step(dropout=0.5)
    first.backward([batch])
    torch.manual_seed(999)  # what ran in between does not matter
    again.backward([batch])
    torch.testing.assert_close(gradients(again.model), gradients(first.model), rtol=0, atol=0)
    other_update = toy_step(dropout=0.5)
    other_update.done = 1
    other_update.backward([batch])
    other_seed = toy_step(dropout=0.5, train__seed=1)
    other_seed.backward([batch])
    twice = toy_step(dropout=0.5)
    twice.backward([batch, batch])  # equal masks would give exactly the same mean gradient
    for step in (other_update, other_seed, twice):
        assert not torch.equal(
            step.model.blocks[0].up.weight.grad, first.model.blocks[0].up.weight.grad
        )


@pytest.mark.parametrize(("precision", "tolerance"), [("bf16", 0.03), ("fp16", 0.005)])
def test_mixed_precision_keeps_float32_weights_and_comes_close(precision: str, tolerance: float):
    exact, mixed = toy_step(torch.float32), toy_step(torch.float32, train__precision=precision)
    batch = ragged_batch(8)
    expected, measured = exact.backward([batch]), mixed.backward(split(batch, [4, 4]))
    assert measured.finite()
    torch.testing.assert_close(measured.loss, expected.loss, rtol=tolerance, atol=0)
    torch.testing.assert_close(measured.norm, expected.norm, rtol=tolerance, atol=0)
    for name, grad in gradients(mixed.model).items():
        assert grad.dtype == torch.float32
        want = gradients(exact.model)[name]
        assert (grad - want).norm() <= tolerance * want.norm() + 1e-7, name


def test_each_weight_is_cast_once_per_update():
    step = toy_step(torch.float32, train__precision="bf16")
    casts = 0
    weight = step.model.blocks[0].up.weight

    class Count(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal casts
            if function == torch.ops.aten._to_copy.default and args[0] is weight:
                casts += 1
            return function(*args, **(kwargs or {}))

    with Count():
        step.backward(split(ragged_batch(6), [2, 2, 2]))
    assert casts == 1
    before = gradients(step.model)["blocks.0.up.weight"]
    with torch.no_grad():
        weight.mul_(2)
    step.optimizers.zero_grad()
    step.backward(split(ragged_batch(6), [2, 2, 2]))
    assert not torch.equal(gradients(step.model)["blocks.0.up.weight"], before)


def test_float16_skips_an_overflow_halves_the_scale_and_clips_unscaled_gradients():
    step = toy_step(
        torch.float32,
        train__precision="fp16",
        train__clip=1e-3,
        optim__name="sgd",
        optim__momentum=0.0,
        optim__weight_decay=0.0,
        optim__schedule="constant",
        optim__lr=1.0,
    )
    assert step.loss_scale is not None
    step.loss_scale = LossScale(scale=2.0**40)
    before = {n: p.detach().clone() for n, p in step.model.named_parameters()}
    measured = step.backward([ragged_batch(6)])
    assert not measured.finite()
    step.skip()
    assert step.loss_scale.scale == 2.0**39
    assert (step.done, step.skipped) == (1, 1)
    assert all(torch.equal(p, before[n]) for n, p in step.model.named_parameters())
    step.loss_scale = LossScale(scale=1024.0, growth_interval=1)
    measured = step.backward([ragged_batch(6)])
    step.update(measured)
    moved = torch.stack([(p.detach() - before[n]).norm() for n, p in step.model.named_parameters()])
    torch.testing.assert_close(moved.norm(), torch.tensor(1e-3), rtol=1e-2, atol=0)
    assert step.loss_scale.scale == 2048.0


def test_compiled_blocks_give_the_same_gradients():
    torch._dynamo.reset()
    eager = toy_step(torch.float32)
    compiled = toy_step(torch.float32)
    for block in compiled.model.blocks:
        block.compile(backend="aot_eager")
    batch = ragged_batch(6)
    eager.backward([batch])
    compiled.backward(split(batch, [2, 4]))
    torch.testing.assert_close(
        gradients(compiled.model), gradients(eager.model), rtol=1e-4, atol=1e-6
    )


def test_average_follows_its_closed_form_and_is_applied_only_inside():
    step = toy_step(train__ema=0.5)
    assert step.ema is not None
    name = "blocks.0.up.weight"
    weight = step.model.blocks[0].up.weight
    average = weight.detach().clone()
    for update in range(1, 4):
        step.update(step.backward([ragged_batch(4)]))
        decay = min(0.5, (1 + update) / (10 + update))
        average = decay * average + (1 - decay) * weight.detach()
    torch.testing.assert_close(step.ema.average[name], average, rtol=1e-12, atol=0)
    trained = weight.detach().clone()
    with step.ema.applied():
        torch.testing.assert_close(weight.detach(), average, rtol=1e-12, atol=0)
    assert torch.equal(weight, trained)


def test_seeds_depend_on_every_part_of_their_path():
    paths = [(0, "a"), (1, "a"), (0, "b"), (0, "a", 0), ("0", "a"), (0, "a", "0")]
    assert len({seeds.derive(*path) for path in paths}) == len(paths)
    assert seeds.derive(0, "init", "w") == seeds.derive(0, "init", "w")
