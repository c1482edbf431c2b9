"""Requests of the MPI engine as plain data, and what it refuses before anything is started."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from paceline.core.errors import ConfigError, UnavailableError, UsageError
from paceline.core.version import VERSION
from paceline.engines.engine import AgentSpec
from paceline.engines.mpi.mpi_engine import Mpi
from paceline.engines.mpi.mpirun_errors import explain_end
from paceline.frontends.overrides import Overrides
from paceline.train.settings.train_config import TrainConfig

_AGENTS = AgentSpec(
    run="digits", address=("10.0.0.5", 41000), nodes=1, workers_per_node=2, folder="/shared/work",
    python="/opt/python", environment={"OMP_NUM_THREADS": "1"},
)  # fmt: skip


def test_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    engine = Mpi(hosts=("node1", "node2"), nodes=1, options=("--mca", "btl", "tcp,self"))
    node1 = [
        "mpirun", "--mca", "btl", "tcp,self", "-n", "1", "--host", "node1", "--bind-to", "none",
        "--wdir", "/shared/work", "-x", "OMP_NUM_THREADS=1",
        "/opt/python", "-m", "paceline.engines.remote_agent", VERSION,
        "/opt/python", "-m", "paceline", "join", "10.0.0.5:41000", "--token-file", "/dev/stdin",
        "--workers", "2",
    ]  # fmt: skip
    assert engine.request(_AGENTS) == {
        "engine": "mpi",
        "run": "digits",
        "nodes": 1,
        "python": "/opt/python",
        "commands": [
            {"host": "node1", "command": node1},
            {"host": "node2", "command": ["node2" if word == "node1" else word for word in node1]},
        ],
    }
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert "--allow-run-as-root" in engine.request(_AGENTS)["commands"][0]["command"]


def test_a_script_under_mpirun_has_the_size_of_its_ranks_before_they_meet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "3")
    assert TrainConfig(engine=Mpi()).workers == 3
    # What `paceline train --workers 3`, or a file of counts per GPU, adds to it.
    assert Overrides({"workers": 3}, ()).apply(TrainConfig(engine=Mpi())).workers == 3
    assert Mpi(nodes=2).nodes == 2


def test_hosts_of_a_file_of_mpirun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: name)
    monkeypatch.delenv("OMPI_COMM_WORLD_RANK", raising=False)
    hosts = tmp_path / "hosts"
    hosts.write_text("# rack 3\nnode1 slots=4\nnode2 slots=2  # half of it\n")
    engine = Mpi(host_file=str(hosts), workers_per_node=2)
    assert engine.nodes == 2
    engine.check()
    with pytest.raises(UsageError, match="node2 has slots=2, and workers_per_node is 4"):
        Mpi(host_file=str(hosts), workers_per_node=4).check()
    with pytest.raises(UsageError, match="3 nodes are asked for, and 2 hosts are named"):
        Mpi(host_file=str(hosts), nodes=3).check()
    with pytest.raises(UsageError, match="takes no user and no port"):
        Mpi(hosts=("root@node1",)).check()
    with pytest.raises(ConfigError, match="hosts= and host_file="):
        Mpi(hosts=("node1",), host_file=str(hosts))
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    with pytest.raises(UsageError, match="a rank of an mpirun, which starts no other"):
        engine.check()
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(UnavailableError, match="there is no program mpirun"):
        engine.check()


@pytest.mark.parametrize(
    ("code", "text", "was_running", "state", "reason"),
    [
        (0, "the job has ended", True, "ended", "the job has ended"),
        (-9, "", True, "lost", "its mpirun was ended by signal 9"),
        (1, "ORTE has lost communication with a remote daemon.", True, "lost", "lost the connection"),
        (137, "killed", True, "ended", "the agent ended with code 137: killed"),
        (1, "Permission denied (publickey).", False, "ended", "permission denied; try: "),
        (1, "Host key verification failed.", False, "ended", "its host key is not known here"),
        (0, "", False, "ended", "its shell ended before the agent was started; try: "),
        (134, "mpirun was unable to find the specified executable file: could not find executable x",
         False, "ended", "it has no program /opt/python"),
        (1, "/opt/python: No module named paceline", False, "ended", "/opt/python has no Paceline there"),
        (79, "Paceline 0.0.9 is installed here, and the job runs 0.1.0\nmpirun: a process ended, code 79",
         False, "ended", "of Paceline (Paceline 0.0.9 is installed here, and the job runs 0.1.0);"),
    ],
)  # fmt: skip
def test_why_an_agent_ended(code: int, text: str, was_running: bool, state: str, reason: str) -> None:
    found = explain_end("node1", code, ["-" * 40, *text.splitlines(), ""], was_running, python="/opt/python")
    assert found.state == state
    assert reason in f"{found.reason}; try: {found.remedy}"
