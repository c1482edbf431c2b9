"""Parts of the SLURM engine that need no cluster: variables, states, the shared folder, signals, tasks."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.waiting import wait_for

import paceline
from paceline.core.atomic_file import replace_file
from paceline.engines.engine import LogLine
from paceline.engines.slurm import batch_jobs, slurm_commands, step_tasks
from paceline.engines.slurm.allocation import Allocation, StepTask
from paceline.engines.slurm.job_agents import end_abandoned, status_of
from paceline.engines.slurm.shared_folder import SharedFolder, abandoned, folder_for
from paceline.engines.slurm.slurm_commands import JobRecord
from paceline.engines.slurm.step_command import explain_step
from paceline.engines.slurm.step_tasks import first_task, sign_of_life, wait_for_first_task

SALLOC = {
    "SLURM_JOB_ID": "17",
    "SLURM_JOB_NODELIST": "n[1-3]",
    "SLURM_JOB_NUM_NODES": "3",
    "SLURM_JOB_CPUS_PER_NODE": "4(x2),8",
}
SRUN = {**SALLOC, "SLURM_STEP_ID": "0", "SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "6"}
TASK = StepTask("17", "0", 1, 2)


def test_an_allocation_is_read_from_its_variables():
    found = Allocation.from_environment({**SALLOC, "SLURM_STEP_TASKS_PER_NODE": "2(x3)"})
    assert found == Allocation("17", "n[1-3]", 3, (4, 4, 8), 2)
    assert [found.cpus_of(index) for index in range(4)] == [4, 4, 8, 0]
    assert Allocation.from_environment({"SLURM_JOB_ID": "17"}) is None


def test_an_allocation_says_how_many_nodes_and_workers_there_are(monkeypatch):
    for name, value in {**SALLOC, "SLURM_NTASKS_PER_NODE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert (paceline.Slurm().nodes, paceline.Slurm().workers_per_node) == (3, 2)
    assert (paceline.Slurm(nodes=1, workers_per_node=4).workers_per_node) == 4


def test_tasks_of_one_srun_are_told_apart():
    assert StepTask.from_environment(SRUN) == StepTask("17", "0", 2, 6)
    assert StepTask.from_environment({**SRUN, "SLURM_STEP_NUM_TASKS": "1"}) is None
    assert StepTask.from_environment(SALLOC) is None


@pytest.mark.parametrize(
    ("state", "reason", "status", "expected"),
    [
        ("PENDING", "Resources", 0, ("pending", "", None, "Resources")),
        ("RUNNING", "None", 0, ("running", "n1", None, "")),
        ("COMPLETED", "None", 0, ("ended", "n1", 0, "")),
        ("FAILED", "NonZeroExitCode", 7 << 8, ("ended", "n1", 7, "")),
        ("CANCELLED", "None", 15, ("ended", "n1", -15, "SLURM says CANCELLED")),
        ("PREEMPTED", "None", 15, ("ended", "n1", -15, "SLURM says PREEMPTED")),
        ("NODE_FAIL", "None", 1, ("lost", "n1", None, "SLURM says NODE_FAIL")),
    ],
)
def test_states_of_a_job_are_states_of_its_agent(state, reason, status, expected):
    found = status_of(3, JobRecord("17", "0", state, "n1", reason, status))
    assert (found.node, found.state, found.host, found.code, found.reason) == (3, *expected)


@pytest.mark.parametrize(
    ("state", "status", "expected"),
    [
        ("PENDING", 0, "pending"),
        ("COMPLETING", 0, "running"),
        ("COMPLETED", 0, "succeeded"),
        ("FAILED", 75 << 8, "stopped"),
        ("FAILED", 1 << 8, "failed"),
        ("CANCELLED", 15, "stopped"),
        ("NODE_FAIL", 0, "lost"),
    ],
)
def test_states_of_a_job_are_states_of_a_run(state, status, expected):
    assert batch_jobs.status_of(JobRecord("17", "", state, "n1", "None", status)).state == expected


def test_an_array_is_what_its_least_finished_task_is():
    states = ["COMPLETED", "FAILED", "RUNNING", "PENDING"]
    found = [batch_jobs.status_of(JobRecord("17", "0", state, "", "None", 0)) for state in states]
    assert batch_jobs.combined(found).state == "running"
    assert batch_jobs.combined(found[:2]).state == "failed"
    assert batch_jobs.combined(found[:1]).state == "succeeded"


def test_a_refusal_that_is_not_known_is_passed_on():
    error = slurm_commands.refusal("sbatch", "sbatch: error: the moon is full", {})
    assert "the moon is full" in error.message


def test_a_limit_of_an_account_is_explained():
    said = (
        "sbatch: error: QOSMaxGRESPerUser\nsbatch: error: Batch job submission failed: Job violates "
        "accounting/QOS policy (job submit limit, user's size and/or time limits)"
    )
    error = slurm_commands.refusal("sbatch", said, {})
    assert "a limit of your account is reached" in error.message
    assert "fewer nodes" in error.remedy


@pytest.mark.parametrize(
    ("code", "line", "state", "words"),
    [
        (0, "srun: error: Node failure on n4", "lost", "SLURM does not reach it"),
        (1, "srun: error: Task launch failed: Communication connection failure", "lost", "does not reach"),
        (1, "srun: error: Requested node configuration is not available", "lost", "any more"),
        (1, "srun: error: Unable to create step: Invalid generic resource (gres)", "ended", "not the GPUs"),
        (137, "srun: error: n3: task 0: Killed", "ended", "signal 9"),
        (137, "slurmstepd: error: *** STEP 2.1 ON n3 CANCELLED AT ... ***", "ended", "cancelled"),
        (1, "python: No module named paceline", "ended", "no Paceline"),
        (0, "the job has ended", "ended", "the job has ended"),
    ],
)
def test_why_a_step_ended(code, line, state, words):
    found = explain_step("n3", code, [line], False)
    assert found.state == state
    assert words in found.reason


def test_the_secret_is_in_a_file_for_its_owner_and_goes_with_the_folder(tmp_path):
    path = folder_for(str(tmp_path), "runs/my run", ("10.0.0.5", 41000))
    folder = SharedFolder(path, b"\x01" * 32)
    assert path == str(tmp_path / ".paceline-slurm" / "my-run-10.0.0.5-41000")
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o700
    assert stat.S_IMODE(os.stat(f"{path}/token").st_mode) == 0o600
    assert Path(path, "token").read_text().strip() == "01" * 32
    folder.remove()
    assert os.listdir(tmp_path) == []


def test_the_folder_above_goes_with_the_last_run(tmp_path):
    first, second = (SharedFolder(folder_for(str(tmp_path), name, ("n1", 1)), b"s") for name in "ab")
    first.remove()
    assert Path(second.path, "token").exists()
    second.remove()
    second.remove()  # what is gone already is no error
    assert os.listdir(tmp_path) == []


# Job 17 is of the first test process, job 18 of the next one.
STAND_IN_QUEUE = """#!/bin/sh
case "$0" in
  */sbatch) cat > /dev/null; case "$1" in --test-only) exit;; esac
    echo "$@" > "$HERE/arguments"
    [ -e "$HERE/asked" ] && echo 18 || echo 17; touch "$HERE/asked";;
  */squeue) echo "17|0|$STATE|||0|"; echo "17|1|COMPLETED|||0|";;
  */scancel) echo "$@" >> "$HERE/cancelled";;
esac
"""
REQUEST = {"script": "#!/bin/sh", "options": {"partition": "gpu", "exclusive": ""}, "nodes": 1}
ASKS_AND_IS_KILLED = """
import os, signal, sys
from paceline.engines.slurm.job_agents import JobAgents
from paceline.engines.slurm.shared_folder import SharedFolder
JobAgents("#!/bin/sh", {}, SharedFolder(sys.argv[1], b"s" * 32), 2, 1.0)
os.kill(os.getpid(), signal.SIGKILL)
"""


def killed_after_asking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str, left: Path) -> None:
    """Have a caller killed whose job 17 has this state. The queue is a stand-in here; tests/clusters/slurm
    has the real one."""
    for name in ("sbatch", "squeue", "scancel"):
        (tmp_path / name).write_text(STAND_IN_QUEUE)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("HERE", str(tmp_path))
    monkeypatch.setenv("STATE", state)
    killed = subprocess.run([sys.executable, "-c", ASKS_AND_IS_KILLED, str(left)], check=False)
    assert killed.returncode == -signal.SIGKILL


@pytest.mark.parametrize("state", ["PENDING", "RUNNING"])
def test_what_a_killed_caller_left_in_the_queue_is_taken_off_by_the_next(tmp_path, monkeypatch, state):
    left, lives, own = (Path(folder_for(str(tmp_path), name, ("n1", 1))) for name in ("left", "lives", "own"))
    killed_after_asking(tmp_path, monkeypatch, state, left)
    SharedFolder(str(lives), b"s" * 32).note_jobs(["19"])
    paceline.Slurm().submit({**REQUEST, "folder": str(own)}, b"s" * 32)
    assert [path.exists() for path in (left, lives, own)] == [state == "RUNNING", True, True]
    cancelled = tmp_path / "cancelled"
    # As arguments too, which variables of the user's shell (SBATCH_PARTITION) do not change.
    assert (tmp_path / "arguments").read_text() == "--parsable --partition=gpu --exclusive --array=0-0\n"
    # Agents that run save first.
    assert (cancelled.read_text() if cancelled.exists() else "") == ("17_0\n" if state == "PENDING" else "")


@pytest.mark.parametrize("state", ["PENDING", "RUNNING", "COMPLETED"])
def test_a_run_that_is_started_again_at_the_same_port_keeps_its_token(tmp_path, monkeypatch, state):
    """Its folder is the one that the killed caller had."""
    own = Path(folder_for(str(tmp_path), "own", ("n1", 1)))
    killed_after_asking(tmp_path, monkeypatch, state, own)
    paceline.Slurm().submit({**REQUEST, "folder": str(own)}, b"\x02" * 32)
    assert (own / "token").read_text().strip() == "02" * 32
    assert stat.S_IMODE(own.stat().st_mode) == 0o700
    assert list(abandoned(own.parent)) == []


def test_a_folder_that_has_another_caller_once_slurm_answers_is_kept(tmp_path, monkeypatch):
    own = Path(folder_for(str(tmp_path), "own", ("n1", 1)))
    killed_after_asking(tmp_path, monkeypatch, "COMPLETED", own)

    def takes_its_time(jobs: list[str]) -> list[JobRecord]:
        SharedFolder(str(own), b"s" * 32)
        return []

    monkeypatch.setattr(slurm_commands, "records", takes_its_time)
    end_abandoned(own.parent)
    assert (own / "token").exists()


def test_lines_of_logs_come_once_and_whole(tmp_path):
    folder = SharedFolder(str(tmp_path / "x"), b"s" * 32)
    log = folder.watch(2, "agent-17_0.log")
    assert list(folder.lines()) == []
    log.write_bytes(b"one\ntw")
    assert list(folder.lines()) == [LogLine(2, "one")]
    with log.open("ab") as file:
        file.write(b"o\nthree")
    assert list(folder.lines()) == [LogLine(2, "two")]
    assert list(folder.lines(whole=True)) == [LogLine(2, "three")]


def test_other_tasks_wait_for_the_end_of_the_first(tmp_path):
    over = threading.Event()

    def wait() -> None:
        wait_for_first_task(TASK, tmp_path, look_seconds=0.005)
        over.set()

    with first_task(TASK, tmp_path, 0.01):
        thread = threading.Thread(target=wait)
        thread.start()
        content = sign_of_life(TASK, tmp_path).read_bytes()
        wait_for(lambda: sign_of_life(TASK, tmp_path).read_bytes() != content)
        assert not over.is_set()
    thread.join()
    assert over.is_set()
    assert os.listdir(tmp_path) == []


def test_a_first_task_that_cannot_write_for_a_while_goes_on_writing(tmp_path, monkeypatch):
    attempts, original = threading.Semaphore(0), replace_file

    def attempt(*arguments: Any, **options: Any) -> None:
        try:
            original(*arguments, **options)
        finally:
            attempts.release()

    monkeypatch.setattr(step_tasks, "replace_file", attempt)
    file = sign_of_life(TASK, tmp_path)
    in_the_way = file.with_name(f"{file.name}.tmp")  # a folder, as which the file cannot be written

    def is_in_the_way() -> bool:
        with suppress(FileExistsError):
            in_the_way.mkdir()
        return in_the_way.is_dir()

    with first_task(TASK, tmp_path, 0.005):
        wait_for(is_in_the_way)
        content = file.read_bytes()
        while attempts.acquire(blocking=False):
            pass
        assert attempts.acquire(timeout=30)
        assert attempts.acquire(timeout=30)
        assert file.read_bytes() == content
        in_the_way.rmdir()
        wait_for(lambda: file.read_bytes() != content)


@pytest.mark.parametrize("was_seen", [False, True])
def test_a_sign_of_life_that_cannot_be_read_is_no_end_of_the_first_task(tmp_path, was_seen):
    file, unreadable = sign_of_life(TASK, tmp_path), tmp_path / "unreadable"
    file.parent.mkdir()
    unreadable.symlink_to(file)  # a link to itself, once it has that name
    has_raised = threading.Event()

    def wait() -> None:
        with pytest.raises(paceline.PeerLostError, match="has stopped"):
            wait_for_first_task(TASK, tmp_path, silence_seconds=0.3, look_seconds=0.005)
        has_raised.set()

    if was_seen:
        file.write_bytes(b"7")
    else:
        unreadable.replace(file)
    waiter = threading.Thread(target=wait)
    waiter.start()
    if was_seen:
        unreadable.replace(file)
    waiter.join()
    assert has_raised.is_set()


def test_a_first_task_that_was_killed_is_noticed(tmp_path):
    file = sign_of_life(TASK, tmp_path)
    file.parent.mkdir()
    file.write_text("7")
    with pytest.raises(paceline.PeerLostError, match=r"step 17\.0 has stopped"):
        wait_for_first_task(TASK, tmp_path, silence_seconds=0.05, look_seconds=0.005)


STAND_IN = """#!/bin/sh
case "$0" in
  */srun) env > "$HERE/environment"
    trap 'exit 143' TERM; echo $$ > "$HERE/step.pid"; while :; do sleep 0.05; done;;
  *) echo "$@" >> "$HERE/asked"; exit 1;;
esac
"""
# Not `signal.pause`: a signal that comes just before it would be waited for, for ever.
SAVES = (
    "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(75)); open(sys.argv[1], 'w')\n"
    "while True: time.sleep(0.02)"
)


def test_a_command_of_slurm_is_not_ended_by_the_callers_ctrl_c():
    """The terminal sends it to the caller's process group."""
    command = [sys.executable, "-c", "import os; print(os.getpgrp() == os.getpid())"]
    assert slurm_commands.call(command) == "True\n"


def test_output_files_may_have_spaces_in_their_names():
    shown = (
        "JobId=17 JobName=a StdErr=/home/my runs/a-17.log StdIn=/dev/null StdOut=/home/my runs/a-17.log "
        "Power=\nJobId=18 JobName=b StdIn=/dev/null StdOut=/home/b-18.log\n"
    )
    assert batch_jobs.output_files(shown) == ["/home/my runs/a-17.log", "/home/b-18.log"]


STAND_IN_SCONTROL = """#!/bin/sh
[ -e "$HERE/forgotten" ] && { echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1; }
echo "JobId=17 StdIn=/dev/null StdOut=$HERE/a 17.log Power="
"""


def test_the_log_of_a_job_that_slurm_has_forgotten_is_still_read(tmp_path, monkeypatch):
    (tmp_path / "scontrol").write_text(STAND_IN_SCONTROL)
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("HERE", str(tmp_path))
    read = batch_jobs.log_reader("17")
    assert read() == {}  # it has not begun
    log = tmp_path / "a 17.log"
    log.write_text("one\n")
    assert read() == {str(log): "one\n"}
    (tmp_path / "forgotten").touch()
    log.write_text("one\ntwo\n")
    assert read() == {str(log): "one\ntwo\n"}
    assert batch_jobs.log_reader("17")() == {}


@pytest.mark.parametrize("via", ["SIGTERM", "SIGUSR2", "SIGHUP", "step", "person"])
def test_only_a_job_that_slurm_signalled_is_queued_again(tmp_path, via):
    """srun and scontrol are stand-ins here; tests/clusters/slurm has the real ones."""
    for name in ("srun", "scontrol"):
        (tmp_path / name).write_text(STAND_IN)
        (tmp_path / name).chmod(0o755)
    environment = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "HERE": str(tmp_path),
        "SLURM_ARRAY_JOB_ID": "17",
        "SLURM_GPUS": "8",  # of all nodes of the job: no step on one of them gets so many
    }
    main = subprocess.Popen(
        [sys.executable, "-m", "paceline.engines.slurm.requeue_on_signal", sys.executable, "-c", SAVES,
         str(tmp_path / "begun")],
        env={**os.environ, **environment, "SLURM_ARRAY_TASK_ID": "3", "SLURM_JOB_ID": "20"},
        stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    step = tmp_path / "step.pid"
    wait_for(lambda: (tmp_path / "begun").exists() and step.exists() and step.read_text().strip())
    if via == "person":
        (command,) = [one for one in psutil.Process(main.pid).children() if SAVES in one.cmdline()]
        command.terminate()
    elif via == "step":
        os.kill(int(step.read_text()), signal.SIGTERM)
    else:  # to the batch shell
        main.send_signal(signal.Signals[via])
    _, said = main.communicate(timeout=30)
    assert main.returncode == 75
    assert "SLURM_GPUS" not in (tmp_path / "environment").read_text()
    asked = tmp_path / "asked"
    assert (asked.read_text() if asked.exists() else "") == ("" if via == "person" else "requeue 17_3\n")
    assert ("is not queued again" in said) == (via != "person")
