"""Stages of a pipeline: cut by cost or by hand, and whole together."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from megalith import models
from megalith.core.errors import RecipeError
from megalith.layout import stages
from megalith.models.decoder import Decoder
from megalith.models.layers import Absent
from megalith.recipe.families import DecoderConfig


def decoder(**changes: object) -> Decoder:
    given = {"vocab": 97, "layers": 6, "width": 16, "heads": 2, "context": 32}
    module = models.build(DecoderConfig(**{**given, **changes}), seed=0)  # pyright: ignore
    assert isinstance(module, Decoder)
    return module


def dearest(costs: dict[str, float], kept: list[list[str]]) -> float:
    return max(sum(costs[name] for name in names) for names in kept)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("vocab", [11, 97, 2000])
@pytest.mark.parametrize("count", [2, 3, 4])
def test_no_other_cut_has_a_cheaper_dearest_stage(count: int, vocab: int, tied: bool) -> None:
    model = decoder(vocab=vocab, tied=tied)
    costs = stages.part_costs(model)
    kept = stages.cut(model, costs, count, [])
    names = list(costs)
    assert [name for stage in kept for name in stage] == names, "each part once, in order"
    places = [i for i, name in enumerate(names) if name.startswith("blocks.")][1:]
    best = min(
        dearest(costs, [names[a:b] for a, b in itertools.pairwise([0, *cut, len(names)])])
        for cut in itertools.combinations(places, count - 1)
    )
    assert dearest(costs, kept) == pytest.approx(best, rel=1e-6)
    assert all(any(name.startswith("blocks.") for name in stage) for stage in kept)


def test_a_tied_head_costs_its_matrix_where_the_model_ends() -> None:
    """A vocabulary that is worth three blocks moves the cut: the last stage gets fewer blocks."""
    small, large = (decoder(vocab=vocab, tied=True) for vocab in (11, 600))
    cuts = [stages.cut(m, stages.part_costs(m), 2, [])[1][0] for m in (small, large)]
    assert cuts[0] in ("blocks.3", "blocks.2")
    assert int(cuts[1].removeprefix("blocks.")) > int(cuts[0].removeprefix("blocks."))
    costs = [stages.part_costs(decoder(vocab=600, tied=tied)) for tied in (True, False)]
    ends = [list(each.values())[-1] for each in costs]
    assert ends[0] == pytest.approx(ends[1], rel=0.01), "tied or not, the head is as dear"
    assert costs[0]["embedding"] < 0.01 * ends[0], "looked up, not multiplied"


def test_cuts_by_hand_are_taken_as_they_are() -> None:
    model = decoder()
    kept = stages.cut(model, stages.part_costs(model), 3, ["blocks.0", "blocks.5"])
    assert kept == [
        ["embedding", "positions"],
        [f"blocks.{i}" for i in range(5)],
        ["blocks.5", "norm"],
    ]


@pytest.mark.parametrize(
    ("count", "cuts", "message"),
    [
        (7, [], r"layout\.pipeline: 7 stages need as many blocks, and the model has 6"),
        (3, ["blocks.1"], r"layout\.cuts: 1 cuts; 3 stages need 2 names such as 'blocks\.1'"),
        (2, ["block.1"], r"layout\.cuts: no stage can begin with 'block\.1'; 2 .* as 'blocks\.1'"),
        (3, ["blocks.4", "blocks.2"], r"layout\.cuts: the parts must be in the order of the model"),
        (3, ["blocks.2", "blocks.2"], r"layout\.cuts: the parts must be in the order of the model"),
        # A stage before it would be empty; a head without its norm would not know that it ends.
        (2, ["embedding"], r"layout\.cuts: no stage can begin with 'embedding'"),
        (2, ["head"], r"layout\.cuts: no stage can begin with 'head'"),
    ],
)
def test_cuts_that_cannot_be_made_are_refused(count: int, cuts: list[str], message: str) -> None:
    model = decoder()
    with pytest.raises(RecipeError, match=message):
        stages.cut(model, stages.part_costs(model), count, cuts)


@pytest.mark.parametrize("tied", [True, False])
def test_stages_one_after_the_other_are_the_model(tied: bool) -> None:
    model = decoder(tied=tied).double().eval()
    kept = stages.cut(model, stages.part_costs(model), 3, [])
    kept[-1] = [*stages.tied(model), *kept[-1]]
    tokens = torch.randint(97, (2, 8))
    hidden = None
    for names in kept:
        stage = stages.stage(model, names)
        hidden = stage(tokens, hidden=hidden)
        there = [n for n in stages.parts(model) if not isinstance(stage.get_submodule(n), Absent)]
        assert sorted(there) == sorted(names)
    assert hidden is not None
    torch.testing.assert_close(hidden, model(tokens), rtol=0, atol=0)


def test_any_module_has_parts_in_the_order_in_which_they_run() -> None:
    model = nn.Sequential()
    model.stem = nn.Linear(4, 4)
    model.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
    model.head = nn.Linear(4, 4)
    assert stages.parts(model) == ["stem", "layers.0", "layers.1", "head"]
    assert stages.tied(model) == []
