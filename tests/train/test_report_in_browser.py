"""The report in a real browser: no error, curves with length, a narrow screen, the dark, the keys.

The page is put into a frame of the width under test, with a probe behind its last script; the
probe's findings are read from the printed document.
"""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from made_runs import language_run
from megalith.core.runs import RunFolder
from megalith.train.metrics import MetricsWriter
from megalith.train.report import write_report

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)

OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--enable-logging=stderr",
    "--v=0",
    "--virtual-time-budget=5000",
    "--dump-dom",
)

pytestmark = pytest.mark.skipif(
    BROWSER is None, reason="needs Chromium on the PATH (Debian: apt-get install chromium)"
)

PROBE = """
<script>
addEventListener("load", () => {
  const all = (what) => [...document.querySelectorAll(what)];
  const plots = all(".plot"), shown = (e) => getComputedStyle(e).display !== "none";
  const legend = () => all("figure")[0].querySelector(".legend").textContent.trim();
  all("details").forEach((d) => { d.open = true; });
  const found = {
    width: innerWidth,
    page: document.documentElement.scrollWidth,
    curves: all("path.curve[d]").filter((p) => p.closest(".plot"))
      .filter((p) => shown(p.closest(".view")))
      .map((p) => [p.getAttribute("class"), p.getTotalLength(), p.getBoundingClientRect().width]),
    charts: plots.length,
    background: getComputedStyle(document.body).backgroundColor,
    title: document.title,
    last: legend(),
  };
  const box = plots[1].getBoundingClientRect();
  plots[1].dispatchEvent(new PointerEvent("pointermove", { clientX: box.left + box.width / 2 }));
  found.half = all(".cursor").map((c) => c.dataset.step);
  found.pointed = legend();
  plots[0].dispatchEvent(new PointerEvent("pointerleave", { pointerType: "mouse" }));
  found.away = legend();
  plots[0].focus();
  plots[0].dispatchEvent(new KeyboardEvent("keydown", { key: "Home" }));
  found.home = document.getElementById("said").textContent;
  plots[0].dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowRight" }));
  found.next = document.getElementById("said").textContent;
  const toggle = document.querySelector(".log-axis");
  found.scales = [];
  if (toggle) for (let i = 0; i < 2; i++) {
    const views = [...plots[0].querySelectorAll(".view")].filter(shown);
    found.scales.push(views.map((v) => v.className));
    toggle.click();
  }
  found.outside = performance.getEntriesByType("resource").map((e) => e.name);
  parent.document.body.textContent = "FOUND" + JSON.stringify(found) + "END";
});
</script>
"""


def look(report: Path, tmp_path: Path, width: int, *flags: str) -> dict[str, Any]:
    """What the probe sees at a width; any message on the console is a failure."""
    page = report.read_text(encoding="utf-8").replace("</body>", f"{PROBE}</body>")
    frame = tmp_path / "frame.html"
    frame.write_text(
        '<!doctype html><meta charset="utf-8"><meta name="color-scheme" content="light dark">'
        f'<iframe style="width:{width}px;height:800px;border:0" srcdoc="{html.escape(page)}">',
        encoding="utf-8",
    )
    assert BROWSER is not None
    done = subprocess.run(
        [BROWSER, *OPTIONS, *flags, f"--user-data-dir={tmp_path / 'profile'}", frame.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert [line for line in done.stderr.splitlines() if "CONSOLE" in line] == []
    match = re.search(r"FOUND(.*)END", done.stdout)
    assert match, done.stdout[-2000:]
    return json.loads(html.unescape(match[1]))


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(language_run(tmp_path_factory.mktemp("runs") / "gpt"))


def test_on_a_phone_in_the_light(report: Path, tmp_path: Path) -> None:
    found = look(report, tmp_path, 360, "--blink-settings=preferredColorScheme=1")
    assert found["width"] == 360
    assert found["page"] <= 360
    assert found["background"] == "rgb(253, 253, 252)"
    assert found["charts"] == 7
    kinds = [kind for kind, _, _ in found["curves"]]
    assert kinds[:4] == ["curve c1 faint", "curve c1 line", "curve c2 dots", "curve c2 best"]
    for kind, length, width in found["curves"]:
        if "best" not in kind:
            assert length > 500, kind  # of a plot of 1000 by 1000
            assert 150 < width <= 360, kind
    assert found["outside"] == []
    assert found["title"] == "gpt · Megalith run"  # and not what a sample would like


def test_on_a_desk_in_the_dark(report: Path, tmp_path: Path) -> None:
    found = look(report, tmp_path, 1280, "--blink-settings=preferredColorScheme=0")
    assert found["page"] <= 1280
    assert found["background"] == "rgb(19, 22, 25)"
    assert found["scales"] == [["view linear"], ["view log"]]


def test_the_read_out_follows_pointer_and_keys(report: Path, tmp_path: Path) -> None:
    found = look(report, tmp_path, 800)
    lines = [json.loads(x) for x in (report.parent / "metrics.jsonl").read_text().splitlines()]
    loss = {e["step"]: e["loss"] for e in lines if e["kind"] == "train"}
    assert set(found["half"]) == {"step 200"}  # all charts together
    assert "training not finite" in found["pointed"]  # the made run's lost step
    assert found["away"] == found["last"] != found["pointed"]
    assert found["home"].startswith(f"Loss, step 1: training {loss[1]:.3f}, smoothed ")
    assert found["next"].startswith(f"Loss, step 2: training {loss[2]:.3f}, smoothed ")


def test_a_run_that_has_only_begun(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    with MetricsWriter(folder) as metrics:
        metrics.write("train", 1, loss=5.5, lr=1e-3)
    found = look(write_report(folder), tmp_path, 360)
    assert found["charts"] == 2
    assert found["home"] == "Loss, step 1: training 5.500"
