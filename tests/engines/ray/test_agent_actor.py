"""The actor of a node, without Ray: the agent is its child, gets the secret in a file, ends with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import uuid
from pathlib import Path
from typing import Any

import pytest
from tests.waiting import wait_for

from paceline.core.process_state import has_ended
from paceline.engines.ray.agent_actor import AgentActor
from paceline.engines.ray.requests import PYTHON, TOKEN

SECRET = bytes(range(32))


def agent(code: str, **more: Any) -> dict[str, Any]:
    command = [PYTHON, "-c", textwrap.dedent(code), TOKEN]
    return {"command": command, "folder": "", "environment": {}, "keeps_threads": False, **more}


def reports(actor: AgentActor, after: int = 0) -> tuple[list[str], int]:
    """Return the lines and the code of an agent that ends."""
    lines: list[str] = []
    news = actor.report(after, 30.0)
    while news["code"] is None:
        lines += news["lines"]
        news = actor.report(news["next"], 30.0)
    return [*lines, *news["lines"]], news["code"]


def test_agent_gets_its_secret_its_folder_and_its_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    code = """
        import os, stat, sys
        print(open(sys.argv[1]).read())
        print(oct(stat.S_IMODE(os.stat(sys.argv[1]).st_mode)), os.stat(sys.argv[1]).st_nlink)
        print(os.getcwd(), os.environ["DATA"], os.environ.get("OMP_NUM_THREADS"))
        sys.exit(3)
    """
    given = agent(code, folder=str(tmp_path), environment={"DATA": "here"})
    lines, code_of_end = reports(AgentActor(given, SECRET, "", "node"))
    # The file has no name: nobody else can open it, and none is left.
    assert lines == [SECRET.hex(), "0o600 0", f"{tmp_path} here None"]
    assert code_of_end == 3


def test_secret_is_not_on_the_command_line(tmp_path: Path) -> None:
    actor = AgentActor(agent("import time; print('up', flush=True); time.sleep(60)"), SECRET, "", "node")
    news = actor.report(0, 30.0)
    pid = news["pid"]
    shown = Path(f"/proc/{pid}/cmdline").read_bytes() + Path(f"/proc/{pid}/environ").read_bytes()
    assert SECRET.hex().encode() not in shown
    actor.end(5.0)
    assert reports(actor, 1) == ([], -signal.SIGTERM)
    assert has_ended(pid)


def test_leave_and_end() -> None:
    polite = """
        import signal, sys
        signal.signal(signal.SIGTERM, lambda *_: (print("leaving", flush=True), sys.exit(0)))
        print("up", flush=True)
        while True: signal.pause()
    """
    actor = AgentActor(agent(polite), SECRET, "", "node")
    assert actor.report(0, 30.0)["lines"] == ["up"]
    actor.leave()
    assert reports(actor, 1) == (["leaving"], 0)

    deaf = """
        import signal
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("up", flush=True)
        signal.pause()
    """
    actor = AgentActor(agent(deaf), SECRET, "", "node")
    assert actor.report(0, 30.0)["lines"] == ["up"]
    actor.end(0.1)
    assert reports(actor, 1) == ([], -signal.SIGKILL)


def test_report_waits_no_longer_than_it_may_and_repeats_nothing() -> None:
    actor = AgentActor(
        agent(
            "print('a'); print('b', flush=True); input()",
        ),
        SECRET,
        "",
        "node",
    )
    lines, code = reports(actor)
    assert lines[:2] == ["a", "b"]
    assert "EOFError" in lines[-1]  # it has no input
    assert code == 1
    assert actor.report(len(lines), 0.0)["lines"] == []


def test_one_agent_of_a_run_per_node() -> None:
    run = uuid.uuid4().hex
    first = AgentActor(agent("import time; print('up', flush=True); time.sleep(60)"), SECRET, run, "node1")
    assert first.report(0, 30.0)["lines"] == ["up"]
    second = AgentActor(agent("print('never')"), SECRET, run, "node1")
    assert second.report(0, 30.0) == {"node_id": "node1", "taken": True}
    elsewhere = AgentActor(agent("print('there')"), SECRET, run, "node2")
    assert reports(elsewhere) == (["there"], 0)
    first.end(5.0)
    assert reports(first, 1) == ([], -signal.SIGTERM)
    # The node is free again.
    assert reports(AgentActor(agent("print('again')"), SECRET, run, "node1")) == (["again"], 0)


def test_agent_ends_with_the_actors_process(tmp_path: Path) -> None:
    program = f"""
import sys, time
from paceline.engines.ray.agent_actor import AgentActor
given = {agent("import time; print('up', flush=True); time.sleep(60)")!r}
actor = AgentActor(given, {SECRET!r}, "", "node")
print(actor.report(0, 30.0)["pid"], flush=True)
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        assert not has_ended(pid)
        os.kill(process.pid, signal.SIGKILL)
        wait_for(lambda: has_ended(pid), "the agent ends with its actor")


def test_folder_that_is_not_on_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline.engines.ray import agent_actor

    monkeypatch.setattr(agent_actor, "_has_working_dir", lambda: False)
    with pytest.raises(FileNotFoundError, match=r"/no/such is not on node .* runtime_env"):
        AgentActor(agent("print()", folder="/no/such"), SECRET, "", "node")
