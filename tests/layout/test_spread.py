"""``megalith.spread``: a module and a loop of the user's own, on many ranks as on one process."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import megalith
from megalith.core.errors import MegalithError, RecipeError
from megalith.recipe.schema import LayoutSection
from trials import forked, one_thread

GUIDE = Path(__file__).parents[2] / "docs" / "own-loop.md"
EXACT: dict[str, Any] = {"rtol": 1e-11, "atol": 1e-13}
SPLIT = {"blocks.*.up": "column", "blocks.*.down": "row"}
LIMIT = 0.5


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 12)
        self.down = nn.Linear(12, width)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(torch.tanh(self.up(self.norm(x)))))


class Net(nn.Module):
    """A stem and a head around two blocks; seven classes, which do not divide over two ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(5, 6)
        self.blocks = nn.ModuleList(Block(6) for _ in range(2))
        self.head = nn.Linear(6, 7, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def batches(update: int) -> list[tuple[Tensor, Tensor]]:
    """Eight ragged micro-batches; one has nothing that counts."""
    generator = torch.Generator().manual_seed(update)
    made = []
    for size in (3, 1, 4, 2, 5, 3, 1, 2):
        x = torch.randn(size, 5, generator=generator, dtype=torch.float64)
        target = torch.randint(7, (size,), generator=generator)
        made.append((x, target if len(made) != 5 else torch.full_like(target, -100)))
    return made


def run(fields: dict[str, Any], options: dict[str, Any] | None = None) -> dict[str, Tensor]:
    """Two updates with Adam and clipping; weights and figures, on rank 0."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    torch.manual_seed(rank)  # a rank that draws weights of its own must not keep them
    loop = megalith.spread(Net().double(), **fields, **(options or {}))
    optimizer = torch.optim.Adam(loop.model.parameters(), lr=0.1)
    figures: dict[str, Tensor] = {}
    for update in range(2):
        mine = batches(update)[loop.mesh.data_rank :: loop.mesh.data_ranks]

        def loss(x: Tensor, target: Tensor) -> Tensor:
            return nn.functional.cross_entropy(loop.model(x), target, reduction="sum")

        found = loop.backward(
            [lambda one=one: loss(*one) for one in mine],
            sum(int((target != -100).sum()) for _, target in mine),
        )
        figures |= {f"{key}.{update}": getattr(found, key) for key in ("loss", "count", "norm")}
        loop.clip_(found.norm, LIMIT)
        optimizer.step()
        optimizer.zero_grad()
    whole = loop.whole()
    assert bool(whole) == (rank == 0)
    return {**figures, **whole}


def all_of(cases: list[dict[str, Any]]) -> list[dict[str, Tensor]]:
    return [run(fields) for fields in cases]


def reference() -> dict[str, Tensor]:
    """A plain loop that knows nothing of the project but how it seeds dropout."""
    from megalith.core import seeds

    torch.manual_seed(0)
    model = Net().double().train()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    figures: dict[str, Tensor] = {}
    for update in range(2):
        total = torch.zeros((), dtype=torch.float64)
        count = sum(int((target != -100).sum()) for _, target in batches(update))
        for micro, (x, target) in enumerate(batches(update)):
            seeds.set_default(0, "dropout", update, micro)
            total = total + nn.functional.cross_entropy(model(x), target, reduction="sum")
        (total / count).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), LIMIT)
        figures |= {f"loss.{update}": total.detach() / count, f"norm.{update}": norm}
        figures |= {f"count.{update}": torch.tensor(float(count), dtype=torch.float64)}
        optimizer.step()
        optimizer.zero_grad()
    return {**figures, **model.state_dict()}


CASES: dict[int, list[dict[str, Any]]] = {
    2: [
        {"replicate": 2},
        *({"shard": 2, "zero": zero} for zero in (1, 2, 3)),
        {"tensor": 2, "split": SPLIT},
        {"layout": LayoutSection(shard=2, offload=True)},
        {"layout": {"replicate": 2}, "checkpointing": "full"},
    ],
    4: [
        {"replicate": 2, "shard": 2},
        {"shard": 2, "tensor": 2, "split": SPLIT},
        {"replicate": 2, "tensor": 2, "split": SPLIT},
        {"tensor": 4, "split": SPLIT},
    ],
}


def test_one_process_is_a_plain_loop() -> None:
    found, right = run({}), reference()
    assert found.keys() == right.keys()
    for name, value in right.items():
        torch.testing.assert_close(found[name], value, **EXACT, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("ranks", CASES)
def test_many_ranks_are_a_plain_loop(ranks: int) -> None:
    right = reference()
    assert right["norm.0"] > LIMIT
    for fields, found in zip(CASES[ranks], forked(ranks, all_of, CASES[ranks]), strict=True):
        assert found.keys() == right.keys()
        for name, value in right.items():
            torch.testing.assert_close(
                found[name], value, **EXACT, msg=lambda m, n=name, f=fields: f"{f}, {n}: {m}"
            )


class Shared(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].up.weight = self.blocks[0].up.weight


class SharedOutside(Net):
    """The other holder is in no pattern: it would keep the whole weight, silently untied."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(12, 6)
        self.blocks[0].up.weight = self.table.weight


def refusals() -> None:
    def refused(match: str, model: nn.Module | None = None, **fields: Any) -> None:
        with pytest.raises(RecipeError, match=match):
            megalith.spread(model or Net(), **fields)

    refused(r"layout\.split: 'blok\.\*\.up' matches no .* look like stem", tensor=2, split={
        "blok.*.up": "column"})  # fmt: skip
    for model in (Shared(), SharedOutside()):
        refused("layout.split: .* shares its weight with", model, tensor=2, split=SPLIT)
    refused(r"layout\.split: Net has no table", tensor=2)
    refused("layout: shard 3 needs 3 ranks, and 2 are here", shard=3)
    refused(r"2 ranks do not divide the 7 outputs of head", tensor=2, split={"head": "column"})
    loop = megalith.spread(Net(), replicate=2)
    one = lambda: loop.model(torch.randn(2, 5)).sum()  # noqa: E731
    with pytest.raises(MegalithError, match="another number on other ranks"):
        loop.backward([one] * (1 + loop.mesh.rank), 2)
    loop.backward([one], 2)
    with pytest.raises(MegalithError, match=r"call optimizer\.zero_grad"):
        loop.backward([one], 2)


def test_what_cannot_be_is_refused_in_one_line() -> None:
    forked(2, refusals)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"shard": 2}, r"layout: 2 ranks are needed, and this process has joined none; .*torchrun"),
        ({"pipeline": 2}, r"layout\.pipeline: is for recipes; replicate, shard and tensor work"),
        ({"context": 2}, r"layout\.context: is for recipes"),
        ({"shards": 2}, r"layout\.shards: no such field; did you mean 'shard'"),
        ({"shard": 0}, r"layout\.shard: must be"),
        ({"replicate": 2, "engine": "ddp"}, r'layout\.engine: "ddp" is for recipes'),
        ({"split": SPLIT}, r"layout\.split: goes with layout\.tensor > 1"),
        ({"offload": True}, r"layout\.offload: goes with layout\.shard > 1"),
        ({"precision": "fp16"}, r"train\.precision: fp16 needs .* bf16 works"),
        ({"precision": "fp8"}, r"train\.precision: must be"),
        ({"layout": LayoutSection(), "shard": 2}, r"layout\.shard: is given beside a whole"),
    ],
)
def test_fields_are_refused_before_ranks_are_needed(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        megalith.spread(Net(), **fields)


def blocks() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", GUIDE.read_text(), re.MULTILINE | re.DOTALL)


def the_guide(layouts: list[dict[str, Any]]) -> list[list[float]]:
    space: dict[str, Any] = {"__name__": "own"}
    exec("\n".join(blocks()), space)
    options = [{k: space["SPLIT"] if v == "SPLIT" else v for k, v in o.items()} for o in layouts]
    return [space["train"](**one) for one in options]


def test_the_guide_runs_and_its_layouts_agree() -> None:
    with one_thread():
        (right,) = the_guide([{}])
    assert right[-1] < 0.6 * right[0]
    layouts = [{"shard": 2}, {"tensor": 2, "split": "SPLIT"}, {"replicate": 2}]
    for losses in forked(2, the_guide, layouts):
        assert losses == pytest.approx(right, rel=1e-3)


@pytest.mark.slow
def test_the_guide_starts_as_it_says(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("\n\n".join(blocks()), encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4", "own.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    first, last = map(float, done.stdout.split())
    assert last < 0.7 * first
