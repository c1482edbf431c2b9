"""What is submitted to SLURM, as text: scripts, commands, and what they never hold."""

from __future__ import annotations

import dataclasses

import pytest

import paceline
from paceline.core.version import VERSION
from paceline.engines.batch import BatchSpec
from paceline.engines.engine import AgentSpec
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


@pytest.mark.parametrize("signal", ["USR2@300", "R:HUP@60", "SIGINT", "B:10@90"])
def test_a_signal_on_which_a_run_saves_goes_to_the_batch_shell(signal):
    text = paceline.Slurm(options={"signal": signal}).batch_text(RUN)
    assert f"#SBATCH --signal=B:{signal.split(':')[-1]}\n" in text


@pytest.mark.parametrize("signal", ["KILL@60", "CONT", "9@60", "@60"])
def test_a_signal_that_would_end_the_run_is_refused(signal):
    with pytest.raises(paceline.ConfigError, match="does not save on"):
        paceline.Slurm(options={"signal": signal}).batch_text(RUN)


def test_the_size_of_a_run_is_none_of_its_agents():
    options = {"nodes": "3", "ntasks": "6", "ntasks-per-node": "2", "qos": "high"}
    engine = paceline.Slurm(options=options)
    assert engine.nodes == 3
    assert paceline.Slurm(options={"nodes": "2-4"}).nodes == 2
    script = engine.request(AGENTS)["script"]
    assert "#SBATCH --nodes=1\n#SBATCH --ntasks=1\n" in script
    assert "ntasks-per-node" not in script
    assert "#SBATCH --qos=high\n" in script
    handed_over = engine.batch_text(dataclasses.replace(RUN, nodes=engine.nodes))
    assert "#SBATCH --nodes=3\n#SBATCH --ntasks-per-node=2\n" in handed_over


def test_the_interface_of_the_supervisor_is_that_of_a_run_that_is_handed_over():
    text = paceline.Slurm(interface="eth1", folder="/scratch/my runs").batch_text(RUN)
    assert " --gpus-per-node 2 --engine-set 'interface=\"eth1\"' --run-dir " in text


def test_each_task_of_an_array_has_its_own_run_and_log():
    text = paceline.Slurm(options={"array": "0-3%2"}).batch_text(RUN)
    assert "#SBATCH --array=0-3%2\n" in text
    assert "#SBATCH --output=digits-%A_%a.log\n" in text
    assert '--run-dir runs/digits-"${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID" ' in text


@pytest.mark.parametrize(
    ("options", "name"), [({}, "exp-lr=0.1-j-%j"), ({"array": "0-1"}, "exp-lr=0.1-j-%A_%a")]
)
def test_the_log_is_in_the_folder_of_the_run(options, name):
    """SLURM ends a job without a word whose output would be in a folder that does not exist."""
    text = paceline.Slurm(options=options).batch_text(dataclasses.replace(RUN, name="exp/lr=0.1%\\j"))
    assert f"#SBATCH --output={name}.log\n" in text


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
        "srun", "--overlap", "--nodes=1", "--ntasks=1", "--jobid=17", "--nodelist=n3", "--cpus-per-task=8",
        "--job-name=agent-digits", "--unbuffered", "--no-kill", "--gres=gpu:2", "--chdir=/home/ada/digits",
        "env", "NOTE=two words", "OMP_NUM_THREADS=1",
        "/opt/py/bin/python", "-m", "paceline.engines.remote_agent", VERSION,
        "/opt/py/bin/python", "-m", "paceline", "join", "10.0.0.5:41000", "--token-file", "/dev/stdin",
        "--workers", "2",
    ]  # fmt: skip
    # srun would take options from the job, and from the step that the caller is in.
    assert set(command[1:where:2]) == {"-u"}
    assert {"SLURM_CPUS_PER_TASK", "SLURM_GPUS", "SLURM_GRES", "SLURM_EXPORT_ENV"} <= {*command[2:where:2]}


@pytest.mark.parametrize(
    "options", [{"a b": "1"}, {"": "1"}, {"comment": "one\n#SBATCH --uid=0"}, {"-p": "x"}]
)
def test_what_could_not_be_a_line_is_refused(options):
    with pytest.raises(paceline.ConfigError):
        paceline.Slurm(options=options)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"nodes": -1}, "nodes=-1 cannot be"),
        ({"nodes": "2"}, "nodes='2' cannot be"),
        ({"nodes": 2.5}, "nodes=2.5 cannot be"),
        ({"poll_seconds": "2"}, "poll_seconds='2' cannot be"),
        ({"options": {"mem": 4000}}, "the option mem is 4000, and not text"),
        ({"time": 30}, "time=30 is not text"),
        ({"partition": 3}, "partition=3 is not text"),
        ({"options": {"nodes": "many"}}, "the option nodes=many is no number of nodes"),
        ({"nodes": 2, "options": {"nodes": "3"}}, "nodes=2 and the option nodes=3 contradict each other"),
    ],
)
def test_values_that_cannot_be_are_refused(settings, said):
    with pytest.raises(paceline.ConfigError, match=said) as refused:
        paceline.Slurm(**settings)
    assert refused.value.remedy


def test_a_time_is_one_line():
    with pytest.raises(paceline.ConfigError):
        paceline.Slurm(time="1:00\n#SBATCH --uid=0")
