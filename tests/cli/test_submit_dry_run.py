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


@pytest.mark.parametrize("engine", ["slurm", "kubernetes", "ssh"])
@pytest.mark.parametrize(
    ("file", "further", "folder"),
    [
        ('run_dir = "runs/mine"\nresume = "auto"\n', "", "runs/mine"),
        ('run_dir = "runs/mine"\n', "--run-dir runs/given", "runs/given"),
        ('batch_size = 8\ncheckpoint_dir = "runs/mine"\n', "", "runs/mine"),
        ("epochs = 1\n", "", None),
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
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "script.py").write_text("")
    (tmp_path / "settings.toml").write_text(file)
    words = f"submit script.py --engine {engine} --config settings.toml --dry-run {further}".split()
    if engine == "kubernetes":
        words += ["--image", "a"]
    if engine == "ssh":
        words += ["--engine-set", 'hosts=["a"]']
    code, out, err = Command(capsys)(*words)
    assert (code, err) == (0, "")
    if engine == "slurm":
        (line,) = [line for line in out.splitlines() if " -m paceline train " in line]
        command = shlex.split(line)
    elif engine == "ssh":
        command = shlex.split(out)
    else:
        (job,) = [one for one in yaml.safe_load_all(out) if one["kind"] == "Job"]
        (text,) = job["spec"]["template"]["spec"]["containers"][0]["command"][-1:]
        command = shlex.split(text)
    given = [after for word, after in itertools.pairwise(command) if word == "--run-dir"]
    if engine == "ssh":  # the queue makes the folder's name when the run begins
        assert given == ([] if folder is None else [str(tmp_path / folder)])
        return
    assert len(given) == 1
    assert given[0] == folder or (folder is None and given[0] not in ("", "runs/mine"))


@pytest.mark.parametrize("further", ["", "--run-dir runs/given"])
@pytest.mark.parametrize("where", ["file", "assignment"])
def test_a_version_to_continue_from_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    where: str,
    further: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text("")
    (tmp_path / "settings.toml").write_text("resume = 3\n" if where == "file" else "epochs = 1\n")
    words = ["submit", "script.py", "--engine", "slurm", "--config", "settings.toml", "--dry-run"]
    words += further.split()
    code, out, err = Command(capsys)(*words, *([] if where == "file" else ["--set", "resume=3"]))
    assert (code, out) == (2, "")
    assert "resume=3" in err
    assert err.count("try:") == 1


@pytest.mark.parametrize("where", ["file", "assignments"])
@pytest.mark.parametrize("kind", ["job", "statefulset", "jobset"])
def test_agents_of_a_run_with_tls_have_certificates(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    where: str,
    kind: str,
) -> None:
    """Agents read neither the settings nor the script. The paths are those of the pods."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text("")
    files = {"certificate": "/runs/own.pem", "key": "/runs/own.key", "authority": "/runs/authority.pem"}
    words = f"submit script.py --engine kubernetes --nodes 2 --image a --kind {kind} --dry-run".split()
    if where == "file":
        lines = [f"{name} = '{path}'" for name, path in files.items()]
        (tmp_path / "settings.toml").write_text("\n".join(["[fault_tolerance]", *lines, ""]))
        words += ["--config", "settings.toml"]
    else:
        words += [f"--set=fault_tolerance.{name}={path}" for name, path in files.items()]
    code, out, err = Command(capsys)(*words)
    assert (code, err) == (0, "")
    _, _, join = " ".join(out.split()).partition(" -m paceline join ")
    assert " ".join(f"--{name} {path}" for name, path in files.items()) in join
