"""From the raw runs of ``train_vs_peers.py`` to ratios, checks and a table in Markdown."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

MEGALITH = "megalith"
SELECTIVE = "megalith_selective"
FIRST_LOSS = {"fp32": 1e-4, "bf16": 2e-2}
LATER_LOSS = {"fp32": 1e-2, "bf16": 1e-1}

Run = dict[str, Any]
"""``peer``, ``round``, and either ``error`` or ``seconds``, ``losses`` and ``peak_rss``."""


@dataclass(frozen=True)
class Spread:
    """The median of several rounds, the least and the largest."""

    middle: float
    least: float
    most: float

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        """The spread of ``values``, at least one."""
        return cls(median(values), min(values), max(values))

    def text(self, digits: int) -> str:
        """``middle (least–most)``."""
        return f"{self.middle:.{digits}f} ({self.least:.{digits}f}–{self.most:.{digits}f})"


def train_flops(layers: int, width: int, vocab: int, sequence: int) -> int:
    """FLOPs of forward and backward per token of a GPT-2 shape.

    Six per weight of every matrix product (the embedding's look-up is none, the tied head is one),
    and attention in full, its masked half included (Chowdhery et al. 2022, appendix B).
    """
    matrices = layers * 12 * width**2 + vocab * width
    return 6 * matrices + 12 * layers * width * sequence


def tokens_per_second(run: Run, tokens: int, warmup: int) -> float:
    """Tokens per update over the median time of the updates after warm-up."""
    return tokens / median(run["seconds"][warmup:])


def disagreement(runs: list[Run], precision: str) -> str | None:
    """What differs between the losses of the runs, or ``None``: then all trained the same model."""
    good = [run for run in runs if "error" not in run]
    if not good:
        return None
    reference = next((run for run in good if run["peer"] == "plain"), good[0])["losses"]
    for run in good:
        for update, (found, wanted) in enumerate(zip(run["losses"], reference, strict=True)):
            allowed = (LATER_LOSS if update else FIRST_LOSS)[precision]
            if abs(found - wanted) > allowed:
                return (
                    f"{run['peer']}, round {run['round']}: loss of update {update + 1} is "
                    f"{found:.6f}, elsewhere {wanted:.6f}"
                )
    return None


def table(setting: dict[str, Any], peaks: dict[str, float]) -> str:
    """One setting as a Markdown table; ratios are taken within a round, then their median."""
    if "skipped" in setting:
        return f"Not run: {setting['skipped']}."
    precision, tokens = setting["precision"], setting["batch"] * setting["sequence"]
    runs = {
        peer: {r["round"]: r for r in setting["runs"] if r["peer"] == peer and "error" not in r}
        for peer in setting["peers"]
    }
    rates = {
        peer: {n: tokens_per_second(r, tokens, setting["warmup"]) for n, r in of_peer.items()}
        for peer, of_peer in runs.items()
    }
    memory = {peer: {n: r["peak_rss"] for n, r in found.items()} for peer, found in runs.items()}
    flops = train_flops(*(setting[name] for name in ("layers", "width", "vocab", "sequence")))
    lines = [
        f"| peer | tokens/s | Megalith ÷ it | of the {precision} peak | peak memory, MiB "
        "| Megalith ÷ it | last loss |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for peer in setting["peers"]:
        if not rates[peer]:
            lines.append(f"| {peer} | {_reason(setting, peer)} | | | | | |")
            continue
        rate = Spread.of(list(rates[peer].values()))
        size = Spread.of([value / 2**20 for value in memory[peer].values()])
        last = next(iter(runs[peer].values()))["losses"][-1]
        cells = [
            rate.text(0),
            _ratio(rates[MEGALITH], rates[peer], peer),
            f"{100 * rate.middle * flops / peaks[precision]:.0f} %",
            size.text(0),
            _ratio(memory[MEGALITH], memory[peer], peer),
            f"{last:.4f}",
        ]
        lines.append(f"| {peer} | {' | '.join(cells)} |")
    return "\n".join(lines) + "".join(
        f"\n\n{name}: {_against_best(name, rates, max)} times the tokens/s of the fastest peer, "
        f"{_against_best(name, memory, min)} times the memory of the smallest."
        for name in (MEGALITH, SELECTIVE)
        if rates.get(name) and any(rates[peer] for peer in _others(rates))
    )


def _others(found: dict[str, dict[int, float]]) -> list[str]:
    return [peer for peer in found if peer not in (MEGALITH, SELECTIVE)]


def _against_best(
    name: str, found: dict[str, dict[int, float]], best: Callable[[list[float]], float]
) -> str:
    """The ratio to each round's best peer."""
    ratios = []
    for number, ours in found[name].items():
        theirs = [found[peer][number] for peer in _others(found) if number in found[peer]]
        ratios += [ours / best(theirs)] if theirs else []
    return Spread.of(ratios).text(3) if ratios else "(no round in common)"


def _ratio(ours: dict[int, float], theirs: dict[int, float], peer: str) -> str:
    shared = sorted(ours.keys() & theirs.keys())
    if peer == MEGALITH or not shared:
        return ""
    return Spread.of([ours[n] / theirs[n] for n in shared]).text(3)


def _reason(setting: dict[str, Any], peer: str) -> str:
    errors = [run["error"] for run in setting["runs"] if run["peer"] == peer and "error" in run]
    return errors[0].replace("|", "/") if errors else "not run"


def markdown(results: dict[str, Any]) -> str:
    """The whole of the results as one Markdown page."""
    machine, peaks = results["machine"], results["peaks"]
    parts = [
        "# Training a GPT-2 shape: Megalith and its peers",
        "Written by `benchmarks/train_vs_peers.py`; raw numbers are in the JSON file beside this "
        "one. Same weights, same batches, same AdamW; one process per run, runs alternate, ratios "
        "are taken within a round. Each figure is the median of the rounds, with the least and the "
        "largest in brackets. Memory is the process's largest resident set up to the end of its "
        "last update, libraries included.",
        f"{results['date']}, {machine['processor']}, {machine['cores']} cores, "
        f"{machine['memory'] / 2**30:.0f} GiB, {machine['capability']}, {machine['system']}. "
        f"Measured matmul peaks: {peaks['fp32'] / 1e12:.4f} TFLOP/s in float32, "
        f"{peaks['bf16'] / 1e12:.4f} in bfloat16. "
        + ", ".join(f"{name} {version}" for name, version in sorted(results["versions"].items()))
        + ".",
    ]
    if peaks["bf16"] < peaks["fp32"]:
        parts.append(
            f"**This processor has no bfloat16 instructions that torch uses:** its bfloat16 matmul "
            f"is {peaks['fp32'] / peaks['bf16']:.0f} times slower than its float32 one, for every "
            "library."
        )
    for name, setting in results["settings"].items():
        title = f"## {name}"
        shape = (
            f"{setting['layers']} layers, width {setting['width']}, {setting['heads']} heads, "
            f"vocabulary {setting['vocab']}: {setting['parameters'] / 1e6:.1f} M parameters. "
            f"Batch {setting['batch']} × {setting['sequence']} tokens, {setting['precision']}"
            f"{', torch.compile' if setting['compile'] else ''}. {setting['steps']} updates, the "
            f"first {setting['warmup']} not counted, {setting['rounds']} rounds."
        )
        parts += [title, shape, table(setting, peaks)]
        if setting.get("disagreement"):
            parts.append(f"**The losses do not agree:** {setting['disagreement']}.")
    return "\n\n".join(parts) + "\n"
