"""The command line as a user meets it: quick, one line per error, exit codes that tell apart."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import typer.main
from typer.testing import CliRunner

import megalith
from megalith import cli
from megalith.cli import frame, runs
from megalith.core.errors import TrainingError
from megalith.recipe import load, parse

ROOT = Path(__file__).parents[1]
DIGITS = str(ROOT / "recipes" / "resnet-digits.toml")
VERBS = [
    ["plan"],
    ["verify"],
    ["train"],
    ["generate"],
    ["export"],
    ["report"],
    ["doctor"],
    ["recipe", "show"],
    ["recipe", "check"],
    ["recipe", "explain"],
    ["recipe", "schema"],
    ["data", "prepare"],
    ["checkpoint", "ls"],
    ["checkpoint", "verify"],
    ["checkpoint", "convert"],
    ["checkpoint", "consolidate"],
]


def run(*words: str):
    return CliRunner().invoke(cli.app, list(words))


def test_version_help_and_recipe_verbs_do_not_import_torch() -> None:
    code = (
        "import sys\n"
        "from megalith.cli import app\n"
        "for words in (['--version'], ['--help'], ['recipe', 'explain', 'train']):\n"
        "    try: app(words)\n"
        "    except SystemExit as error: assert error.code == 0, error.code\n"
        "assert 'torch' not in sys.modules, 'torch was imported'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"megalith {megalith.__version__}" in done.stdout


def test_every_verb_has_help_with_examples_and_the_list_is_complete() -> None:
    group = typer.main.get_command(cli.app)
    named = []
    for name, command in group.commands.items():  # type: ignore[attr-defined]
        inner = getattr(command, "commands", None)
        named += [[name, one] for one in inner] if inner else [[name]]
    assert sorted(named) == sorted(VERBS)
    for verb in VERBS:
        result = run(*verb, "--help")
        assert result.exit_code == 0
        assert "Examples" in result.output, verb
        assert f"megalith {' '.join(verb)}" in result.output, verb


ERRORS = [
    (["recipe", "check", "nowhere.toml"], "error: nowhere.toml: no such recipe"),
    (["recipe", "show", DIGITS, "train.stepz=3"], "train.stepz: no such field; did you mean"),
    (["recipe", "explain", "train.stepz"], "error: train.stepz: no such field; did you mean"),
    (["recipe", "check", DIGITS, "train.device=tpux"], "error: train.device: 'tpux' is no device"),
    (["recipe", "check", DIGITS, "data.source=idx", "data.folder=no"], "error: data.folder: 'no'"),
    (["data", "prepare", DIGITS, "optim.schedule=cosin"], "did you mean 'cosine'?"),
    (["train", DIGITS, "train.steps=0"], "error: train.steps: must be a whole number > 0, not 0"),
    (["report", "nowhere"], "error: nowhere: holds no run"),
    (["checkpoint", "ls", "nowhere"], "error: nowhere: holds no run"),
    (["export", "nowhere", "out"], "error: nowhere: holds no run"),
    (["generate", "nowhere"], "error: nowhere: no such folder"),
    (["generate", "nowhere", "--temperature", "-1"], "error: temperature"),
]


@pytest.mark.parametrize(("words", "line"), ERRORS, ids=[" ".join(w[:2]) for w, _ in ERRORS])
def test_an_error_is_one_line_on_stderr_and_exit_code_2(words, line, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = run(*words)
    assert result.exit_code == 2
    assert line in result.stderr
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""
    assert not (tmp_path / "runs").exists(), "refused before any work"


@pytest.mark.parametrize("place", [0, 2, 3])
def test_debug_shows_the_traceback_wherever_it_stands(place: int) -> None:
    words = ["recipe", "explain", "nothing"]
    words.insert(place, "--debug")
    result = run(*words)
    assert result.exit_code == 2
    assert "Traceback" in result.stderr
    assert result.stderr.rstrip().splitlines()[-1].startswith("error: nothing: no such field")


FAULTS = [
    (RuntimeError("two\nlines"), 1, "error: unexpected RuntimeError: two lines (add --debug"),
    (TrainingError("train: broke down"), 2, "error: train: broke down"),
    (KeyboardInterrupt(), 130, "interrupted"),
]


@pytest.mark.parametrize(("fault", "code", "line"), FAULTS, ids=[str(c) for _, c, _ in FAULTS])
def test_faults_inside_a_verb_end_in_one_line_and_their_code(
    fault, code, line, monkeypatch
) -> None:
    def breaks(*args: object, **kwargs: object) -> None:
        raise fault

    monkeypatch.setattr(megalith, "train", breaks)
    result = run("train", DIGITS)
    assert result.exit_code == code
    assert result.stderr.startswith(line)
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("words", [["trian"], ["train"], ["train", DIGITS, "--resum"]])
def test_a_mistyped_command_line_is_explained(words) -> None:
    result = run(*words)
    assert result.exit_code == 2
    assert "Traceback" not in result.output
    assert "Usage" in result.stderr


def test_show_prints_a_recipe_that_reads_back(tmp_path) -> None:
    result = run("recipe", "show", DIGITS, "train.steps=70", "--comments")
    assert result.exit_code == 0
    assert parse(tomllib.loads(result.stdout)) == load(DIGITS, "train.steps=70")
    assert run("recipe", "show").stdout.startswith("[model]")


def test_schema_prints_json() -> None:
    assert json.loads(run("recipe", "schema").stdout)["title"] == "Recipe"


def test_doctor_prints_rows_as_json(monkeypatch) -> None:
    from megalith.core import doctor

    rows = [doctor.Row("a", True, "fine"), doctor.Row("b", False, "gone", "pip install 'x[y]'")]
    monkeypatch.setattr(doctor, "examine", lambda: iter(rows))
    result = run("doctor", "--json")
    assert result.exit_code == 0
    assert [row["remedy"] for row in json.loads(result.stdout)] == ["", "pip install 'x[y]'"]
    assert "pip install 'x[y]'" in run("doctor").stdout
    rows.append(doctor.Row("c", False, "gone", "get it", needed=True))
    assert run("doctor").exit_code == 1, "something needed is missing"


def test_the_defaults_of_generate_are_those_of_sampling() -> None:
    from megalith.generate import Sampling

    given = inspect.signature(runs.generate).parameters
    for name, parameter in inspect.signature(Sampling).parameters.items():
        assert (given[name].default or None) == (parameter.default or None), name


def test_from_recipe_to_text_and_weights(tmp_path, monkeypatch) -> None:
    """Every verb on one small run: prepare, train, list, generate, report, export, resume."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").mkdir()
    for i in range(30):
        (tmp_path / "text" / f"{i}.txt").write_text(f"line {i} of a small text. " * 20)
    (tmp_path / "r.toml").write_text(
        '[model]\nlayers = 1\nwidth = 32\nheads = 2\ncontext = 32\n[data]\nfiles = ["text"]\n'
        "sequence = 32\nvalidation = 0.2\n[train]\nsteps = 4\nglobal_batch = 4\n"
        '[evaluate]\nevery = 2\n[checkpoint]\nevery = 2\n[run]\ndir = "runs/r"\n'
    )

    def works(*words: str) -> str:
        result = run(*words)
        assert result.exit_code == 0, result.output
        return result.stdout

    assert "nothing wrong" in works("recipe", "check", "r.toml")
    assert "vocab" in works("data", "prepare", "r.toml")
    assert "done at update 4" in works("train", "r.toml")
    refused = run("train", "r.toml")
    assert refused.exit_code == 2
    assert "--resume" in refused.stderr
    assert "done at update 6" in works("train", "r.toml", "train.steps=6", "--resume")
    assert "step-00000006" in works("checkpoint", "ls", "runs/r")
    text = works("generate", "runs/r", "--prompt", "line ", "--max-tokens", "8", "--seed", "3")
    assert text.startswith("line ")
    assert text == works(
        "generate", "runs/r", "--prompt", "line ", "--max-tokens", "8", "--seed", "3"
    )
    assert works("report", "runs/r").strip().endswith("report.html")
    works("export", "runs/r", "out")
    assert {"config.json", "model.safetensors"} <= {path.name for path in Path("out").iterdir()}
    again = works("generate", "out", "--prompt", "line ", "--max-tokens", "8", "--seed", "3")
    assert again == text, "the exported model is the same model"
    assert "done at update 4" in works("train", "r.toml", "--overwrite")


def test_a_resnet_run_is_exported_with_torchvisions_names(tmp_path, monkeypatch) -> None:
    from safetensors import safe_open

    monkeypatch.chdir(tmp_path)
    result = run("train", DIGITS, "train.steps=2", "optim.warmup=1", "run.dir=runs/d")
    assert result.exit_code == 0, result.output
    assert run("export", "runs/d", "out").exit_code == 0
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert {"conv1.weight", "layer1.0.bn1.running_mean", "fc.weight"} <= set(file.keys())
    refused = run("generate", "runs/d")
    assert refused.exit_code == 2


def test_what_a_model_writes_cannot_steer_the_terminal() -> None:
    assert frame.printable("a\x1b[31m\r\nb\té") == "a�[31m�\nb\té"
