"""Variables of the user's shell and requests of the job around a run, on a real SLURM cluster."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.clusters.slurm.slurm_lab import ENVIRONMENT, SlurmLab

from paceline.testing.engine_contract.cases import ContractRun
from paceline.testing.slurm_cluster import SlurmCluster

PACELINE = (sys.executable, "-m", "paceline")
SCRIPT = str(Path(__file__).with_name("training_script.py"))
SHELL = {
    "SBATCH_PARTITION": "nope",
    "SBATCH_TIMELIMIT": "1",
    "SBATCH_OUTPUT": "/dev/null",
    "SBATCH_WAIT": "1",
    "SBATCH_REQUEUE": "1",
    "SQUEUE_PARTITION": "urgent",
    "SCANCEL_INTERACTIVE": "1",
    "SINFO_FORMAT": "%T",
}
# Until the step that waits for signals is there.
SHOWS_STEPS = "until squeue --noheader --steps --format=%j | grep paceline-signals; do sleep 0.1; done"


def ended(cluster: SlurmCluster, folder: Path, *words: str, **shell: str) -> str:
    """Run a program on the login host to its successful end; return what it printed."""
    process = cluster.start(
        words,
        env={**ENVIRONMENT, **shell},
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    printed, _ = process.communicate(timeout=120)
    assert process.returncode == 0, printed
    return str(printed)


def check_run(cluster: SlurmCluster, folder: Path, hosts: list[str]) -> None:
    run = ContractRun(subprocess.Popen(["true"], text=True), folder / "run", folder / "gate")
    run.process.wait()
    assert sorted(run.view.hosts) == hosts
    run.check_once()
    assert not SlurmLab(cluster, folder).left_running()


@pytest.mark.timeout(150)
def test_options_win_over_variables_of_the_shell(cluster, tmp_path):
    words = ["submit", SCRIPT, "--engine", "slurm", "--nodes", "2", "--time", "2:00:00", "--name", "night"]
    words += ["--slurm", "partition=all", "--slurm", "hold=", "gate"]
    job = ended(cluster, tmp_path, *PACELINE, *words, **SHELL).strip()
    shown = cluster.run(["squeue", "--noheader", "-O", "Partition:|,TimeLimit:|,NumNodes:|,STDOUT:|"])
    assert shown.split("|")[:4] == ["all", "2:00:00", "2", f"{tmp_path}/night-%j.log"]
    # It is over for one whose shell has squeue show another partition.
    stop = f"import paceline; paceline.Slurm().stop_batch({job!r})"
    ended(cluster, tmp_path, sys.executable, "-c", stop, **SHELL)
    assert not SlurmLab(cluster, tmp_path).left_running()


@pytest.mark.timeout(150)
def test_agents_start_whatever_variables_the_shell_has(cluster, tmp_path):
    (tmp_path / "gate").touch()
    words = ["train", SCRIPT, "--run-dir", "run", "--engine", "slurm", "--nodes", "2"]
    words += ["--slurm", "partition=all", "--slurm", "time=10"]
    printed = ended(cluster, tmp_path, *PACELINE, *words, "gate", **SHELL)
    assert printed.split().count("hash") == 1
    check_run(cluster, tmp_path, ["n1", "n2"])


@pytest.mark.timeout(150)
def test_steps_have_their_own_share_of_the_gpus_of_a_job(cluster, tmp_path):
    (tmp_path / "gate").touch()
    words = ["train", SCRIPT, "--run-dir", "run", "--engine", "slurm", "--gpus-per-node", "2"]
    allocate = ["salloc", "--quiet", "--nodes=2", "--gpus=4", "--no-kill"]
    # As `sbatch --export=NONE` sets it in its job: agents would have no PYTHONPATH.
    ended(cluster, tmp_path, *allocate, *PACELINE, *words, "gate", SLURM_EXPORT_ENV="NONE")
    check_run(cluster, tmp_path, ["n1", "n1", "n2", "n2"])


@pytest.mark.timeout(60)
def test_the_step_that_waits_for_signals_needs_no_gpu(cluster, tmp_path):
    main = [sys.executable, "-m", "paceline.engines.slurm.requeue_on_signal", "sh", "-c", SHOWS_STEPS]
    printed = ended(cluster, tmp_path, "salloc", "--quiet", "--nodes=2", "--gpus=4", *main)
    assert printed.split() == ["paceline-signals"]
    assert not SlurmLab(cluster, tmp_path).left_running()
