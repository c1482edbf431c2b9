"""What is submitted to SLURM, as text: scripts, commands, and what they never hold."""

from __future__ import annotations

import dataclasses

import pytest

import paceline
from paceline.core.version import VERSION
from paceline.engines.batch import BatchSpec
from paceline.engines.engine import AgentSpec
from paceline.engines.slurm import directives
from paceline.engines.slurm.step_command import step_command

AGENTS = AgentSpec(
    run="digits",
    address=("10.0.0.5", 41000),
    nodes=4,
    workers_per_node=2,
    gpus_per_node=2,
    folder="/home/ada/digits",
    python="/opt/py/bin/python",
    environment={"OMP_NUM_THREADS": "1", "NOTE": "two words"},
)
RUN = BatchSpec(
    script="train.py",
    arguments=("--lr", "0.1"),
    options=("--config", "my config.toml"),
    name="digits",
    nodes=4,
    workers_per_node=2,
    gpus_per_node=2,
    time="2:00:00",
    folder="/home/ada/digits",
    python="/opt/py/bin/python",
)

AGENT_SCRIPT = """\
#!/bin/bash
#SBATCH --job-name=digits
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --exclusive
#SBATCH --cpus-per-task=2
#SBATCH --gres=gpu:2
#SBATCH --no-requeue
#SBATCH --partition=gpu
#SBATCH --time=2:00:00
#SBATCH --comment="my \\"best\\" run"
#SBATCH --output=/home/ada/digits/.paceline-slurm/digits-10.0.0.5-41000/agent-%A_%a.log
#SBATCH --open-mode=append
#SBATCH --chdir=/home/ada/digits

export OMP_NUM_THREADS=1
export NOTE='two words'
exec /opt/py/bin/python -m paceline join 10.0.0.5:41000 --token-file \
/home/ada/digits/.paceline-slurm/digits-10.0.0.5-41000/token --workers 2
"""

BATCH_SCRIPT = """\
#!/bin/bash
#SBATCH --job-name=digits
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --cpus-per-task=2
#SBATCH --gres=gpu:2
#SBATCH --time=2:00:00
#SBATCH --output=digits-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --no-kill
#SBATCH --signal=B:TERM@60

cd /home/ada/digits || exit 1
# The supervisor runs here, on the first node of the allocation, and starts an agent on each node.
# Before the time limit and before a preemption it saves and leaves; the job is queued again.
exec /opt/py/bin/python -m paceline.engines.slurm.requeue_on_signal \\
  /opt/py/bin/python -m paceline train train.py --engine slurm --nodes "$SLURM_JOB_NUM_NODES" \
--workers-per-node 2 --gpus-per-node 2 --run-dir runs/digits-"$SLURM_JOB_ID" --resume auto \
--config 'my config.toml' -- --lr 0.1
"""


@pytest.fixture(autouse=True)
def outside_of_an_allocation(monkeypatch):
    for name in ("SLURM_JOB_ID", "SLURM_JOB_NODELIST"):
        monkeypatch.delenv(name, raising=False)


def test_agents_are_an_array_of_jobs_of_one_node():
    engine = paceline.Slurm(
        nodes=4, workers_per_node=2, gpus_per_node=2, partition="gpu", time="2:00:00",
        options={"comment": 'my "best" run'},
    )  # fmt: skip
    request = engine.request(AGENTS)
    assert request["script"] == AGENT_SCRIPT
    assert request["nodes"] == 4


def test_a_run_is_a_batch_script():
    assert paceline.Slurm(nodes=4, workers_per_node=2, gpus_per_node=2).batch_text(RUN) == BATCH_SCRIPT


def test_options_of_a_user_win_and_leave_out():
    options = {"exclusive": "no", "signal": "USR1@300", "gres": "gpu:a100:2", "hold": "", "requeue": "no"}
    text = paceline.Slurm(partition="gpu", options=options).batch_text(RUN)
    assert "--exclusive" not in text
    assert "#SBATCH --requeue" not in text
    assert "#SBATCH --signal=B:USR1@300\n" in text
    assert "#SBATCH --gres=gpu:a100:2\n" in text
    assert "#SBATCH --hold\n" in text
    assert "#SBATCH --partition=gpu\n" in text


def test_each_task_of_an_array_has_its_own_run_and_log():
    text = paceline.Slurm(options={"array": "0-3%2"}).batch_text(RUN)
    assert "#SBATCH --array=0-3%2\n" in text
    assert "#SBATCH --output=digits-%A_%a.log\n" in text
    assert '--run-dir runs/digits-"${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID" ' in text


def test_a_folder_and_a_version_that_were_given_are_kept():
    given = dataclasses.replace(RUN, options=("--run-dir", "here", "--resume", "3"))
    text = paceline.Slurm().batch_text(given)
    assert text.count("--run-dir") == text.count("--resume") == 1


def test_a_shell_takes_no_word_of_a_user_for_its_own():
    hostile = dataclasses.replace(
        RUN, script="$(id).py", name="a`id`;b", arguments=("$HOME", "; rm"), environment={"A": "$(id)"}
    )
    text = paceline.Slurm().batch_text(hostile)
    assert " '$(id).py' " in text
    assert "-- '$HOME' '; rm'\n" in text
    assert "--run-dir 'runs/a`id`;b-'\"$SLURM_JOB_ID\"" in text
    assert "export A='$(id)'\n" in text
    assert '#SBATCH --job-name="a`id`;b"\n' in text


def test_a_step_keeps_an_agent_on_a_host():
    command = step_command(AGENTS, "17", "n3", 8, "digits")
    where = command.index("srun")
    assert command[where:] == [
        "srun", "--jobid=17", "--overlap", "--nodes=1", "--ntasks=1", "--nodelist=n3", "--cpus-per-task=8",
        "--job-name=agent-digits", "--unbuffered", "--no-kill", "--gres=gpu:2", "--chdir=/home/ada/digits",
        "env", "NOTE=two words", "OMP_NUM_THREADS=1",
        "/opt/py/bin/python", "-m", "paceline.engines.remote_agent", VERSION,
        "/opt/py/bin/python", "-m", "paceline", "join", "10.0.0.5:41000", "--token-file", "/dev/stdin",
        "--workers", "2",
    ]  # fmt: skip
    # srun would take options from the step that the caller is in.
    assert set(command[1:where:2]) == {"-u"}


def test_options_are_read_from_texts():
    assert directives.options_from_texts(["qos=high", "--exclusive", "comment=a=b"]) == {
        "qos": "high",
        "exclusive": "",
        "comment": "a=b",
    }


@pytest.mark.parametrize(
    "options", [{"a b": "1"}, {"": "1"}, {"comment": "one\n#SBATCH --uid=0"}, {"-p": "x"}]
)
def test_what_could_not_be_a_line_is_refused(options):
    with pytest.raises(paceline.ConfigError):
        paceline.Slurm(options=options)


def test_values_that_cannot_be_are_refused():
    with pytest.raises(paceline.ConfigError, match="nodes=-1 cannot be"):
        paceline.Slurm(nodes=-1)
    with pytest.raises(paceline.ConfigError):
        paceline.Slurm(time="1:00\n#SBATCH --uid=0")
