"""Programs whose memory can be counted by hand: the tracker counts the same, to the byte."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from megalith.plan.memory import read
from megalith.plan.modules import Running
from megalith.plan.record import Allocated, Record
from megalith.plan.tracker import Tracker

UNIT = 1024
"""Bytes of every tensor of one unit here."""

SCALAR = 64
"""What the CPU's allocator rounds a number to."""


def unit() -> Tensor:
    return torch.ones(UNIT // 4)


def track(program: Callable[[Tracker], Any], *, fake: bool = False) -> Record:
    """What a tracker sees; of what ``program`` returns, nothing ends before the tracker does."""
    if fake:
        with FakeTensorMode():
            return track(program)
    tracker = Tracker("cpu")
    with tracker:
        kept = program(tracker)
    del kept
    return tracker.record


def peak(program: Callable[[Tracker], Any], *, fake: bool = False) -> int:
    return read(track(program, fake=fake), None).allocated


def views(tracker: Tracker) -> Any:
    whole = unit()
    return whole, whole.view(16, 16).t()[2:], whole.detach(), whole.as_strided((4,), (2,))


def in_place(tracker: Tracker) -> Any:
    x = unit()
    x.add_(1).mul_(2)
    x[3:].zero_()
    return torch.add(x, 1, out=x)


def early_free(tracker: Tracker) -> Any:
    a = unit()
    b = a + 1
    del a
    return b + 1


def chain(tracker: Tracker) -> Any:
    a = unit()
    return a, ((a + 1) + 1) + 1  # each sum ends when the next one is there


def everything_kept(tracker: Tracker) -> Any:
    return [unit() + 1 for _ in range(4)]  # the ones end, the sums stay


def cycle(tracker: Tracker) -> Any:
    a = unit()
    del a
    b = unit()
    del b
    return unit()


def same_twice(tracker: Tracker) -> Any:
    a = unit()
    return [a, a, a.view_as(a)], {"alias": a[:4]}


def emptied_and_filled(tracker: Tracker) -> Any:
    gathered, storage = unit(), None
    storage = gathered.untyped_storage()
    storage.resize_(0)
    other = unit()  # takes the place of what was given back
    del other
    storage.resize_(UNIT)
    return gathered


def grown(tracker: Tracker) -> Any:
    tensor = unit()
    tensor.untyped_storage().resize_(3 * UNIT)  # torch copies: both are there for a moment
    return tensor


def saved(tracker: Tracker) -> Any:
    x = unit().requires_grad_()
    # Backward of the sine: x, exp(x), its cosine and the gradient; the loss and its gradient.
    x.exp().sin().sum().backward()
    return x


def used_twice(tracker: Tracker) -> Any:
    x = unit().requires_grad_()
    # The gradients of both sines are added in place of the first: x, exp(x), two gradients; then
    # the sum, and its product with exp(x) while the second is gone.
    y = x.exp()
    (y.sin() + y.sin()).sum().backward()
    return x, y


def added(given: Callable[[Tensor], Tensor]) -> Any:
    x = unit().requires_grad_()
    y = x.exp()
    ((given(y) * 2).sum() + (given(y) * 2).sum()).backward()
    return x, y


def added_in_place(tracker: Tracker) -> Any:
    return added(lambda y: y)  # x, exp(x), two gradients; the first one becomes the sum


def added_to_a_view(tracker: Tracker) -> Any:
    return added(lambda y: y.view(2, -1))  # the view holds what it is a view of: a sum of its own


def half(tracker: Tracker) -> Any:
    x = unit()
    return x, x.bfloat16(), x.double()


@pytest.mark.parametrize("fake", [False, True], ids=["real", "fake"])
@pytest.mark.parametrize(
    ("program", "expected"),
    [
        (views, UNIT),
        (in_place, UNIT),
        (early_free, 2 * UNIT),
        (chain, 3 * UNIT),
        (everything_kept, 5 * UNIT),
        (cycle, UNIT),
        (same_twice, UNIT),
        (emptied_and_filled, UNIT),
        (grown, 4 * UNIT),
        (saved, 4 * UNIT + 2 * SCALAR),
        (used_twice, 5 * UNIT + 2 * SCALAR),
        (added_in_place, 4 * UNIT + 2 * SCALAR),
        (added_to_a_view, 5 * UNIT + 2 * SCALAR),
        (half, UNIT + UNIT // 2 + 2 * UNIT),
    ],
)
def test_the_peak_is_what_can_be_counted_by_hand(
    program: Callable[[Tracker], Any], expected: int, fake: bool
) -> None:
    assert peak(program, fake=fake) == expected


def layers(x: Tensor) -> Tensor:
    return x.exp().sin().exp().sin()  # backward needs the two results of exp


@pytest.mark.parametrize(("recomputed", "kept"), [(False, 2), (True, 0)])
def test_recomputed_activations_are_not_kept(recomputed: bool, kept: int) -> None:
    def program(tracker: Tracker) -> Any:
        x = unit().requires_grad_()
        with tracker.inside(phase="forward"):
            y = checkpoint(layers, x, use_reentrant=False) if recomputed else layers(x)
            loss = y.sum()
            del y
        with tracker.inside(phase="backward"):
            loss.backward()
        return x

    memory = read(track(program), None)
    assert memory.most["activations"] == kept * UNIT + SCALAR  # and the loss itself
    assert memory.most["temporaries"] >= 2 * UNIT
    # Recomputed at once before they are used: x, both exp(x), cosine and gradient, two numbers.
    assert memory.allocated == 5 * UNIT + 2 * SCALAR


def test_what_outlives_the_trace_has_no_end_and_gets_none_later() -> None:
    kept: list[Tensor] = []
    tracker = Tracker("cpu")
    with tracker:
        kept.append(unit())
        kept.append(kept[0] + 1)
        kept.pop(0)
    before = [entry.died is None for entry in tracker.record.memory]
    kept.clear()
    assert before == [False, True]
    assert [entry.died is None for entry in tracker.record.memory] == before


def test_a_second_look_knows_what_was_there_and_nothing_else() -> None:
    tracker = Tracker("cpu")
    weight = unit().requires_grad_()
    tracker.name(weight, "weights")
    with tracker:
        for _ in range(2):
            with tracker.inside(phase="forward"):
                loss = (weight.exp() * 2).sum()
            with tracker.inside(phase="backward"):
                loss.backward()
            tracker.name(weight.grad, "gradients")
            tracker.start_over()
            weight.grad = None
            del loss
    memory = read(tracker.record, None)
    assert memory.allocated == 2 * UNIT + SCALAR  # weight, gradient, loss: the update's start
    assert {k: v for k, v in memory.kinds.items() if v} == {
        "weights": UNIT,
        "gradients": UNIT,
        "activations": SCALAR,
    }
    assert all(entry.died is not None for entry in tracker.record.before)


def roles(record: Record) -> list[tuple[str, str]]:
    return [(entry.operator, entry.role) for entry in record.memory]


def test_a_gradient_was_one_from_its_birth() -> None:
    def program(tracker: Tracker) -> Any:
        x = unit().requires_grad_()
        with tracker.inside(phase="backward"):
            (x * x).sum().backward()
        tracker.name(x.grad, "gradients")
        return x

    entry = next(e for e in track(program).memory if e.role == "gradients")
    assert entry.phase == "backward"
    assert entry.bytes == UNIT


def test_a_weight_in_another_dtype_is_a_cast_and_not_an_activation() -> None:
    def program(tracker: Tracker) -> Any:
        x, weight = unit(), unit()
        tracker.name(weight, "weights")
        return x, weight, weight.bfloat16(), x.bfloat16(), weight.float()

    assert [role for operator, role in roles(track(program)) if operator == "_to_copy"] == [
        "casts",
        "",
    ]


def test_gathered_weights_keep_their_role_and_come_back_as_one() -> None:
    def program(tracker: Tracker) -> Any:
        weight = unit()
        weight.untyped_storage().resize_(0)
        weight.untyped_storage().resize_(UNIT)
        return weight

    first, empty, second = track(program).memory
    assert (first.died, empty.bytes, second.bytes) == (2, 0, UNIT)
    assert second.role == "gathered"


def test_every_stream_has_its_own_memory() -> None:
    current = 0
    tracker = Tracker("cpu", stream=lambda: current)
    with tracker:
        one = unit()
        current = 7
        two = one + 1
        current = 0
        three = two + 1
    assert [entry.stream for entry in tracker.record.memory] == [0, 7, 0]
    kinds = read(tracker.record, None).kinds
    assert kinds["communication"] == two.nbytes
    assert kinds["temporaries"] == one.nbytes + three.nbytes


def test_what_is_made_for_the_loss_is_told_by_where_it_was_made() -> None:
    def program(tracker: Tracker) -> Any:
        x = unit()
        with tracker.inside(role="loss"):
            logits = x + 1
        return x, logits, torch.log_softmax(x, -1)

    assert read(track(program), None).kinds["loss"] == 2 * UNIT


def test_operators_are_counted_with_their_work() -> None:
    def program(tracker: Tracker) -> Any:
        with tracker.inside(phase="forward"):
            return torch.ones(4, 8) @ torch.ones(8, 16)

    computed = track(program).computed
    (matmul,) = [amount for key, amount in computed.items() if key.kind == "matmul"]
    assert (matmul.operators, matmul.flops) == (1, 2 * 4 * 8 * 16)
    assert matmul.bytes == 4 * (4 * 8 + 8 * 16 + 4 * 16)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.outer = nn.Sequential(nn.Linear(8, 8), nn.GELU())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(self.inner(x).sin())


def born(recompute: bool) -> list[Allocated]:
    model = nn.Sequential(Block(), Block())
    running = Running(model)
    tracker = Tracker("cpu", module=running.path)
    with tracker, running:
        x = torch.ones(4, 8)
        for block in model:
            x = checkpoint(block, x, use_reentrant=False) if recompute else block(x)
        with tracker.inside(phase="backward"):
            x.sum().backward()
    return tracker.record.memory


@pytest.mark.parametrize("recompute", [False, True])
def test_the_module_is_known_in_forward_backward_and_recomputation(recompute: bool) -> None:
    entries = born(recompute)
    backward = [entry for entry in entries if entry.phase == "backward"]
    where = {entry.operator: entry.module for entry in backward if entry.operator != "mm"}
    assert where["gelu_backward"] == "0.outer.1"  # the last one to run
    assert where["cos"] == "0"
    products = [entry.module for entry in backward if entry.operator == "mm"]
    assert products == ["1.outer.0"] * 2 + ["1.inner"] * 2 + ["0.outer.0"] * 2 + ["0.inner"]
    again = [entry.module for entry in backward if entry.operator == "addmm"]
    assert again == (["1.inner", "1.outer.0", "0.inner", "0.outer.0"] if recompute else [])
    forward = [entry for entry in entries if entry.phase == "setup" and entry.operator == "addmm"]
    assert [entry.module for entry in forward] == ["0.inner", "0.outer.0", "1.inner", "1.outer.0"]


def test_the_cpus_attention_counts_its_operations() -> None:
    """Two products of 2 T^2 d forward, five backward, for each head (Dao et al. 2022)."""
    query, key, value = (torch.zeros(2, 3, 32, 16, requires_grad=True) for _ in range(3))
    with Tracker("cpu") as tracker:
        nn.functional.scaled_dot_product_attention(query, key, value).sum().backward()
    counted = sum(
        amount.flops for kind, amount in tracker.record.computed.items() if kind.kind == "attention"
    )
    assert counted == (2 + 5) * 2 * 2 * 3 * 32 * 32 * 16
