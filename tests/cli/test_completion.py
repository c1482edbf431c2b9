"""Shell completion: commands, options and runs, in the shells that have a script."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest
from tests.cli.made_runs import Command


@pytest.fixture
def paceline(capsys):
    return Command(capsys)


def completed(folder, *words):
    environment = {
        **os.environ,
        "_PACELINE_COMPLETE": "complete_bash",
        "COMP_WORDS": " ".join(words),
        "COMP_CWORD": str(len(words) - 1),
    }
    done = subprocess.run(
        [sys.executable, "-m", "paceline"],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["paceline", "mon"], ["monitor"]),
        (["paceline", "train", "--num"], ["--num-gpus", "--num-nodes"]),
        (["paceline", "checkpoint", "ver"], ["verify"]),
        (["paceline", "monitor", "runs/2"], ["runs/20250302-train", "runs/20250301-train"]),
    ],
)
def test_words_are_completed(tmp_path, words, expected):
    for name in ("20250301-train", "20250302-train", "other"):
        (tmp_path / "runs" / name).mkdir(parents=True)
    assert completed(tmp_path, *words) == expected


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_has_a_script(paceline, shell, tmp_path):
    code, out, _ = paceline("completion", shell)
    assert code == 0
    assert "_PACELINE_COMPLETE" in out
    if shutil.which(shell):
        file = tmp_path / "script"
        file.write_text(out)
        subprocess.run([shell, "-n", str(file)], check=True, timeout=30)


def test_the_users_shell_is_the_default(paceline, monkeypatch):
    monkeypatch.setenv("SHELL", "/usr/bin/fish")
    assert "commandline -cp" in paceline("completion")[1]
    monkeypatch.setenv("SHELL", "/bin/tcsh")
    assert paceline("completion")[0] == 2
    monkeypatch.delenv("SHELL")
    code, _, err = paceline("completion")
    assert code == 2
    assert "$SHELL names no shell" in err
