"""Groups, state, and updates of the optimizers."""

from __future__ import annotations

import pytest
import torch

from megalith import optim
from megalith.core.errors import RecipeError
from megalith.recipe import parse
from toys import Toy, ragged_batch, toy_step


def groups_of(model, **fields):
    optimizers = optim.build(parse({"optim": fields}).optim, model)
    return {
        optimizers.names[p]: (group["lr"], group["weight_decay"])
        for group in optimizers.groups
        for p in group["params"]
    }


def test_norms_biases_and_embeddings_are_not_decayed_unless_asked():
    found = groups_of(Toy(), weight_decay=0.1)
    decayed = {name for name, (_, decay) in found.items() if decay}
    assert decayed == {f"blocks.{i}.{m}.weight" for i in (0, 1) for m in ("up", "down")}
    assert {decay for _, decay in groups_of(Toy(), weight_decay=0.1, decay_all=True).values()} == {
        0.1
    }


def test_groups_by_name_set_learning_rate_and_decay_and_the_first_match_counts():
    found = groups_of(
        Toy(),
        lr=1e-3,
        weight_decay=0.1,
        groups=[
            {"match": "blocks.0.up.*", "lr": 1e-4},
            {"match": "blocks.*", "weight_decay": 0.0},
        ],
    )
    assert found["blocks.0.up.weight"] == (1e-4, 0.1)
    assert found["blocks.1.up.weight"] == (1e-3, 0.0)
    with pytest.raises(RecipeError, match=r"optim\.groups: 'nothing\.\*' matches no parameter"):
        groups_of(Toy(), groups=[{"match": "nothing.*"}])


def test_group_learning_rates_follow_the_schedule_each_by_its_own():
    step = toy_step(
        optim__lr=1.0,
        optim__groups=[{"match": "blocks.*", "lr": 0.1}],
        optim__schedule="linear",
        optim__final=0.0,
        train__steps=5,
    )
    for update in range(5):
        step.update(step.backward([ragged_batch(2)]))
        rates = {group["lr"] for group in step.optimizers.groups}
        factor = 1 - update / 4
        assert sorted(rates) == pytest.approx(sorted({1.0 * factor, 0.1 * factor}))


@pytest.mark.parametrize("name", ["adamw", "sgd", "muon", "adafactor"])
def test_every_optimizer_learns_and_goes_on_exactly_from_saved_state(name: str):
    settings = {"optim__name": name, "optim__lr": 0.01, "train__steps": 20}
    whole, first = (toy_step(torch.float32, **settings) for _ in range(2))
    losses = [_update(whole, seed) for seed in range(10)]
    for seed in range(5):
        _update(first, seed)
    second = toy_step(torch.float32, **settings)
    second.model.load_state_dict(first.model.state_dict())
    second.optimizers.load_state_tensors(
        {name: t.clone() for name, t in first.optimizers.state_tensors().items()}
    )
    second.done = first.done
    for seed in range(5, 10):
        _update(second, seed)
    assert _update(whole, 0) < losses[0]
    _update(second, 0)
    for a, b in zip(whole.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_adamw_is_the_formula():
    step = toy_step(
        optim__lr=0.01,
        optim__betas=(0.9, 0.99),
        optim__weight_decay=0.1,
        optim__schedule="constant",
        train__clip=0.0,
    )
    weight = step.model.blocks[0].up.weight
    value = weight.detach().clone()
    m = v = torch.zeros_like(value)
    for t in range(1, 4):
        measured = step.backward([ragged_batch(4, seed=t)])
        grad = weight.grad.clone()
        step.update(measured)
        m, v = 0.9 * m + 0.1 * grad, 0.99 * v + 0.01 * grad**2
        m_hat, v_hat = m / (1 - 0.9**t), v / (1 - 0.99**t)
        value = value * (1 - 0.01 * 0.1) - 0.01 * m_hat / (v_hat.sqrt() + 1e-8)
        torch.testing.assert_close(weight.detach(), value, rtol=1e-9, atol=1e-12)


def test_muon_takes_the_blocks_matrices_and_leaves_the_rest_to_adamw():
    optimizers = optim.build(parse({"optim": {"name": "muon"}}).optim, Toy())
    muon, adamw = optimizers.parts
    names = {optimizers.names[p] for g in muon.param_groups for p in g["params"]}
    assert names == {f"blocks.{i}.{m}.weight" for i in (0, 1) for m in ("up", "down")}
    assert isinstance(adamw, torch.optim.AdamW)


def test_wrong_arguments_are_refused_by_name():
    with pytest.raises(RecipeError, match=r"optim\.args: .*'nonsense'"):
        optim.build(parse({"optim": {"args": {"nonsense": 1}}}).optim, Toy())


def _update(step, seed: int) -> float:
    measured = step.backward([ragged_batch(6, seed=seed)])
    step.update(measured)
    return float(measured.loss)


def test_numbers_among_the_state_of_a_users_optimizer_come_back_as_numbers():
    first = toy_step(optim__factory="toy_optimizer:counting")
    first.update(first.backward([ragged_batch(2)]))
    saved = first.optimizers.state_tensors()
    second = toy_step(optim__factory="toy_optimizer:counting")
    second.optimizers.load_state_tensors(saved)
    (part,) = second.optimizers.parts
    states = [part.state[p] for p in second.model.parameters()]
    assert all(state["calls"] == 1 and isinstance(state["calls"], float) for state in states)
    assert all(isinstance(state["scale"], torch.Tensor) for state in states)
