"""Exact resume: killed at any moment, a run ends as if nothing had happened (contract 5)."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megalith import checkpoint
from megalith.core import devices
from megalith.core.errors import MegalithError
from megalith.recipe import Recipe, load
from megalith.train.loop import Run, train
from sample_log import read_log

UPDATES, EVERY, ACCUMULATION = 90, 3, 2

# A clean server that has imported torch: each process forked from it starts in a tenth of a second.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "megalith.train.loop", "megalith.models.decoder"])


def recipe(folder: Path, *overrides: str) -> Recipe:
    """A decoder with dropout, accumulation, an average and a growing set of checkpoints."""
    corpus = folder.parent / "corpus"
    corpus.mkdir(exist_ok=True)
    for index in range(40):
        words = random.Random(index).choices(
            ["to", "be", "or", "not", "that", "is", "the", "question"], k=60
        )
        (corpus / f"{index}.txt").write_text(" ".join(words))
    return load(
        None,
        *("model.layers=2", "model.width=32", "model.heads=2", "model.dropout=0.2"),
        *(f'data.files=["{corpus}"]', "data.sequence=32", "data.validation=0.2"),
        f"data.cache={folder.parent / 'cache'}",
        *(
            f"train.steps={UPDATES}",
            "train.global_batch=8",
            f"train.micro_batch={8 // ACCUMULATION}",
        ),
        *("train.ema=0.9", "optim.lr=0.01", "optim.warmup=5"),
        *(f"checkpoint.every={EVERY}", "checkpoint.keep=3", "evaluate.every=10"),
        *(f"run.dir={folder}", "run.log_every=1"),
        "task.factory=sample_log:Logged",
        *overrides,
    )


def work(recipe: Recipe, log: Path, syncs: int | None = None) -> None:
    """Train in a process of its own, and die at the ``syncs``-th time that a save reaches disk."""
    torch.set_num_threads(1)
    os.environ["SAMPLE_LOG"] = str(log)
    devices.matmul_peak = lambda *_, **__: 1e11  # only a figure, and it takes most of a second
    if syncs is not None:
        left, sync = syncs, os.fsync

        def dying(handle: int) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            sync(handle)

        os.fsync = dying
    train(recipe, resume=True)


def final_tensors(folder: Path) -> dict[str, torch.Tensor]:
    entry = checkpoint.newest_whole(folder / "checkpoints")
    assert entry is not None
    assert entry.step == UPDATES
    return {
        f"{file.stem}/{name}": tensor
        for file in sorted(entry.path.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def assert_same(first: Path, second: Path) -> None:
    wanted, found = final_tensors(first), final_tensors(second)
    assert wanted.keys() == found.keys()
    for name in wanted:
        assert torch.equal(wanted[name], found[name]), name
    assert any(name.startswith("ema/") for name in wanted)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]]]:
    """A run that nothing happened to, and the sample ids of its micro-batches."""
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    log = folder.parent / "samples.log"
    process = CONTEXT.Process(target=work, args=(recipe(folder), log))
    process.start()
    process.join()
    assert process.exitcode == 0
    return folder, read_log(log)


def newest_step(folder: Path) -> int:
    entry = checkpoint.newest_whole(folder / "checkpoints")
    return entry.step if entry else 0


def metric_lines(folder: Path) -> int:
    file = folder / "metrics.jsonl"
    return len(file.read_bytes().splitlines()) if file.exists() else 0


@pytest.mark.slow
def test_killed_twenty_times_also_inside_saves_it_ends_bit_for_bit_the_same(
    tmp_path: Path, undisturbed: tuple[Path, list[list[int]]]
):
    whole, samples = undisturbed
    killed, chance, kills = tmp_path / "killed", random.Random(0), 0
    for attempt in range(200):
        start = newest_step(killed)
        log = tmp_path / f"attempt-{attempt}.log"
        # Every second time inside a save (about 9 forced writes each), else anywhere.
        inside = chance.randrange(1, 14) if attempt % 2 and kills < 22 else None
        process = CONTEXT.Process(target=work, args=(recipe(killed), log, inside))
        process.start()
        if inside is None and kills < 22:
            _wait_for_lines(process, killed, chance.randrange(1, 5))
            time.sleep(chance.uniform(0, 0.02))
            os.kill(process.pid, signal.SIGKILL)
        process.join()
        seen = read_log(log)
        first = start * ACCUMULATION
        assert seen == samples[first : first + len(seen)], "other samples after a resume"
        kills += process.exitcode == -signal.SIGKILL
        if process.exitcode == 0:
            break
    assert kills >= 20
    assert_same(whole, killed)
    steps = [
        line for line in (killed / "metrics.jsonl").read_text().splitlines() if '"train"' in line
    ]
    assert len(steps) == UPDATES, "a resumed run repeats or loses lines of metrics"


def _wait_for_lines(process, folder: Path, count: int) -> None:
    """Until the process has written ``count`` lines of metrics, or ended."""
    before = metric_lines(folder)
    while process.is_alive() and metric_lines(folder) < before + count:
        time.sleep(0.005)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_signal_saves_ends_cleanly_and_resumes_exactly(
    tmp_path: Path, undisturbed: tuple[Path, list[list[int]]], number: int
):
    whole, _ = undisturbed
    stopped = tmp_path / "stopped"
    process = CONTEXT.Process(target=work, args=(recipe(stopped), tmp_path / "log"))
    process.start()
    while metric_lines(stopped) < 7:
        time.sleep(0.01)
    os.kill(process.pid, number)
    process.join()
    assert process.exitcode == 0
    assert 0 < newest_step(stopped) < UPDATES
    assert "interrupted" in (stopped / "metrics.jsonl").read_text()
    run = resumed(recipe(stopped))
    assert run.status == "done"
    assert_same(whole, stopped)


def resumed(recipe: Recipe) -> Run:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return train(recipe, resume=True)
    finally:
        torch.set_num_threads(threads)


def test_a_damaged_newest_checkpoint_costs_only_its_own_updates(
    tmp_path: Path, undisturbed: tuple[Path, list[list[int]]]
):
    whole, _ = undisturbed
    process = CONTEXT.Process(target=work, args=(recipe(tmp_path / "run"), tmp_path / "log", 30))
    process.start()
    process.join()
    step = newest_step(tmp_path / "run")
    file = tmp_path / "run" / "checkpoints" / f"step-{step:08d}" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)
    assert newest_step(tmp_path / "run") < step
    resumed(recipe(tmp_path / "run"))
    assert_same(whole, tmp_path / "run")


def test_a_folder_with_a_run_is_not_trained_over_and_another_recipe_not_resumed(tmp_path: Path):
    folder = tmp_path / "run"
    short = ("train.steps=7",)
    train(recipe(folder, *short))
    with pytest.raises(MegalithError, match=r"run\.dir: .* holds a run; add --resume"):
        train(recipe(folder, *short))
    with pytest.raises(MegalithError, match=r"model\.layers: 3 differs from the checkpoint's 2"):
        train(recipe(folder, *short, "model.layers=3"), resume=True)
    run = train(recipe(folder, "train.steps=9", "optim.lr=0.001"), resume=True)
    assert run.step == 9
    assert "optim.lr: 0.01 -> 0.001" in (folder / "metrics.jsonl").read_text()
    longer = recipe(folder, "train.steps=11")
    (tmp_path / "corpus" / "0.txt").write_text("another text altogether")
    with pytest.raises(MegalithError, match=r"data: the samples are not those of"):
        train(longer, resume=True)
