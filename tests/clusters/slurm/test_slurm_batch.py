"""`paceline submit --engine slurm` and `srun paceline train` on a real SLURM cluster."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.clusters.slurm.slurm_lab import ENVIRONMENT, SlurmLab

from paceline.core import events
from paceline.testing.engine_contract.cases import ContractRun, wait_until
from paceline.testing.slurm_cluster import SlurmCluster

PACELINE = (sys.executable, "-m", "paceline")
SCRIPT = str(Path(__file__).with_name("training_script.py"))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> str:
    """Train in one process; return the hash."""
    folder = tmp_path_factory.mktemp("undisturbed")
    (folder / "gate").touch()
    command = [
        *PACELINE,
        "train",
        SCRIPT,
        "--run-dir",
        "run",
        "--set",
        "fault_tolerance.enabled=false",
        "gate",
    ]
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True, check=True
    )
    return done.stdout.split()[-1]


def handed_over(cluster: SlurmCluster, folder: Path, *options: str) -> ContractRun:
    """Hand a run over, and follow it by `paceline submit --wait`."""
    command = [*PACELINE, "submit", SCRIPT, "--engine", "slurm", "--run-dir", "run", "--wait", *options]
    with (folder / "submit.log").open("w") as log:
        process = SlurmLab(cluster, folder).start(
            [*command, str(folder / "gate")], stdout=subprocess.PIPE, stderr=log, text=True
        )
    return ContractRun(process, folder / "run", folder / "gate")


def the_job(cluster: SlurmCluster) -> str:
    return cluster.run(["squeue", "--noheader", "--partition=all", "--format=%i"]).strip()


def step_on(cluster: SlurmCluster, node: str) -> str:
    """The step of the agent on a node."""
    lines = cluster.run(["squeue", "--noheader", "--steps", "--format=%i|%j|%N"]).splitlines()
    rows = [line.strip().split("|") for line in lines]
    (step,) = [step for step, name, where in rows if where == node and name.startswith("agent-")]
    return step


def until_resumed(run: ContractRun, times: int) -> None:
    """Wait until the job has been queued again, has started again and has loaded its checkpoint."""
    wait_until(lambda: len(run.of(events.RunResumed)) == times, f"the run is resumed {times} times", 200)


@pytest.mark.timeout(600)
def test_steps_and_daemons_are_lost_the_job_is_requeued_and_preempted(cluster, tmp_path, undisturbed):
    run = handed_over(cluster, tmp_path, "--nodes", "4", "--time", "2:00:00", "--slurm", "signal=TERM@120")
    run.until_size(4)

    lab, before = SlurmLab(cluster, tmp_path), run.view
    lab.kill_process("n2", before.pids[before.hosts.index("n2")])
    run.until_size(4, after=before.generation)

    before = run.view
    cluster.run(["scancel", step_on(cluster, "n3")], check=False)
    run.until_size(3, after=before.generation)
    run.until_size(4, after=run.view.generation)

    before, progress = run.view, run.last_step
    cluster.kill_slurmd(4)
    run.until(lambda: run.last_step > progress + 2, "training goes on without the slurmd of a node")
    assert run.view == before
    cluster.start_slurmd(4)

    # The limit comes near: SLURM sends the signal, and the job is queued again once it has saved.
    job = the_job(cluster)
    minutes = int(cluster.run(["squeue", "--noheader", f"--jobs={job}", "-O", "TimeUsed"]).split(":")[0])
    cluster.run(["scontrol", "update", f"JobId={job}", f"TimeLimit={minutes + 2}"])
    run.until(lambda: bool(run.of(events.RunEnded)), "the run is told of its time limit")
    cluster.run(["scontrol", "update", f"JobId={job}", "TimeLimit=120"])
    until_resumed(run, 1)
    run.until_size(4, after=-1)

    urgent = ["sbatch", "--partition=urgent", "--nodes=4", "--exclusive", "--output=/dev/null", "--wrap=true"]
    cluster.run(urgent)
    until_resumed(run, 2)
    assert run.finish() == undisturbed
    run.check_once()
    assert [event.reason for event in run.of(events.RunEnded)] == ["SIGTERM", "SIGTERM", "finished"]
    assert not SlurmLab(cluster, tmp_path).left_running()


@pytest.mark.timeout(150)
def test_srun_trains_on_the_nodes_of_its_allocation(cluster, tmp_path, undisturbed):
    """One srun starts the command on every node: the first task trains, the others wait."""
    (tmp_path / "gate").touch()
    lab = SlurmLab(cluster, tmp_path)
    command = [
        "srun",
        "--nodes=2",
        "--ntasks-per-node=2",
        *PACELINE,
        "train",
        SCRIPT,
        "--run-dir",
        "run",
        "gate",
    ]
    process = lab.start(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    printed, _ = process.communicate(timeout=120)
    assert process.returncode == 0, printed
    assert printed.split().count("hash") == 1
    assert f"hash {undisturbed}" in printed
    run = ContractRun(process, tmp_path / "run", tmp_path / "gate")
    assert sorted(run.view.hosts) == ["n1", "n1", "n2", "n2"]
    run.check_once()
    assert not lab.left_running()


@pytest.mark.timeout(300)
def test_tasks_of_an_array_are_queued_again_each_for_itself(cluster, tmp_path):
    """SLURM's signal to the batch shells, as it comes before a time limit."""
    command = [*PACELINE, "submit", SCRIPT, "--engine", "slurm", "--name", "two", "--nodes", "1", "--wait"]
    process = SlurmLab(cluster, tmp_path).start(
        [*command, "--slurm", "array=0-1", str(tmp_path / "gate")],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    runs: list[ContractRun] = []

    def have_begun() -> bool:
        runs[:] = [ContractRun(process, folder, tmp_path / "gate") for folder in tmp_path.glob("runs/two-*")]
        return len(runs) == 2 and all(run.last_step > 2 for run in runs)

    wait_until(have_begun, "both tasks train")
    array = runs[0].folder.name.removeprefix("two-").partition("_")[0]
    assert sorted(run.folder.name for run in runs) == [f"two-{array}_0", f"two-{array}_1"]
    cluster.run(["scancel", "--signal=TERM", "--batch", array])
    for run in runs:
        until_resumed(run, 1)
    runs[0].finish()
    for run in runs:
        run.check_once()
        assert [event.reason for event in run.of(events.RunEnded)] == ["SIGTERM", "finished"]
    assert not SlurmLab(cluster, tmp_path).left_running()


@pytest.mark.timeout(150)
def test_a_run_is_handed_over_from_inside_of_an_allocation(cluster, tmp_path):
    """The job is not part of the allocation, and may be larger."""
    command = [*PACELINE, "submit", SCRIPT, "--engine", "slurm", "--nodes", "4", "--slurm", "hold=", "gate"]
    process = SlurmLab(cluster, tmp_path).start(
        ["salloc", "--quiet", "--nodes=1", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == 0, printed
    queued = ["squeue", "--noheader", "--states=PENDING", "--format=%i %D"]
    assert cluster.run(queued).split() == [printed.strip(), "4"]
    cluster.run(["scancel", printed.strip()])
    assert not SlurmLab(cluster, tmp_path).left_running()


LOSES_THE_ANSWER = """#!/bin/sh
case " $* " in *" --test-only "*|*" --version "*) exec "$SBATCH" "$@";; esac
"$SBATCH" "$@" > "$HERE/queued"
echo 'sbatch: error: Batch job submission failed: Socket timed out on send/recv operation' >&2
exit 1
"""


@pytest.mark.timeout(150)
@pytest.mark.parametrize("options", [(), ("--slurm", "array=0-1")])
def test_a_job_whose_number_is_lost_is_taken_off_the_queue(cluster, tmp_path, options):
    (tmp_path / "sbatch").write_text(LOSES_THE_ANSWER)
    (tmp_path / "sbatch").chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    environment = {**ENVIRONMENT, "PATH": path, "SBATCH": shutil.which("sbatch"), "HERE": str(tmp_path)}
    other = cluster.run(["sbatch", "--parsable", "--hold", "--output=/dev/null", "--wrap=true"]).strip()
    process = cluster.start(
        [*PACELINE, "submit", SCRIPT, "--engine", "slurm", "--slurm", "hold=", *options, "gate"],
        env=environment,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    printed, _ = process.communicate(timeout=60)
    queued = (tmp_path / "queued").read_text().strip()
    assert process.returncode == 1, printed
    assert f"job {queued} was queued all the same, and is cancelled" in printed
    assert cluster.run(["squeue", "--noheader", "--format=%i"]).split() == [other]
    cluster.run(["scancel", other])
    assert not SlurmLab(cluster, tmp_path).left_running()


@pytest.mark.timeout(150)
def test_a_run_that_was_handed_over_is_stopped_and_not_queued_again(cluster, tmp_path):
    run = handed_over(cluster, tmp_path, "--nodes", "1", "--name", "night")
    run.until_size(1)
    stop = f"import paceline; paceline.Slurm().stop_batch({the_job(cluster)!r})"
    cluster.run([sys.executable, "-c", stop], env=ENVIRONMENT)
    printed, _ = run.process.communicate(timeout=60)
    assert run.process.returncode == 75, printed
    assert "is not queued again" in printed
    assert "is saved" in printed
    assert not SlurmLab(cluster, tmp_path).left_running()
