"""Bad input to the SLURM engine, at a real cluster: one message with what to try, and nothing is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.clusters.slurm.slurm_lab import ENVIRONMENT, SlurmLab

PACELINE = (sys.executable, "-m", "paceline")
SCRIPT = str(Path(__file__).with_name("training_script.py"))

MISTAKES = {
    "no such partition": (["partition=nope"], "there is no partition 'nope'", "all, urgent, short"),
    "no such node": (["nodelist=n9"], "there is no node 'n9'", "sinfo -N"),
    "time limit": (["partition=short", "time=10"], "time='10' is more than the partition allows", "sinfo"),
    "not a time": (["time=soon"], "time='soon' is no time", "2:00:00"),
    "too many GPUs": (["gres=gpu:9"], "no node of the partition has what is asked for", "fewer GPUs"),
    "no such resource": (["gres=tpu:1"], "the cluster has no such resource", "sinfo"),
    "no such feature": (["constraint=fast"], "no node has the feature 'fast'", "sinfo"),
    "no such reservation": (["reservation=mine"], "there is no reservation 'mine'", "scontrol"),
    "no such option": (["colour=red"], "does not know one of the options", "man sbatch"),
    "not an option": (["a b=1"], "is not the long name of an option", "qos=high"),
}


def _run(cluster, folder: Path, *words: str, **environment: str) -> tuple[int, str]:
    process = cluster.start(
        [*PACELINE, *words],
        env={**ENVIRONMENT, **environment},
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    printed, _ = process.communicate(timeout=60)
    return process.returncode, printed


def _options(texts: list[str]) -> list[str]:
    return [word for text in texts for word in ("--slurm", text)]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_request_that_slurm_refuses_is_one_message(cluster, tmp_path, mistake):
    texts, problem, remedy = MISTAKES[mistake]
    code, printed = _run(cluster, tmp_path, "submit", SCRIPT, "--engine", "slurm", *_options(texts), "gate")
    assert code not in (0, 75), printed
    assert problem in printed
    assert remedy in printed
    assert printed.count("try:") == 1
    assert "Traceback" not in printed
    assert not cluster.run(["squeue", "--noheader"])
    assert os.listdir(tmp_path) == []


def test_a_run_in_the_foreground_is_refused_before_anything_starts(cluster, tmp_path):
    (tmp_path / "gate").touch()
    words = [
        "train",
        SCRIPT,
        "--run-dir",
        "run",
        "--engine",
        "slurm",
        "--nodes",
        "2",
        "--slurm",
        "partition=nope",
    ]
    code, printed = _run(cluster, tmp_path, *words, "gate")
    assert code == 2, printed
    assert "there is no partition 'nope'" in printed
    assert "Traceback" not in printed
    assert not SlurmLab(cluster, tmp_path).left_running()


def test_a_controller_that_is_away_is_named(cluster, tmp_path):
    os.kill(int((cluster.folder / "slurmctld.pid").read_text()), signal.SIGSTOP)
    try:
        code, printed = _run(cluster, tmp_path, "submit", SCRIPT, "--engine", "slurm", "gate")
    finally:
        os.kill(int((cluster.folder / "slurmctld.pid").read_text()), signal.SIGCONT)
    assert code == 1
    assert "cannot reach SLURM's controller" in printed
    assert "scontrol ping" in printed


def test_more_nodes_than_the_allocation_has(cluster, tmp_path):
    words = ["train", SCRIPT, "--engine", "slurm", "--nodes", "3", "--run-dir", "run", "gate"]
    process = cluster.start(
        ["salloc", "--quiet", "--nodes=2", *PACELINE, *words],
        env=ENVIRONMENT,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == 2, printed
    assert "3 nodes are asked for, and the allocation" in printed


def test_a_machine_without_slurm_is_told_where_to_start(tmp_path):
    done = subprocess.run(
        [*PACELINE, "submit", SCRIPT, "--engine", "slurm", "gate"],
        env={**ENVIRONMENT, "PATH": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "sbatch is not installed here" in done.stderr
    assert "login node" in done.stderr
