"""The loop: exact evaluation, early stopping, the best checkpoint, bad numbers, and its lines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from megalith import checkpoint
from megalith.core.errors import RecipeError, TrainingError
from megalith.core.runs import RunFolder
from megalith.data.order import sample_ids
from megalith.recipe import load
from megalith.train.evaluate import Improvement, evaluate
from megalith.train.loop import train
from megalith.train.metrics import read_metrics
from toy_data import ragged
from toys import ragged_batch, split, toy_step


def recipe(folder: Path, *overrides: str):
    return load(
        None,
        "model.factory=toys:Toy",
        "data.factory=toy_data:ragged",
        "train.global_batch=8",
        "train.micro_batch=4",
        "train.steps=12",
        "evaluate.every=4",
        "checkpoint.every=6",
        "run.log_every=1",
        "optim.lr=0.01",
        f"run.dir={folder}",
        *overrides,
    )


def lines(folder: Path, kind: str) -> list[dict]:
    return [line for line in read_metrics(RunFolder(folder)) if line["kind"] == kind]


@pytest.mark.parametrize("sizes", [[21], [8, 8, 5], [1] * 21, [20, 1]])
def test_evaluation_is_exact_on_ragged_batches(sizes: list[int]):
    step, batch = toy_step(), ragged_batch(21)
    logits = step.model(batch["tokens"]).flatten(0, 1)
    wanted = torch.nn.functional.cross_entropy(logits, batch["targets"].flatten()).item()
    assert evaluate(step, split(batch, sizes))["loss"] == pytest.approx(wanted, rel=1e-12)


def test_evaluation_uses_the_averaged_weights_and_leaves_the_others():
    step = toy_step(train__ema=0.9)
    for seed in range(3):
        step.update(step.backward([ragged_batch(4, seed=seed)]))
    before = {n: p.detach().clone() for n, p in step.model.named_parameters()}
    averaged = evaluate(step, [ragged_batch(6)])["loss"]
    assert all(torch.equal(p, before[n]) for n, p in step.model.named_parameters())
    assert step.ema is not None
    plain = toy_step()
    plain.model.load_state_dict(step.ema.average)
    assert evaluate(plain, [ragged_batch(6)])["loss"] == pytest.approx(averaged, rel=1e-12)


def test_patience_counts_evaluations_without_enough_improvement():
    improvement = Improvement(patience=2, min_delta=0.1)
    assert [improvement.see(x) for x in (3.0, 2.0, 1.95, 1.85)] == [True, True, False, True]
    assert not improvement.exhausted
    improvement.see(1.80)
    assert not improvement.exhausted
    improvement.see(1.76)
    assert improvement.exhausted
    assert improvement.best == 1.85


def test_a_run_learns_and_leaves_all_it_should(tmp_path: Path):
    run = train(recipe(tmp_path))
    assert (run.status, run.step) == ("done", 12)
    validation = lines(tmp_path, "validation")
    assert [line["step"] for line in validation] == [4, 8, 12]
    assert validation[-1]["loss"] < validation[0]["loss"]
    assert run.validation["loss"] == validation[-1]["loss"]
    training = lines(tmp_path, "train")
    assert [line["step"] for line in training] == list(range(1, 13))
    needed = {"loss", "lr", "grad_norm", "tokens_per_s", "mfu", "peak_memory", "skipped", "seconds"}
    assert needed <= training[-1].keys()
    parts = sum(training[-1][f"seconds_{p}"] for p in ("data", "compute", "save", "evaluate"))
    assert 0 < parts <= training[-1]["seconds"] * 1.01
    assert run.report.exists()
    described = json.loads((tmp_path / "environment.json").read_text())
    assert described["parameters"] == sum(p.numel() for p in run.model.parameters())


def test_token_throughput_and_mean_loss_match_a_hand_count(tmp_path: Path):
    run = train(recipe(tmp_path, "train.steps=3", "run.log_every=3", "evaluate.every=0"))
    (line,) = lines(tmp_path, "train")
    samples = [ragged().train[i] for i in sample_ids(0, 64, 0, 24).tolist()]
    count = sum(int((sample["targets"] != -100).sum()) for sample in samples)
    seconds = line["seconds_data"] + line["seconds_compute"]
    assert line["tokens_per_s"] * seconds == pytest.approx(count, rel=1e-6)
    assert run.step == 3


def test_the_best_checkpoint_is_kept_besides_the_newest(tmp_path: Path):
    # After a good start the learning rate explodes: the best evaluation is an early one.
    train(
        recipe(
            tmp_path,
            "optim.schedule=toy_schedule:explodes",
            "evaluate.every=2",
            "checkpoint.every=2",
            "checkpoint.keep=1",
        )
    )
    losses = {line["step"]: line["loss"] for line in lines(tmp_path, "validation")}
    best = min(losses, key=lambda step: losses[step])
    assert best < 12
    assert [e.step for e in checkpoint.entries(tmp_path / "checkpoints")] == [best, 12]


def test_early_stopping_ends_the_run_and_says_so(tmp_path: Path):
    run = train(
        recipe(
            tmp_path,
            "train.steps=100",
            "optim.schedule=toy_schedule:explodes",
            "evaluate.every=2",
            "evaluate.patience=2",
        )
    )
    assert run.status == "early_stop"
    assert run.step < 100
    assert lines(tmp_path, "event")[-1]["event"] == "early_stop"
    assert checkpoint.entries(tmp_path / "checkpoints")[-1].step == run.step


def test_a_bad_sample_is_skipped_counted_and_named(tmp_path: Path):
    run = train(
        recipe(tmp_path, "task.factory=toy_data:Poisoned", "task.args.sample=3", "run.log_every=12")
    )
    assert run.step == 12
    (event,) = [e for e in lines(tmp_path, "event") if e["event"] == "nonfinite"]
    assert 3 in event["samples"]
    assert "embedding.weight" in event["parameters"]
    assert lines(tmp_path, "train")[-1]["skipped"] == 1
    assert all(p.isfinite().all() for p in run.model.parameters())


def test_too_many_bad_updates_in_a_row_stop_with_what_happened(tmp_path: Path):
    with pytest.raises(TrainingError) as caught:
        train(
            recipe(
                tmp_path,
                "optim.schedule=toy_schedule:breaks",
                "train.nonfinite_limit=3",
                "checkpoint.every=1",
                "checkpoint.keep=1",
            )
        )
    message = str(caught.value)
    assert "3 updates in a row were not finite" in message
    assert "update 12" in message
    assert "embedding.weight" in message
    assert "step-00000008" in message
    entry = checkpoint.newest_whole(tmp_path / "checkpoints")
    assert entry is not None
    saved = checkpoint.load(entry.path, "model")
    assert all(tensor.isfinite().all() for tensor in saved.values())
    assert (tmp_path / "report.html").exists()


def test_a_task_of_the_users_own_that_lacks_a_part_is_refused_by_name(tmp_path: Path):
    with pytest.raises(RecipeError, match=r"task\.factory: 'toys:Toy' returned Toy, .* no 'item'"):
        train(recipe(tmp_path, "task.factory=toys:Toy"))
