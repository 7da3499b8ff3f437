"""What layouts are tried with: a small model of the same kind, and batches that are ragged."""

from __future__ import annotations

import pytest
import torch

from megalith.recipe import parse
from megalith.recipe.families import DecoderConfig
from megalith.recipe.schema import LayoutSection
from megalith.tasks import Batch
from megalith.verify.problem import SEQUENCE, Problem, needs_layers, problem


def text(**data: object) -> Problem:
    return problem(parse({"data": {**data}} if data else {}), 4, 2)


def targets(batch: Batch) -> int:
    return int((batch["targets"] != -100).sum())


def flat(given: Problem) -> list[Batch]:
    return [batch for update in given.updates for batch in update]


def test_three_updates_of_as_many_micro_batches_as_asked_for() -> None:
    given = text()
    assert [len(update) for update in given.updates] == [4, 4, 4]
    assert len(given.evaluation) == 3


def test_micro_batches_differ_in_samples_and_in_targets() -> None:
    for update in text().updates:
        assert {len(batch["tokens"]) for batch in update} == {1, 2, 3}
        assert len({targets(batch) for batch in update}) == 4


def test_samples_of_one_micro_batch_differ_in_targets() -> None:
    (widest,) = [batch for batch in text().updates[0] if len(batch["tokens"]) == 3]
    assert len(set((widest["targets"] != -100).sum(1).tolist())) == 3


def test_a_micro_batch_without_any_target_is_among_those_of_the_first_update() -> None:
    first = text().updates[0]
    assert [targets(batch) for batch in first].count(0) == 1


def test_bytes_belong_to_targets_that_count() -> None:
    for batch in flat(text()):
        assert torch.equal(batch["bytes"], 3 * (batch["targets"] != -100).sum(1))


def test_documents_are_cut_within_a_sequence_and_positions_begin_again() -> None:
    assert "documents" not in text(cross_document_attention=True).updates[0][0]
    for batch in flat(text(cross_document_attention=False)):
        documents, positions = batch["documents"], batch["positions"]
        assert documents.shape == positions.shape == (len(batch["tokens"]), SEQUENCE)
        for row in range(len(documents)):
            starts = documents[row].diff().nonzero().flatten() + 1
            assert len(starts) == 1
            assert positions[row, 0] == positions[row, int(starts)] == 0
            assert positions[row].diff().ne(1).sum() == 1


def test_the_same_recipe_gives_the_same_problem() -> None:
    for a, b in zip(flat(text()), flat(text()), strict=True):
        assert a.keys() == b.keys()
        assert all(torch.equal(a[name], b[name]) for name in a)


def test_images_come_at_least_in_twos_and_some_do_not_count() -> None:
    given = problem(
        parse(
            {
                "model": {"family": "resnet"},
                "data": {"source": "digits"},
                "task": {"name": "classify"},
            }
        ),
        4,
        2,
    )
    assert all(len(batch["image"]) >= 2 for batch in flat(given))
    assert any((batch["target"] == -100).any() for batch in flat(given))
    assert given.facts == {"channels": 3, "classes": 10}


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"heads": 6, "kv_heads": 2, "width": 384}, {"heads": 8, "kv_heads": 4}),
        ({"tied": False, "norm": "rmsnorm"}, {"tied": False, "norm": "rmsnorm"}),
        ({"window": 256, "positions": "rope"}, {"window": 20, "positions": "rope"}),
        ({"experts": 64, "experts_per_token": 6, "mlp_bias": False}, {"experts": 8}),
        ({"dropout": 0.1}, {"dropout": 0.0}),
    ],
)
def test_a_small_decoder_is_of_the_same_kind(fields: dict, kept: dict) -> None:
    model = problem(parse({"model": fields}), 4, 3).recipe.model
    assert isinstance(model, DecoderConfig)
    assert model.layers == 3
    assert {name: getattr(model, name) for name in kept} == kept


def test_a_pipeline_needs_a_block_for_each_stage() -> None:
    assert needs_layers(LayoutSection()) == needs_layers(LayoutSection(pipeline=2)) == 2
    assert needs_layers(LayoutSection(pipeline=4)) == 4
    interleaved = LayoutSection(pipeline=2, schedule="interleaved", stages=3)
    assert needs_layers(interleaved) == 6
