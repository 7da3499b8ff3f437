"""Classification sums its loss and hits, so that any split of the samples gives one answer."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from megalith import tasks
from megalith.core.errors import RecipeError
from megalith.recipe.schema import TaskSection
from megalith.tasks.base import Batch
from megalith.tasks.classify import Classify


def model(classes: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(16, classes)).double()


def batch(samples: int, classes: int) -> Batch:
    generator = torch.Generator().manual_seed(1)
    image = torch.randn(samples, 1, 4, 4, generator=generator, dtype=torch.float64)
    target = torch.randint(classes, (samples,), generator=generator)
    target[::5] = -100
    return {"image": image, "target": target}


def sums_of(task: Classify, module: nn.Module, part: Batch) -> dict[str, float]:
    loss = task.loss(module, part)
    found = {"loss": loss.total, "count": task.count(part), **loss.sums}
    return {name: float(value.detach()) for name, value in found.items()}


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_loss_is_the_sum_of_the_definition_over_valid_targets(smoothing: float) -> None:
    module, data = model(12), batch(23, 12)
    found = Classify(label_smoothing=smoothing).loss(module, data)
    expected = torch.zeros((), dtype=torch.float64)
    for image, target in zip(data["image"], data["target"].tolist(), strict=True):
        if target == -100:
            continue
        log_p = module(image[None])[0].log_softmax(-1)
        expected = expected - (1 - smoothing) * log_p[target] - smoothing * log_p.mean()
    torch.testing.assert_close(found.total, expected)


@pytest.mark.parametrize("split", [[23], [1, 22], [5, 5, 13], [1] * 23])
def test_ragged_batches_add_up_to_one(split: list[int]) -> None:
    task, module, data = Classify(label_smoothing=0.1), model(12), batch(23, 12)
    whole = sums_of(task, module, data)
    parts = zip(*(data[name].split(split) for name in ("image", "target")), strict=True)
    added: dict[str, float] = {}
    for image, target in parts:
        for name, value in sums_of(task, module, {"image": image, "target": target}).items():
            added[name] = added.get(name, 0.0) + value
    assert {n: v for n, v in added.items() if n != "loss"} == {
        n: v for n, v in whole.items() if n != "loss"
    }
    assert added["loss"] == pytest.approx(whole["loss"], rel=1e-13)
    assert task.summary(added) == pytest.approx(task.summary(whole), rel=1e-13)


def test_gradients_of_ragged_batches_add_up_to_one() -> None:
    task, data = Classify(), batch(23, 12)
    gradients = []
    for split in ([23], [2, 20, 1]):
        module = model(12)
        for image, target in zip(*(data[k].split(split) for k in data), strict=True):
            task.loss(module, {"image": image, "target": target}).total.backward()
        gradients.append([p.grad for p in module.parameters()])
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-13, atol=1e-13)


def test_accuracies_count_by_hand() -> None:
    logits = torch.zeros(4, 10)
    logits[:, :6] = torch.tensor([6.0, 5.0, 4.0, 3.0, 2.0, 1.0])
    data = {"image": logits, "target": torch.tensor([0, 4, 5, -100])}
    task = Classify()
    sums = sums_of(task, nn.Identity(), data)
    assert (sums["correct"], sums["correct5"], sums["count"]) == (1, 2, 3)
    summary = task.summary(sums)
    assert summary["accuracy"] == pytest.approx(1 / 3)
    assert summary["accuracy_top5"] == pytest.approx(2 / 3)


def test_top5_is_left_out_below_ten_classes() -> None:
    task = Classify()
    sums = sums_of(task, model(9), batch(8, 9))
    assert set(task.summary(sums)) == {"loss", "accuracy"}


def test_a_batch_without_valid_targets_is_zero_and_not_nan() -> None:
    data = batch(5, 12)
    data["target"][:] = -100
    task, module = Classify(label_smoothing=0.1), model(12)
    loss = task.loss(module, data)
    loss.total.backward()
    assert loss.total == 0
    assert all(p.grad is not None and torch.all(p.grad == 0) for p in module.parameters())
    assert task.summary(sums_of(task, module, data))["loss"] == 0


def test_loss_is_float32_from_half_precision_logits() -> None:
    data = batch(8, 12)
    data["image"] = data["image"].bfloat16()
    found = Classify().loss(model(12).bfloat16(), data)
    assert found.total.dtype == torch.float32


def test_one_target_per_pixel() -> None:
    torch.manual_seed(0)
    logits = torch.randn(2, 11, 3, 4)
    target = torch.randint(11, (2, 3, 4))
    found = Classify().loss(nn.Identity(), {"image": logits, "target": target})
    flat = logits.permute(0, 2, 3, 1).reshape(-1, 11)
    same = Classify().loss(nn.Identity(), {"image": flat, "target": target.flatten()})
    torch.testing.assert_close(found.total, same.total)
    assert found.sums == same.sums


def test_a_loss_of_the_users_and_an_output_with_logits() -> None:
    class Wrapped(nn.Module):
        def forward(self, image: Tensor) -> SimpleNamespace:
            return SimpleNamespace(logits=image.flatten(1))

    def margin(outputs: Tensor, targets: Tensor) -> Tensor:
        valid = targets != -100
        return nn.functional.multi_margin_loss(outputs[valid], targets[valid], reduction="sum")

    data = batch(7, 16)
    found = Classify(loss=margin).loss(Wrapped(), data)
    torch.testing.assert_close(found.total, margin(data["image"].flatten(1), data["target"]))
    assert set(found.sums) == {"correct", "correct5"}


def test_a_loss_that_is_no_scalar_is_refused() -> None:
    def each(outputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs, targets, reduction="none")

    with pytest.raises(RecipeError, match=r"task.loss: must return a scalar.*not shape \[6\]"):
        Classify(loss=each).loss(model(12), batch(6, 12))


def test_the_recipe_builds_it() -> None:
    task = tasks.build(TaskSection(name="classify", label_smoothing=0.2))
    assert isinstance(task, Classify)
    assert task.label_smoothing == 0.2
