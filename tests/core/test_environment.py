"""Where something ran, as values that a JSON file can hold."""

from __future__ import annotations

import json
import subprocess

import torch

import megalith
from megalith.core import environment


def test_the_description_is_json_and_names_versions_machine_and_device() -> None:
    told = environment.describe(torch.device("cpu"))
    assert json.loads(json.dumps(told)) == told
    assert told["megalith"] == megalith.__version__
    assert told["torch"] == torch.__version__
    assert told["device"] == "cpu"
    assert told["threads"] == torch.get_num_threads()
    assert told["memory_bytes"] > 2**28
    assert told["cores"] >= 1
    assert told["cpu"]


def test_the_revision_is_gits_and_says_whether_there_are_changes(tmp_path) -> None:
    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        command = ["git", *identity, "-C", str(tmp_path), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    assert environment.git_revision(tmp_path) is None
    git("init", "-q")
    (tmp_path / "file").write_text("1")
    git("add", "file")
    git("commit", "-q", "-m", "one")
    commit = git("rev-parse", "HEAD")
    assert environment.git_revision(tmp_path) == commit
    (tmp_path / "file").write_text("2")
    assert environment.git_revision(tmp_path) == f"{commit}+changes"
