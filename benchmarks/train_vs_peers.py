"""Train the same GPT-2 in Megalith, Hugging Face Trainer, Lightning, litgpt and plain PyTorch.

    python benchmarks/train_vs_peers.py                      # all settings, about an hour
    python benchmarks/train_vs_peers.py 30m/fp32 --rounds 5
    python benchmarks/train_vs_peers.py --quick              # a tiny model: does it all run?

A setting is ``SIZE/PRECISION[/compile][@BATCHxSEQUENCE]``. Each peer has an environment of its own,
made the first time. Runs are processes of their own and alternate between peers; all use the CPU.
Results go to ``benchmarks/results/train_vs_peers.{json,md}``. Needs only the standard library.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from environments import NotInstalled, environment
from peers_summary import MEGALITH, SELECTIVE, disagreement, markdown, train_flops

HERE = Path(__file__).resolve().parent
TORCH = "torch>=2.13,<2.14"
COMMON = (TORCH, "numpy>=2,<3", "safetensors>=0.5,<1")
PEERS = {
    "plain": COMMON,
    "hf_trainer": (*COMMON, "transformers==5.24.0", "accelerate==1.15.0"),
    "lightning_loop": (*COMMON, "lightning==2.6.6"),
    "litgpt_loop": (*COMMON, "litgpt==0.5.13"),
    MEGALITH: (TORCH, "-e", str(HERE.parent)),
    # Same program with train.checkpointing = "selective": what the least memory costs in time.
    SELECTIVE: (TORCH, "-e", str(HERE.parent)),
}
SCRIPTS = {MEGALITH: "megalith_run", SELECTIVE: "megalith_run"}
SIZES = {
    "tiny": {"layers": 2, "width": 64, "heads": 2, "vocab": 512, "context": 128},
    "30m": {"layers": 6, "width": 384, "heads": 6, "vocab": 50257, "context": 1024},
    "124m": {"layers": 12, "width": 768, "heads": 12, "vocab": 50257, "context": 1024},
}
DEFAULT = ("30m/fp32", "124m/fp32", "30m/bf16", "124m/bf16")
OPTIMIZER = {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1, "clip": 1.0}
LONGEST = 120.0  # seconds; an update that would take longer is not measured


@dataclass(frozen=True)
class Setting:
    """What is measured: a model's size, the batch and the precision."""

    size: str
    precision: str
    compile: bool
    batch: int
    sequence: int

    @classmethod
    def parse(cls, text: str, batch: int, sequence: int) -> Setting:
        """Read ``SIZE/PRECISION[/compile][@BATCHxSEQUENCE]``; ValueError says what is wrong."""
        found = re.fullmatch(r"(\w+)/(fp32|bf16)(/compile)?(?:@(\d+)x(\d+))?", text)
        if found is None or found[1] not in SIZES:
            raise ValueError(f"'{text}' is no setting such as 30m/fp32; sizes: {', '.join(SIZES)}")
        shape = (int(found[4]), int(found[5])) if found[4] else (batch, sequence)
        return cls(found[1], found[2], bool(found[3]), *shape)

    @property
    def parameters(self) -> int:
        """Of a GPT-2 shape: matrices, biases, norms and both embeddings."""
        of = SIZES[self.size]
        width = of["width"]
        block = 12 * width**2 + 13 * width
        return of["layers"] * block + (of["vocab"] + of["context"] + 2) * width


def main() -> None:
    options = _options()
    rounds, steps, warmup = options.rounds, options.steps, options.warmup
    try:
        settings = {text: Setting.parse(text, *options.batch) for text in options.settings}
    except ValueError as error:
        sys.exit(f"train_vs_peers: {error}")
    pythons, missing = _environments(options.envs, options.peers)
    helper = pythons.get(MEGALITH)
    if helper is None:
        sys.exit(f"train_vs_peers: {missing.get(MEGALITH, 'megalith must be among --peers')}")
    measured = json.loads(_output([helper, HERE / "peers/peaks.py"], HERE))
    results: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "machine": {**_machine(), "capability": measured["capability"]},
        "peaks": measured["peaks"],
        "versions": {},
        "settings": {},
    }
    with tempfile.TemporaryDirectory(prefix="train_vs_peers-") as scratch:
        for name, setting in settings.items():
            described = {
                **asdict(setting),
                **SIZES[setting.size],
                "parameters": setting.parameters,
                "steps": steps,
                "warmup": warmup,
                "rounds": rounds,
                "peers": options.peers,
            }
            results["settings"][name] = described
            estimate = _estimate(setting, measured["peaks"])
            if estimate > options.longest:
                described["skipped"] = (
                    f"at the measured {setting.precision} matmul peak an update takes about "
                    f"{estimate:.0f} s; smaller batches can be given as {name}@1x128"
                )
                continue
            job = _job(setting, steps, Path(scratch), helper)
            described["runs"] = _rounds(options.peers, pythons, missing, job, rounds, name)
            described["disagreement"] = disagreement(described["runs"], setting.precision)
            for run in described["runs"]:
                results["versions"] |= run.pop("versions", {})
    text = markdown(results)
    print(text)
    options.results.mkdir(parents=True, exist_ok=True)
    (options.results / f"{options.name}.json").write_text(json.dumps(results, indent=1) + "\n")
    (options.results / f"{options.name}.md").write_text(text)
    if any(setting.get("disagreement") for setting in results["settings"].values()):
        sys.exit("train_vs_peers: the losses do not agree, so the comparison does not count")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("settings", nargs="*", metavar="SETTING", help=f"default: {DEFAULT}")
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--rounds", type=int, default=3, help="default: 3")
    parser.add_argument("--steps", type=int, default=8, help="updates of a run; default: 8")
    parser.add_argument("--warmup", type=int, default=2, help="of these, not counted; default: 2")
    parser.add_argument("--compile", action="store_true", help="also each setting compiled")
    parser.add_argument("--longest", type=float, default=LONGEST, help="seconds of one update")
    parser.add_argument("--envs", type=Path, default=HERE / "envs", help="folder of environments")
    parser.add_argument("--results", type=Path, default=HERE / "results", help="folder")
    parser.add_argument("--quick", action="store_true", help="a tiny model, one round")
    options = parser.parse_args()
    options.batch, options.name = (4, 512), "train_vs_peers"
    if options.quick:
        options.settings = options.settings or ["tiny/fp32", "tiny/bf16"]
        options.rounds, options.steps, options.batch = 1, 4, (2, 64)
        options.name = "train_vs_peers-quick"
    options.settings = options.settings or list(DEFAULT)
    if options.compile:
        options.settings += [f"{t}/compile" for t in options.settings if "/compile" not in t]
    if not 0 <= options.warmup < options.steps:
        parser.error("--warmup must leave updates to measure")
    return options


def _environments(folder: Path, peers: list[str]) -> tuple[dict[str, Path], dict[str, str]]:
    """Each peer's Python, or the reason why there is none."""
    pythons: dict[str, Path] = {}
    missing: dict[str, str] = {}
    for peer in peers:
        try:
            owner = MEGALITH if peer == SELECTIVE else peer
            pythons[peer] = environment(folder, owner, PEERS[peer])
        except NotInstalled as error:
            missing[peer] = f"cannot be installed: {error}"
    return pythons, missing


def _estimate(setting: Setting, peaks: dict[str, float]) -> float:
    """Seconds of an update that runs at the matmul peak."""
    of = SIZES[setting.size]
    flops = train_flops(of["layers"], of["width"], of["vocab"], setting.sequence)
    return flops * setting.batch * setting.sequence / peaks[setting.precision]


def _job(setting: Setting, steps: int, scratch: Path, python: Path) -> dict[str, Any]:
    """The job of every peer in this setting; writes the shared inputs where they are missing."""
    shape = {**SIZES[setting.size], "batch": setting.batch, "sequence": setting.sequence}
    folder = scratch / f"{setting.size}-{setting.batch}x{setting.sequence}"
    if not (folder / "tokens.npy").exists():
        given = json.dumps({**shape, "steps": steps})
        _output([python, HERE / "peers/inputs.py", folder, given], HERE)
    return {
        **shape,
        **OPTIMIZER,
        "weights": str(folder),
        "tokens": str(folder / "tokens.npy"),
        "steps": steps,
        "precision": setting.precision,
        "compile": setting.compile,
    }


def _rounds(
    peers: list[str],
    pythons: dict[str, Path],
    missing: dict[str, str],
    job: dict[str, Any],
    rounds: int,
    name: str,
) -> list[dict[str, Any]]:
    """Every peer once a round, in turn."""
    runs: list[dict[str, Any]] = []
    for number in range(rounds):
        for peer in peers:
            head = {"peer": peer, "round": number, "load": os.getloadavg()[0]}
            if peer in missing:
                runs.append({**head, "error": missing[peer]})
                continue
            print(f"{name}, round {number + 1} of {rounds}: {peer}", file=sys.stderr, flush=True)
            with tempfile.TemporaryDirectory(prefix="train_vs_peers-run-") as folder:
                file = Path(folder) / "job.json"
                checkpointing = "selective" if peer == SELECTIVE else "none"
                given = {**job, "scratch": folder, "checkpointing": checkpointing}
                file.write_text(json.dumps(given))
                script = HERE / "peers" / f"{SCRIPTS.get(peer, peer)}.py"
                try:
                    printed = _output([pythons[peer], script, file], Path(folder))
                except subprocess.CalledProcessError as error:
                    last = (error.stderr.strip().splitlines() or ["no message"])[-1]
                    runs.append({**head, "error": f"failed: {last}"})
                    continue
            runs.append({**head, **json.loads(printed.strip().splitlines()[-1])})
    return runs


def _output(command: list[Any], folder: Path) -> str:
    """What a command prints; it sees no hub, and uses as many threads as there are cores."""
    cores = len(os.sched_getaffinity(0))
    variables = {
        **os.environ,
        "OMP_NUM_THREADS": str(cores),
        "HF_HUB_OFFLINE": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    done = subprocess.run(
        [str(part) for part in command],
        cwd=folder,
        env=variables,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def _machine() -> dict[str, Any]:
    names = re.findall(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.M)
    return {
        "processor": names[0] if names else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()}, Python {platform.python_version()}",
    }


if __name__ == "__main__":
    main()
