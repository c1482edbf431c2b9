"""Passwords and keys are recorded nowhere; a run's folder is its owner's."""

from __future__ import annotations

import dataclasses
import json
import os
import stat
import subprocess
import sys
import tomllib

import pytest

import paceline
from paceline.core import config as core_config
from paceline.core.errors import ConfigError, PacelineError
from paceline.core.storage.open_storage import open_storage
from paceline.core.untrusted import REDACTED, redact_credentials, redact_secrets
from paceline.train.settings.train_config import TrainConfig, recorded_toml, to_toml
from paceline.train.state.run_folder import RunFolder


@pytest.mark.parametrize(
    ("url", "kept"),
    [
        ("ftp://bob:hunter2@host/runs", "ftp://***@host/runs"),
        ("s3://bucket/run", "s3://bucket/run"),
        ("https://host/a?X-Amz-Signature=hunter2&part=1", "https://host/a?X-Amz-Signature=***&part=1"),
        ("https://host/a?api_key=hunter2#x", "https://host/a?api_key=***#x"),
        ("simplecache::ftp://bob:hunter2@host/x", "simplecache::ftp://***@host/x"),
        (
            "could not reach ftp://bob:hunter2@host/runs: refused",
            "could not reach ftp://***@host/runs: refused",
        ),
        ("/home/bob@work/runs", "/home/bob@work/runs"),
        ("s3://AKIA:hun/hunter2@bucket/x", "s3://***@bucket/x"),
        ("ftp://bob:p@hunter2@host/x", "ftp://***@host/x"),
        ("http://host:8080/a@b", "http://host:8080/a@b"),
        ("http://[::1]:80/a@b?c=d:e@f", "http://[::1]:80/a@b?c=d:e@f"),
    ],
)
def test_credentials_are_cut_from_urls(url, kept):
    assert redact_credentials(url) == kept
    assert "hunter2" not in redact_credentials(url)


def test_arguments_that_name_a_secret_are_not_recorded():
    given = [
        "--epochs",
        "3",
        "--api-key",
        "hunter2",
        "--wandb_token=hunter2",
        "PASSWORD=hunter2",
        "--tokens",
        "5",
    ]
    given += ["--pw", "hunter2", "--header", "Authorization: Bearer hunter2", "--pass=hunter2"]
    given += ['--options={"password": "hunter2", "lr": 1}', "{'api_key':'hunter2'}", "compass=5"]
    given += ["ftp://bob:hunter2@host/x", "--secret", "--flag", "plain"]
    kept = redact_secrets(given)
    assert "hunter2" not in " ".join(kept)
    assert kept[:4] == ("--epochs", "3", "--api-key", REDACTED)
    assert kept[-2:] == ("--flag", "plain")
    assert {"compass=5", '--options={"password": "***", "lr": 1}'} < set(kept)


def test_recorded_settings_have_no_password_and_others_are_as_they_were():
    config = TrainConfig().resolved(1)
    assert recorded_toml(config) == to_toml(config)
    place = dataclasses.replace(config.checkpoint, url="ftp://bob:hunter2@host/runs")
    text = recorded_toml(dataclasses.replace(config, checkpoint=place))
    assert "hunter2" not in text
    assert "bob" not in text
    assert "ftp://***@host/runs" in text


def test_recorded_settings_have_the_size_of_an_engine_alone():
    engine = paceline.Ray(nodes=2, runtime_env={"env_vars": {"WANDB_API_KEY": "hunter2"}})
    config = TrainConfig(engine=engine).resolved(1)
    text = recorded_toml(config)
    assert "hunter2" not in text
    assert text.startswith("# engine ray: 2 nodes with 1 worker each\nworkers = 2\n")
    assert core_config.load(TrainConfig, tomllib.loads(text)) == dataclasses.replace(config, engine=None)
    assert "hunter2" in to_toml(config)  # which writes a file that reads back to an equal object


def test_messages_about_a_storage_have_no_password():
    for url in ("nosuchscheme://bob:hunter2@host/x", "ftp://bob:hunter2@127.0.0.1:1/x"):
        with pytest.raises(PacelineError) as caught:
            open_storage(url)
        assert "hunter2" not in str(caught.value)
    assert open_storage("memory://bob:hunter2@host/x").url == "memory://***@host/x"


@pytest.mark.parametrize(("access", "mode"), [("owner", 0o700), ("group", 0o750), ("all", 0o755)])
def test_a_runs_folder_is_its_owners_unless_it_is_widened(tmp_path, monkeypatch, access, mode):
    before = os.umask(0o022)
    try:
        config = TrainConfig(run_dir=str(tmp_path / "run"), run_dir_access=access).resolved(1)
        assert stat.S_IMODE(RunFolder.create(config).path.stat().st_mode) == mode
        monkeypatch.chdir(tmp_path)
        fresh = RunFolder.create(TrainConfig(run_dir_access=access).resolved(1))
        assert stat.S_IMODE(fresh.path.stat().st_mode) == mode
    finally:
        os.umask(before)
    with pytest.raises(ConfigError):
        TrainConfig(run_dir_access="everyone")  # type: ignore[arg-type]


SCRIPT = """
import paceline, torch
from torch import nn

if __name__ == "__main__":
    x = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))
    config = paceline.TrainConfig(workers=1, shards=1, global_batch=10, epochs=1, run_dir="run")
    sgd = lambda p: torch.optim.SGD(p, 0.01)
    paceline.Trainer(lambda: nn.Linear(4, 1), nn.MSELoss(), optimizer=sgd, config=config).fit((x, x[:, :1]))
"""


def test_no_file_of_a_run_has_the_secret_arguments_of_its_script(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "train.py", "--api-key", "hunter2", "--password=hunter2", "--size", "3"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    run = tmp_path / "run"
    for file in [path for path in run.rglob("*") if path.is_file()]:
        assert b"hunter2" not in file.read_bytes(), file
    recorded = json.loads((run / "command.json").read_text())
    assert recorded["arguments"] == ["--api-key", "***", "--password=***", "--size", "3"]
    assert stat.S_IMODE((run / "command.json").stat().st_mode) == 0o600
    assert stat.S_IMODE(run.stat().st_mode) == 0o700
