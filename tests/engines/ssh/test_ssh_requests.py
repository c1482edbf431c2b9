"""Requests of the ssh engine as plain data, host files, and what is refused before anything is started."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.train import small_run

from paceline.core import engine_registry
from paceline.core.errors import ConfigError, UnavailableError, UsageError
from paceline.core.version import VERSION
from paceline.engines.engine import AgentSpec
from paceline.engines.host_file import HostLine, read_host_file
from paceline.engines.ssh.ssh_engine import Ssh
from paceline.engines.ssh.ssh_errors import explain_end

_AGENTS = AgentSpec(
    run="digits", address=("fd00::5", 41000), nodes=1, workers_per_node=2, ports="42000-42009",
    folder="/shared/my work", python="/opt/python", environment={"OMP_NUM_THREADS": "1"},
)  # fmt: skip


def test_the_request() -> None:
    engine = Ssh(
        hosts=("node1", "root@[fd00::7]:2222"), nodes=1, user="me", identity="/keys/id",
        options=("ProxyJump=bastion",),
    )  # fmt: skip
    request = engine.request(_AGENTS)
    common = ["ssh", "-T", "-x", "-a", "-o", "ProxyJump=bastion", "-o", "BatchMode=yes"]
    common += ["-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3"]
    common += ["-o", "ControlPath=none", "-o", "LogLevel=ERROR", "-i", "/keys/id", "-o", "IdentitiesOnly=yes"]
    remote = (
        "cd '/shared/my work' || exit 72; exec env OMP_NUM_THREADS=1 /opt/python -m "
        f"paceline.engines.remote_agent {VERSION} /opt/python -m paceline join '[fd00::5]:41000' "
        "--token-file /dev/stdin --workers 2 --ports 42000-42009"
    )
    assert request == {
        "engine": "ssh",
        "run": "digits",
        "nodes": 1,
        "python": "/opt/python",
        "folder": "/shared/my work",
        "commands": [
            {"host": "node1", "command": [*common, "-l", "me", "node1", remote]},
            {
                "host": "root@[fd00::7]:2222",
                "command": [*common, "-l", "root", "-p", "2222", "fd00::7", remote],
            },
        ],
    }
    assert json.loads(json.dumps(request)) == request  # plain data


def test_settings_of_a_file() -> None:
    engine = engine_registry.from_plain({"name": "ssh", "hosts": ["node1", "node2"], "workers_per_node": 2})
    assert engine == Ssh(hosts=("node1", "node2"), workers_per_node=2)
    assert engine.nodes == 2


def test_host_files(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("# rack 3\nnode1\n\nroot@10.0.0.2:2222 slots=4 # fast\nfd77::2\n[fd77::3]:22\n")
    assert read_host_file(file) == (
        HostLine("node1"),
        HostLine("10.0.0.2", "root", 2222, 4),
        HostLine("fd77::2"),
        HostLine("fd77::3", "", 22),
    )
    with pytest.raises(UsageError, match=r"root@10\.0\.0\.2:2222 has slots=4"):
        Ssh(host_file=str(file), workers_per_node=5).check()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "names no host"),
        ("node1\nnode1\n", "line 2 names the host node1 a second time"),
        ("node1 gpus=4\n", "line 1: 'gpus=4' is not understood"),
        ("node1 slots=many\n", "'slots=many' is not understood"),
        ("-oProxyCommand=evil\n", "is not a host"),
        ("-l@node1\n", "is not a host"),
        ("node1:ssh\n", "is not a host"),
        ("[fd77::1\n", "is not a host"),
    ],
)
def test_host_files_that_are_none(tmp_path: Path, text: str, reason: str) -> None:
    (tmp_path / "hosts").write_text(text)
    with pytest.raises(UsageError) as error:
        Ssh(host_file=str(tmp_path / "hosts"))
    assert reason in error.value.message


def test_what_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        Ssh(host_file=str(tmp_path / "none"))
    for settings in ({}, {"hosts": ("a",), "host_file": "b"}):
        with pytest.raises(ConfigError, match="hosts= or host_file=, and not both"):
            Ssh(**settings)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="workers_per_node=0"):
        Ssh(hosts=("node1",), workers_per_node=0)
    with pytest.raises(UsageError, match="2 nodes are asked for, and 1 hosts are named"):
        Ssh(hosts=("node1",), nodes=2).check()
    with pytest.raises(UsageError, match="there is no private key"):
        Ssh(hosts=("node1",), identity=str(tmp_path / "none")).check()
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(UnavailableError, match="needs the program ssh"):
        Ssh(hosts=("node1",)).check()


@pytest.mark.parametrize(
    ("code", "text", "state", "reason", "unusable"),
    [
        (255, "WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!", "ended", "ssh-keygen -R node1'", True),
        (255, "ssh: Could not resolve hostname node1: Name or service not known", "ended", "not known", True),
        (255, "ssh: connect to host node1 port 22: No route to host", "lost", "cannot be reached", False),
        (255, "kex_exchange_identification: Connection reset", "lost", "ssh could not connect: kex", False),
        (126, "", "ended", "it has no program py", True),
        (1, "py: No module named paceline", "ended", "py has no Paceline there; try: 'py -m pip", True),
        (0, "Welcome!", "ended", "its shell ended before the agent was started: Welcome!; try: ", True),
        (
            255,
            "ssh: Could not resolve hostname a: Temporary failure in name resolution",
            "lost",
            "now",
            False,
        ),
        (1, "py: No module named paceline.engines.remote_agent", "ended", "another version", True),
        (79, "Paceline 9 is installed here, and the job runs 1", "ended", "version of Paceline (Pac", True),
        (2, "SyntaxError", "ended", "did not start (code 2): SyntaxError; try: ", True),
    ],
)
def test_why_no_agent_came(code: int, text: str, state: str, reason: str, unusable: bool) -> None:
    found = explain_end("me@node1:22", code, text.splitlines(), False, python="py", folder="/work")
    assert (found.state, found.is_host_unusable) == (state, unusable)
    assert found.reason.startswith("me@node1:22: ")
    assert reason in f"{found.reason}; try: {found.remedy}"


@pytest.mark.parametrize(
    ("host", "login", "known"),
    [
        ("node1", "node1", "node1"),
        ("me@node1:2222", "-p 2222 me@node1", '"[node1]:2222"'),
        ("root@fd77::2", "root@fd77::2", "fd77::2"),
        ("root@[fd77::2]:2222", "-p 2222 root@fd77::2", '"[fd77::2]:2222"'),
    ],
)
def test_remedies_name_a_host_as_the_commands_of_ssh_take_it(host: str, login: str, known: str) -> None:
    denied = explain_end(host, 255, ["Permission denied (publickey)."], False, python="py", folder="")
    assert f"'ssh-copy-id {login}'" in denied.remedy
    changed = explain_end(
        host, 255, ["REMOTE HOST IDENTIFICATION HAS CHANGED!"], False, python="py", folder=""
    )
    assert f"'ssh-keygen -R {known}'" in changed.remedy


def test_a_run_that_is_refused_leaves_no_folder(tmp_path):
    config = small_run.settings(tmp_path / "run", 2, engine=Ssh(hosts=("node1",), nodes=2))
    with pytest.raises(UsageError, match="nodes"):
        small_run.fit(config)
    assert not (tmp_path / "run").exists()
