"""Saved under one layout, loaded under another: equal bit for bit, or refused by name."""

from __future__ import annotations

import itertools
import random
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megalith import checkpoint
from megalith.checkpoint import catalogue, manifest, write
from megalith.core.errors import CheckpointError
from megalith.layout.mesh import AXES, Mesh
from megalith.layout.pieces import Piece
from ranks import on_ranks
from thread_ranks import on_threads, spread, whole_tensors

SIZES = [1, 2, 3, 4, 7]


def save(folder: Path, tensors: dict[str, Tensor], ranks: int, seed: int = 0, step: int = 1) -> Any:
    model = spread(tensors, ranks, seed, fill=True)
    optimizer = spread(tensors, ranks, seed + 1, fill=True)

    def work(mesh: Mesh) -> Path:
        parts = {"model": model[mesh.rank], "optimizer": optimizer[mesh.rank]}
        return checkpoint.save(folder, step, parts, {"done": step}, mesh)

    results = on_threads(ranks, work)
    failed = [result for result in results if isinstance(result, Exception)]
    if failed:
        raise failed[0]
    return results[0]


def same(one: Tensor, other: Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    flat = (t.contiguous().view(-1).view(torch.uint8) for t in (one, other))
    return torch.equal(*flat)


@pytest.mark.parametrize("ranks", SIZES)
@pytest.mark.parametrize("seed", range(3))
def test_any_layout_loads_under_any_other(tmp_path: Path, ranks: int, seed: int) -> None:
    tensors = whole_tensors(seed)
    path = save(tmp_path, tensors, ranks, seed)
    for part in ("model", "optimizer"):
        for other in SIZES:
            for pieces in spread(tensors, other, seed + 10 * other, fill=False):
                checkpoint.load_into(path, part, pieces, names=tensors)
                for name, piece in pieces.items():
                    assert same(piece.tensor, tensors[name][piece.box]), name
        loaded = checkpoint.load(path, part)
        assert loaded.keys() == tensors.keys()
        assert all(same(loaded[name], tensors[name]) for name in tensors)
    manifest.verify(path)


def test_one_process_writes_files_that_the_library_reads(tmp_path: Path) -> None:
    tensors = whole_tensors(0)
    path = save(tmp_path, tensors, 1)
    read = load_file(path / "model.safetensors")
    assert read.keys() == tensors.keys()
    assert all(same(read[name], tensors[name]) for name in tensors)


def test_a_rank_writes_only_what_it_owns(tmp_path: Path) -> None:
    tensors = whole_tensors(1)
    path = save(tmp_path, tensors, 4)
    files = [load_file(file) for file in path.glob("model-rank-*.safetensors")]
    held = sum(tensor.numel() for file in files for tensor in file.values())
    assert held == sum(tensor.numel() for tensor in tensors.values())


def test_a_format_1_checkpoint_still_loads(tmp_path: Path) -> None:
    """Written as the first version did, by the library, with a manifest of files only."""
    import json

    path = tmp_path / "step-00000007"
    path.mkdir()
    tensors = whole_tensors(2)
    save_file(tensors, path / "model.safetensors")
    (path / "state.json").write_text('{"done": 7}\n')
    files = {
        name: {"bytes": found.bytes, "sha256": found.sha256}
        for name in ("model.safetensors", "state.json")
        for found in [manifest.measure(path / name)]
    }
    (path / manifest.NAME).write_text(json.dumps({"format": 1, "files": files}))
    entry = checkpoint.newest_whole(tmp_path)
    assert entry is not None
    assert entry.step == 7
    for pieces in spread(tensors, 3, 5, fill=False):
        checkpoint.load_into(path, "model", pieces)
        assert all(same(p.tensor, tensors[name][p.box]) for name, p in pieces.items())


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_flipped_byte_in_any_file_is_found_and_the_file_is_named(
    tmp_path: Path, ranks: int
) -> None:
    path = save(tmp_path, whole_tensors(0), ranks)
    draw = random.Random(0)
    files = sorted(path.iterdir())
    assert len(files) == 2 + 2 * ranks
    for file in files:
        content = file.read_bytes()
        places = {0, len(content) - 1, *(draw.randrange(len(content)) for _ in range(20))}
        for place in places:
            damaged = bytearray(content)
            damaged[place] ^= 1 << draw.randrange(8)
            file.write_bytes(damaged)
            with pytest.raises(CheckpointError, match=file.name):
                manifest.verify(path)
            assert checkpoint.newest_whole(tmp_path) is None
        file.write_bytes(content)
    manifest.verify(path)


@pytest.mark.parametrize("bad", ["model-rank-00002.safetensors", "state.json", None])
def test_ranks_share_the_checking_and_agree(tmp_path: Path, bad: str | None, monkeypatch) -> None:
    tensors = whole_tensors(0)
    save(tmp_path, tensors, 3, step=1)
    path = save(tmp_path, tensors, 3, step=2)
    if bad is not None:
        content = bytearray((path / bad).read_bytes())
        content[len(content) // 2] ^= 4
        (path / bad).write_bytes(content)
    measured: list[Path] = []
    measure = manifest.measure
    monkeypatch.setattr(manifest, "measure", lambda path: (measured.append(path), measure(path))[1])
    found = on_threads(4, lambda mesh: checkpoint.newest_whole(tmp_path, mesh))
    assert [entry.step for entry in found] == [2 if bad is None else 1] * 4
    assert len(measured) == len(set(measured)), "a file was read by more than one rank"


def test_a_missing_rank_file_is_named(tmp_path: Path) -> None:
    path = save(tmp_path, whole_tensors(0), 3)
    (path / "model-rank-00001.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"'model-rank-00001.* is missing"):
        manifest.verify(path)
    with pytest.raises(CheckpointError, match="model-rank-00001"):
        checkpoint.load(path, "model")


def _four_by_six(*boxes: tuple[tuple[int, int], tuple[int, int]]) -> catalogue.Catalogue:
    held = tuple(catalogue.Held(f"file-{n}", *box) for n, box in enumerate(boxes))
    return {"model": {"w": catalogue.Saved(catalogue.Spec("F32", (4, 6)), held)}}


WRONG_TILINGS = [
    ([((0, 0), (4, 3)), ((0, 4), (4, 2))], "model 'w': 4 of 24 elements are in no file"),
    ([((0, 0), (4, 4)), ((0, 3), (4, 3))], "model 'w': file-0 and file-1 both hold"),
    ([((0, 0), (2, 6)), ((2, 1), (2, 6))], "model 'w': file-1 holds a part outside"),
    # As many elements as there should be, one twice and one never.
    ([((0, 0), (4, 3)), ((0, 2), (4, 3))], "file-0 and file-1 both hold"),
    ([], "24 of 24 elements are in no file"),
]


@pytest.mark.parametrize(("boxes", "said"), WRONG_TILINGS)
def test_a_gap_and_an_overlap_are_found(boxes: Any, said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        catalogue.check(_four_by_six(*boxes))


def test_the_tiling_check_agrees_with_counting_elements(tmp_path: Path) -> None:
    draw = random.Random(0)
    seen = set()
    for _ in range(3000):
        cuts = (
            sorted(draw.randint(0, 4) for _ in range(2)),
            sorted(draw.randint(0, 6) for _ in range(2)),
        )
        rows = [0, *cuts[0], 4]
        columns = [0, *cuts[1], 6]
        boxes = [
            ((a, c), (b - a, d - c))
            for a, b in itertools.pairwise(rows)
            for c, d in itertools.pairwise(columns)
        ]
        if draw.random() < 0.5:
            index = draw.randrange(len(boxes))
            start = (draw.randint(0, 3), draw.randint(0, 5))
            boxes[index] = (start, (draw.randint(0, 4 - start[0]), draw.randint(0, 6 - start[1])))
        draw.shuffle(boxes)
        count = torch.zeros(4, 6)
        for (a, c), (b, d) in boxes:
            count[a : a + b, c : c + d] += 1
        right = bool((count == 1).all())
        seen.add(right)
        try:
            catalogue.check(_four_by_six(*boxes))
        except CheckpointError:
            assert not right
        else:
            assert right
    assert seen == {True, False}


@pytest.mark.parametrize("fault", ["gap", "overlap", "dtype"])
def test_pieces_that_do_not_make_up_a_tensor_are_refused_on_every_rank(
    tmp_path: Path, fault: str
) -> None:
    save(tmp_path, whole_tensors(0), 2, step=1)

    def work(mesh: Mesh) -> None:
        start = {"gap": 3, "overlap": 1, "dtype": 2}[fault] if mesh.rank else 0
        values = torch.zeros(2, dtype=torch.float64 if fault == "dtype" and mesh.rank else None)
        pieces = {"w": Piece(values[: 5 - start], (4,) if fault != "gap" else (5,), (start,))}
        checkpoint.save(tmp_path, 2, {"model": pieces}, {}, mesh)

    errors = on_threads(2, work)
    assert all(isinstance(error, CheckpointError) for error in errors)
    assert "'w'" in str(errors[0])
    assert "see their logs" in str(errors[1])
    assert [entry.step for entry in checkpoint.entries(tmp_path)] == [1]


def test_a_rank_that_dies_half_way_leaves_the_older_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 never writes its listing, and the others are told what may be the matter."""
    tensors = whole_tensors(0)
    save(tmp_path, tensors, 3, step=1)
    monkeypatch.setattr(write, "PATIENCE", 0.1)
    real = write.write_pieces

    def dies(*args: Any) -> None:
        if args[-1].rank != 1:
            real(*args)

    monkeypatch.setattr(write, "write_pieces", dies)
    with pytest.raises(CheckpointError, match=r"listing-rank-00001.*did a rank die.*all ranks"):
        save(tmp_path, tensors, 3, step=2)
    entry = checkpoint.newest_whole(tmp_path)
    assert entry is not None
    assert entry.step == 1
    monkeypatch.undo()
    save(tmp_path, tensors, 3, step=2)
    assert [entry.step for entry in checkpoint.entries(tmp_path)] == [1, 2]
    assert not list(tmp_path.glob(".*"))


def test_ranks_that_share_no_file_system_are_told_so(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(write, "PATIENCE", 0.1)

    def work(mesh: Mesh) -> None:
        folder = tmp_path / f"machine-{mesh.rank}"
        checkpoint.save(folder, 1, {"model": {}}, {}, mesh)

    errors = on_threads(2, work)
    assert "file system that all ranks share" in str(errors[1])
    assert isinstance(errors[0], CheckpointError)


def test_a_crash_between_the_two_renames_keeps_the_replaced_checkpoint(tmp_path: Path) -> None:
    save(tmp_path, whole_tensors(0), 1, step=1)
    (tmp_path / "step-00000001").rename(tmp_path / ".step-00000001.old")
    checkpoint.prune(tmp_path, keep=2)
    entry = checkpoint.newest_whole(tmp_path)
    assert entry is not None
    assert entry.step == 1
    save(tmp_path, whole_tensors(1), 1, step=1)
    checkpoint.prune(tmp_path, keep=2)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_names_and_shapes_of_another_model_are_refused(tmp_path: Path) -> None:
    path = save(tmp_path, {"w": torch.zeros(3, 4)}, 2)
    wrong = Piece(torch.zeros(1, 4), (4, 4), (1, 0))
    with pytest.raises(CheckpointError, match=r"'w' has shape \[3, 4\], the model's is \[4, 4\]"):
        checkpoint.load_into(path, "model", {"w": wrong})
    with pytest.raises(CheckpointError, match="'v' is missing in the checkpoint"):
        checkpoint.load_into(path, "model", {"v": wrong})
    with pytest.raises(CheckpointError, match="'w' is missing in the model"):
        checkpoint.load_into(path, "model", {}, names=["v"])
    with pytest.raises(CheckpointError, match="holds no 'ema' tensors"):
        checkpoint.load_into(path, "ema", {})


def test_state_that_the_optimizer_has_not_made_yet_is_read_as_this_ranks_part(
    tmp_path: Path,
) -> None:
    """A rank with rows 2 to 5 of ``a`` whose optimizer has no state yet; ``b`` is elsewhere."""
    momentum, weight = torch.arange(24.0).view(8, 3), torch.zeros(3, 3)
    state = {"a/momentum": momentum, "a/step": torch.tensor(7.0), "b/momentum": torch.ones(5)}
    parts = {"model": {"a": torch.zeros(8, 3), "b": torch.zeros(5)}, "optimizer": state}
    whole = {part: checkpoint.wholes(tensors) for part, tensors in parts.items()}
    checkpoint.save(tmp_path, 1, whole, {"done": 1, "skipped": 0})
    here = {"model": {"a": Piece(weight, (8, 3), (2, 0))}, "optimizer": {}}
    given: dict[str, Tensor] = {}
    optimizers = SimpleNamespace(names={weight: "a"}, load_state_tensors=given.update)
    step: Any = SimpleNamespace(pieces=lambda: here, optimizers=optimizers, loss_scale=None)
    entry = checkpoint.entries(tmp_path)[0]
    mesh = Mesh(dict.fromkeys(AXES, 1) | {"pipeline": 2}, dict.fromkeys(AXES, 0))
    checkpoint.restore(step, entry, mesh)
    assert given.keys() == {"a/momentum", "a/step"}
    assert torch.equal(given["a/momentum"], momentum[2:5])
    assert given["a/step"] == 7
    assert step.done == 1
    with pytest.raises(CheckpointError, match="'b'"):
        checkpoint.restore(step, entry)


def _save_on_ranks(folder: Path, source: Path | None, seed: int) -> None:
    """A rank's work: load from ``source`` under this layout, then save under it."""
    import torch.distributed as dist

    size, rank = dist.get_world_size(), dist.get_rank()
    sizes = dict.fromkeys(AXES, 1) | {"shard": size}
    mesh = Mesh(sizes, dict.fromkeys(AXES, 0) | {"shard": rank})
    pieces = spread(whole_tensors(3), size, seed, fill=source is None)[rank]
    if source is not None:
        entry = checkpoint.newest_whole(source, mesh)
        assert entry is not None
        checkpoint.load_into(entry.path, "model", pieces)
    checkpoint.save(folder, 1, {"model": pieces}, {"done": 1}, mesh)


def test_four_processes_to_two_to_one(tmp_path: Path) -> None:
    source: Path | None = None
    for count in (4, 2, 1):
        meet = tmp_path / f"meet-{count}"
        meet.mkdir()
        folder = tmp_path / f"from-{count}"
        on_ranks(count, meet, _save_on_ranks, folder, source, count)
        source = folder
    tensors = whole_tensors(3)
    for count in (4, 2, 1):
        loaded = checkpoint.load(tmp_path / f"from-{count}" / "step-00000001", "model")
        assert loaded.keys() == tensors.keys()
        assert all(same(loaded[name], tensors[name]) for name in tensors)
    shutil.rmtree(tmp_path / "from-4")
    assert (tmp_path / "from-1" / "step-00000001" / "model.safetensors").exists()
