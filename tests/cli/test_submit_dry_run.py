"""`paceline submit --dry-run > FILE`: what would be submitted, and nothing else."""

from __future__ import annotations

import itertools
import shlex
from pathlib import Path

import pytest
import yaml
from tests.cli.made_runs import Command

import paceline
from paceline.engines.batch import BatchSpec


def test_a_manifest_can_be_written_to_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No cluster is needed for it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "script.py").write_text("open('ran', 'w').close()\n")
    words = "submit script.py --engine kubernetes --nodes 2 --image a --kind job --time 2:00:00 --dry-run"
    code, out, err = Command(capsys)(*words.split(), "--", "--lr", "0.1")
    assert (code, err) == (0, "")
    job = BatchSpec(script="script.py", arguments=("--lr", "0.1"), name="script", nodes=2, time="2:00:00")
    assert out == paceline.Kubernetes(image="a", nodes=2).batch_text(job)
    assert [one["kind"] for one in yaml.safe_load_all(out)] == ["Service", "Job"]
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("engine", ["slurm", "kubernetes"])
@pytest.mark.parametrize(
    ("file", "further", "folder", "resume"),
    [
        ('run_dir = "runs/mine"\nresume = 3\n', "", "runs/mine", "3"),
        ('run_dir = "runs/mine"\n', "--run-dir runs/given", "runs/given", "auto"),
        ('batch_size = 8\ncheckpoint_dir = "runs/mine"\n', "", "runs/mine", "auto"),
        ("epochs = 1\n", "", None, "auto"),
    ],
)
def test_the_folder_of_a_file_is_that_of_the_run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    engine: str,
    file: str,
    further: str,
    folder: str | None,
    resume: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "script.py").write_text("")
    (tmp_path / "settings.toml").write_text(file)
    words = f"submit script.py --engine {engine} --config settings.toml --dry-run {further}".split()
    if engine == "kubernetes":
        words += ["--image", "a"]
    code, out, err = Command(capsys)(*words)
    assert (code, err) == (0, "")
    if engine == "slurm":
        (line,) = [line for line in out.splitlines() if " -m paceline train " in line]
        command = shlex.split(line)
    else:
        (job,) = [one for one in yaml.safe_load_all(out) if one["kind"] == "Job"]
        (text,) = job["spec"]["template"]["spec"]["containers"][0]["command"][-1:]
        command = shlex.split(text)
    # Of an option that is given twice, the last one counts.
    last = {word: after for word, after in itertools.pairwise(command) if word in ("--run-dir", "--resume")}
    assert last["--resume"] == resume
    if folder is not None:
        assert last["--run-dir"] == folder
    else:
        assert last["--run-dir"] not in ("", "runs/mine")
