"""The report says what the folder holds, escapes what a model wrote, and needs nothing else."""

from __future__ import annotations

import html
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch

from made_runs import EVIL, RECIPE, language_run
from megalith import checkpoint
from megalith.core.runs import RunFolder
from megalith.layout.pieces import whole
from megalith.train.metrics import MetricsWriter
from megalith.train.report import write_report


class Page(HTMLParser):
    """The elements of a page and its texts, by Python's own parser."""

    VOID = frozenset({"meta", "link", "input"})

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.texts: list[str] = []
        self.scripts: list[str] = []
        self.open: list[str] = []
        self.source = file.read_text(encoding="utf-8")
        self.feed(self.source)
        self.close()
        assert self.open == [], f"not closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {k: v or "" for k, v in attrs}))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {k: v or "" for k, v in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        inside = self.open[-1] if self.open else ""
        if inside != "style":
            (self.scripts if inside == "script" else self.texts).append(data)

    def all(self, tag: str, **attributes: str) -> list[dict[str, str]]:
        return [a for t, a in self.elements if t == tag and attributes.items() <= a.items()]

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())

    @property
    def charts(self) -> list[str]:
        """The titles of the charts, from the labels of their plots."""
        labels = [a["aria-label"] for a in self.all("div") if a.get("class") == "plot"]
        return [label.partition(":")[0] for label in labels]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return language_run(tmp_path_factory.mktemp("runs") / "gpt <b>")


@pytest.fixture(scope="module")
def page(folder: RunFolder) -> Page:
    assert write_report(folder) == folder.report
    return Page(folder.report)


@pytest.fixture(scope="module")
def lines(folder: RunFolder) -> list[dict[str, Any]]:
    return [json.loads(line) for line in folder.metrics.read_text().splitlines()]


def test_the_verdict_says_how_it_went(page: Page, lines: list[dict[str, Any]]) -> None:
    losses = [(e["loss"], e["step"]) for e in lines if e["kind"] == "validation"]
    (best, step), (last, _) = min(losses), losses[-1]
    assert (
        f"Finished 400 updates in 4m24s. Best validation loss {best:.3f} at step {step}; "
        f"the last, at step 400, is {last:.3f}." in page.text
    )


def test_the_figures_are_those_of_the_lines(page: Page, lines: list[dict[str, Any]]) -> None:
    losses = [e["loss"] for e in lines if e["kind"] == "train" and e["loss"] is not None]
    assert f"Training loss {losses[-1]:.3f} from {losses[0]:.3f}" in page.text
    assert "Throughput 12.3k median tokens/s" in page.text
    assert "MFU 46 % of the matmul peak" in page.text
    assert "Peak memory 3.0 GiB largest seen" in page.text
    assert "Time 4m24s 660 ms an update" in page.text
    assert "Seen 3.28M tokens in 400 updates" in page.text  # 400 x 32 x 256
    assert "Skipped" not in page.text
    assert "12.3M parameters" in page.text


def test_every_curve_is_there(page: Page) -> None:
    assert page.charts == [
        "Loss",
        "Bits per byte",
        "Learning rate",
        "Gradient norm",
        "Throughput",
        "Model FLOP utilisation",
        "Peak memory",
    ]
    drawn = [a["d"] for a in page.all("path") if a.get("class", "").startswith("curve")]
    assert all(re.match(r"M[\d.]+ [\d.]+", d) for d in drawn)
    images = page.all("svg", role="img")
    assert len(images) == 9  # loss and gradient norm have a logarithmic view too
    assert images[0]["aria-label"].startswith("Loss by step: training 8.")


def test_the_time_split_adds_up(page: Page) -> None:
    for row in (
        "Forward, backward, update 83.3 % 3m40s 550 ms",
        "Waiting for data 3.0 % 8.0 s 20 ms",
        "Evaluating 7.6 % 20 s 50 ms",
        "Saving checkpoints 4.5 % 12 s 30 ms",
        "Everything else 1.5 % 4.0 s 10 ms",
    ):
        assert row in page.text
    shares = [a["style"] for t, a in page.elements if t == "i" and "style" in a]
    assert sum(float(s.removeprefix("flex:").split()[0]) for s in shares) == pytest.approx(
        1, abs=1e-4
    )


def test_what_a_model_wrote_stays_text(page: Page) -> None:
    shown = EVIL.replace("\ud83d", "?")
    assert f"def f(x): {shown}" in page.text
    assert f"loss nan {shown}" in page.text
    assert len(page.scripts) == 2
    assert "owned" not in "".join(page.scripts)
    assert "Megalith run gpt <b> Finished" in page.text  # the folder's name, not an element


def test_labels_inside_the_script_are_escaped_too(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    with MetricsWriter(folder) as metrics:
        metrics.write("train", 1, loss=1.0, **{"</script>_per_s": 3})
        metrics.write("validation", 1, loss=1.0, **{"</script><b>": 0.5})
    page = Page(write_report(folder))
    assert "</script><b>" in page.charts
    data = json.loads(page.scripts[0])
    assert len(data) == len(page.charts)
    assert len(page.scripts) == 2


def test_the_page_needs_nothing_but_itself(page: Page) -> None:
    policy = page.all("meta", **{"http-equiv": "Content-Security-Policy"})[0]["content"]
    assert policy.startswith("default-src 'none'")
    for _, attributes in page.elements:
        for name in ("src", "href", "srcset", "data", "action"):
            assert attributes.get(name, "data:,") == "data:,"
    assert not re.search(r"@import|url\(|https?:", page.source)


def test_commands_are_exact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = language_run(Path("runs/my run"), steps=50)
    page = Page(write_report(folder))
    assert "megalith train 'runs/my run/recipe.toml' --resume" in page.text
    assert "megalith train 'runs/my run/recipe.toml' train.steps=800 --resume" in page.text
    assert "megalith generate 'runs/my run' --prompt 'def '" in page.text
    finished = Page(write_report(language_run(Path("runs/whole"))))
    assert "recipe.toml --resume" not in finished.text
    assert "megalith train runs/whole/recipe.toml train.steps=800 --resume" in finished.text
    moved = RunFolder(folder.path.rename(tmp_path / "elsewhere"))
    assert "megalith train elsewhere/recipe.toml run.dir=elsewhere --resume" in (
        Page(write_report(moved)).text
    )


def test_checkpoints_are_listed_with_size_and_loss(tmp_path: Path) -> None:
    folder = language_run(tmp_path / "run", steps=50)
    weights = {"model": {"weight": whole(torch.zeros(1024, 256))}}
    for step, loss in ((25, 2.0), (50, 3.0), (60, None)):
        checkpoint.save(folder.checkpoints, step, weights, {"validation_loss": loss})
    (folder.checkpoints / ".step-00000070.tmp").mkdir()
    text = Page(write_report(folder)).text
    assert "step-00000025 25 1.0 MiB 2.000 best step-00000050 50 1.0 MiB 3.000 " in text
    assert "step-00000060 60 1.0 MiB –" in text
    assert "step-00000070" not in text


def test_a_run_that_has_only_begun(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    folder.recipe.write_text(tomli_w.dumps(RECIPE))
    assert "At 0 of 400 updates. Nothing is measured yet." in Page(write_report(folder)).text
    with MetricsWriter(folder) as metrics:
        metrics.write("train", 10, loss=5.5, lr=1e-3, seconds=2.0)
        page = Page(write_report(folder))
    assert page.charts == ["Loss", "Learning rate"]
    assert "At 10 of 400 updates in 2.0 s. Training loss 5.500; no validation yet." in page.text


def test_an_empty_folder_and_damaged_files(tmp_path: Path) -> None:
    assert "At 0 of 0 updates." in Page(write_report(tmp_path)).text
    for name in ("recipe.toml", "environment.json", "metrics.jsonl", "samples.jsonl"):
        (tmp_path / name).write_bytes(b'{"kind": \xff\x00 [')
    assert "At 0 of 0 updates." in Page(write_report(tmp_path)).text


@pytest.mark.parametrize(
    ("event", "said"),
    [
        ("early_stop", "Stopped early at 10 of 400 updates"),
        ("interrupted", "Interrupted at 10 of 400 updates"),
        ("resume", "At 10 of 400 updates"),
    ],
)
def test_how_a_run_ended(tmp_path: Path, event: str, said: str) -> None:
    folder = RunFolder(tmp_path)
    folder.recipe.write_text(tomli_w.dumps(RECIPE))
    with MetricsWriter(folder) as metrics:
        metrics.write("validation", 10, loss=2.0)
        metrics.write("event", 10, event=event, message="why")
    text = Page(write_report(folder)).text
    assert f"{said}. Best validation loss 2.000 at step 10, the last one." in text
    with MetricsWriter(folder, resume_from=10) as metrics:
        metrics.write("validation", 400, loss=1.0)
        metrics.write("event", 400, event="done", message="")
    assert "Finished 400 updates. Best validation loss 1.000" in Page(write_report(folder)).text


def test_a_run_of_classification(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    recipe = {
        "model": {"family": "resnet", "preset": "resnet18"},
        "data": {"source": "digits"},
        "task": {"name": "classify"},
        "train": {"steps": 100, "global_batch": 64},
        "run": {"dir": str(tmp_path)},
    }
    folder.recipe.write_text(tomli_w.dumps(recipe))
    with MetricsWriter(folder) as metrics:
        for step in range(10, 101, 10):
            metrics.write("train", step, loss=1 / step, images_per_s=512.0, seconds=1.0)
            metrics.write("validation", step, loss=1 / step, accuracy=1 - 1 / step)
    page = Page(write_report(folder))
    assert page.charts == ["Loss", "Accuracy", "Throughput"]
    assert "Accuracy 99 % at the best step" in page.text
    assert "Throughput 512 median images/s" in page.text
    assert "Seen 6.4k samples in 100 updates" in page.text
    assert "megalith generate" not in page.text


def test_a_long_run_makes_a_small_page(tmp_path: Path) -> None:
    folder = language_run(tmp_path / "run", steps=20_000, every=10)
    assert write_report(folder).stat().st_size < 500_000


def test_tables_name_their_headings_and_text_has_contrast(page: Page) -> None:
    assert all("scope" in a for a in page.all("th"))
    for dark in (False, True):
        palette = colours(page.source, dark)
        ground = [palette["paper"], palette["panel"]]
        for name in ("ink", "quiet"):
            assert min(contrast(palette[name], g) for g in ground) >= 4.5, name
        for name in ("c1", "c2", "c3", "c4", "c5"):
            assert contrast(palette[name], palette["paper"]) >= 4, name


def colours(source: str, dark: bool) -> dict[str, str]:
    light, _, night = source.partition("@media (prefers-color-scheme: dark)")
    block = night[: night.index("\n}")] if dark else light
    return dict(re.findall(r"--(\w+): (#[0-9a-f]{6})", html.unescape(block)))


def contrast(one: str, other: str) -> float:
    """WCAG 2.2, contrast ratio of two sRGB colours."""

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)
