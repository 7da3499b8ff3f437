"""The verifier sees what is known to go wrong, traces it to its axis, and names plain factors.

Every fault is planted in the product's own code (see :mod:`planted`); without it the same layouts
are green.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

import faults_data
import faults_model
from megalith.recipe import parse
from megalith.recipe.schema import LayoutSection
from megalith.verify.layouts import label
from megalith.verify.proof import Proof
from planted import Fault

FAULTS = [*faults_data.FAULTS, *faults_model.FAULTS]
MOE = {"experts": 8, "mlp_bias": False}
RECIPES = {
    # recipes/gpt-stdlib.toml's kind: layer norms, biases, learned positions, a tied head.
    "gpt": {},
    "qwen": {
        "model": {
            "norm": "rmsnorm",
            "activation": "swiglu",
            "positions": "rope",
            "qk_norm": True,
            "mlp_bias": False,
            "tied": False,
        }
    },
    "own loss": {"task": {"loss": "toys_loss:summed"}},
    "experts": {"model": {**MOE}},
    "bias": {"model": {**MOE, "balance_by": "bias"}},
    "resnet": {"model": {"family": "resnet"}, "data": {"source": "digits"},
               "task": {"name": "classify"}},
}  # fmt: skip


@pytest.fixture(scope="module")
def proof() -> Iterator[Callable[[str], Proof]]:
    """One proof for each recipe: what one process computes is computed once."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # ranks are forked
    proofs: dict[str, Proof] = {}

    def of(recipe: str) -> Proof:
        if recipe not in proofs:
            proofs[recipe] = Proof(parse(RECIPES[recipe]))
        return proofs[recipe]

    yield of
    torch.set_num_threads(threads)


def shown(fault: Fault) -> str:
    return f"{fault.id} [{label(LayoutSection(**fault.layout))}]"


@pytest.mark.parametrize(
    "recipe",
    [pytest.param("gpt", marks=pytest.mark.slow), *(name for name in RECIPES if name != "gpt")],
)
def test_without_a_fault_every_layout_is_right(recipe: str, proof: Callable[[str], Proof]) -> None:
    used = {
        label(layout): layout
        for fault in FAULTS
        if fault.recipe == recipe
        for layout in [LayoutSection(**fault.layout)]
    }
    assert used
    for verdict in proof(recipe).of_all(list(used.values())):
        assert verdict.right, (label(verdict.layout), verdict.lines())


@pytest.mark.parametrize("fault", FAULTS, ids=shown)
def test_a_planted_fault_is_seen_traced_and_named(
    fault: Fault, proof: Callable[[str], Proof], monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = LayoutSection(**fault.layout)
    proof(fault.recipe).prepare(layout)
    fault.plant(monkeypatch)
    verdict = proof(fault.recipe).of(layout)
    lines = verdict.lines()
    assert not verdict.right
    assert verdict.axes == fault.axes, lines
    if fault.failure:
        assert verdict.failure is not None
        assert fault.failure in verdict.failure
        return
    assert verdict.failure is None
    assert any(fault.named in line for line in lines), lines
    if fault.factor is not None:
        assert any(fault.factor in line for line in lines if fault.named in line), lines


def test_there_are_many_kinds_of_faults() -> None:
    assert len({fault.plant for fault in FAULTS}) >= 45
