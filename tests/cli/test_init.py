"""`paceline init`: a project that trains as it is, with settings that say the same in both formats."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from tests.cli.made_runs import Command

from paceline.cli.project_template import project_files
from paceline.core import config
from paceline.train.settings.train_config import TrainConfig


@pytest.fixture
def paceline(capsys):
    return Command(capsys)


def test_a_project_trains_as_it_is(tmp_path, monkeypatch, paceline):
    monkeypatch.chdir(tmp_path)
    code, out, err = paceline("init", "my project")
    assert (code, err) == (0, "")
    assert out.endswith("next: cd 'my project' && paceline train train.py\n")
    project = tmp_path / "my project"
    assert sorted(os.listdir(project)) == [
        ".gitignore",
        "README.md",
        "config.json",
        "config.toml",
        "train.py",
    ]
    toml, plain = (config.load(TrainConfig, project / name) for name in ("config.toml", "config.json"))
    assert toml == plain
    assert toml.name == "my-project"
    command = [sys.executable, "-m", "paceline", "train", "train.py", "--config", "config.json"]
    done = subprocess.run(
        [*command, "--workers", "1", "--set", "max_steps=24", "--set", "warmup_steps=2"],
        cwd=project, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("accuracy ")
    monkeypatch.chdir(project)
    code, out, _ = paceline("ls", "--json")
    (run,) = json.loads(out)
    assert (run["state"], run["step"]) == ("finished", 24)
    assert run["path"].endswith("-my-project")


def test_files_that_are_there_are_kept(tmp_path, paceline):
    (tmp_path / "train.py").write_text("mine")
    code, _, err = paceline("init", tmp_path)
    assert code == 2
    assert f"{tmp_path} has train.py already" in err
    assert os.listdir(tmp_path) == ["train.py"]
    assert paceline("init", tmp_path, "--force", "--name", "other")[0] == 0
    assert (tmp_path / "train.py").read_text() != "mine"
    assert config.load(TrainConfig, tmp_path / "config.toml").name == "other"


def test_here_is_the_default(tmp_path, monkeypatch, paceline):
    monkeypatch.chdir(tmp_path)
    code, out, _ = paceline("init", "--name", "spirals")
    assert code == 0
    assert out.endswith("next: paceline train train.py\n")
    assert (tmp_path / "README.md").read_text().startswith("# spirals\n")


def test_commands_of_the_readme_exist():
    from paceline.cli.main import Commands

    lines = project_files("x")["README.md"].splitlines()
    named = {line.split()[1] for line in lines if line.strip().startswith("paceline ")}
    assert named == {"train", "monitor", "logs", "ls", "report"}
    assert named <= Commands.table.keys()
