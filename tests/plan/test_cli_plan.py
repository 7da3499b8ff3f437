"""``megalith plan`` as a user meets it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from megalith import cli

DEMO = str(Path(__file__).parents[2] / "recipes" / "gpt-stdlib.toml")


def run(*words: str):
    return CliRunner().invoke(cli.app, ["plan", DEMO, *words])


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_the_demo_on_this_machine_fits() -> None:
    result = run()
    assert result.exit_code == 0, result.output
    for word in ("activations", "needed", "peak in", "400 updates", "not modelled"):
        assert word in result.output


def test_json_holds_every_rank_and_the_exit_code_says_that_it_does_not_fit() -> None:
    result = run("--on", "2xL4,memory=1.62", "layout.shard=2", "--json")
    assert result.exit_code == 1, result.output
    plain = json.loads(result.stdout)
    assert plain["fits"] is False
    assert plain["machine"]["devices"] == 2
    assert plain["ranks"][0]["moment"]["phase"] in ("forward", "backward", "update")
    assert plain["time"]["low"] < plain["time"]["seconds"] < plain["time"]["high"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--on", "8xH10"], "--on: no device 'H10'; did you mean"),
        (["--on", "8xH100", "layout.shard=16"], "layout: needs 16 devices"),
        (["--search", "--by", "speed"], "--by: 'speed' is no goal; time, money or energy"),
        (["--sweep", "train.micro_batch"], "is not FIELD=A,B"),
        (["--search", "--max-params"], "one at a time"),
        (["--calibrate", "nowhere"], "no run folder"),
    ],
)
def test_a_wrong_question_is_one_line(words: list[str], said: str) -> None:
    result = run(*words)
    assert result.exit_code == 2
    assert said in result.output
    assert result.output.count("\n") == 1
