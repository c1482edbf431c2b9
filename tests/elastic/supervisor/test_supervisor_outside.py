"""What comes to a supervisor from outside: tools, other machines, a caller that dies, a disk that is full."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
from tests.elastic.outside_programs import JOIN, script
from tests.elastic.supervised_jobs import drop, running
from tests.engines.local.processes import all_gone, watch
from tests.waiting import wait_for

from paceline.control import supervisor_address
from paceline.control.messages import ToolRequest
from paceline.core import memory_cgroup
from paceline.core.errors import RendezvousError, ResourceError, UsageError
from paceline.core.events import Verdict, ViewChanged, WorkerFailed, WorkerStarted
from paceline.core.listen_address import listener
from paceline.elastic.supervisor import tool_client

CALLER = """
import sys
from pathlib import Path
from tests.elastic.supervised_jobs import running
more = {"hang_at": [0, 15], "machine": {"hang_least": 600.0}} if "hang" in sys.argv else {}
with running(Path(sys.argv[1]), steps=10**6, patience=float(sys.argv[2]), **more) as run:
    run.until_step(10)
    print(run.supervised.pid, *run.pids().values(), flush=True)
    run.finish(600)
"""


def test_tools_find_the_job_by_its_folder(tmp_path):
    with running(tmp_path, workers=2, steps=10**6) as run:
        run.until_step(10)
        answer = tool_client.ask(tmp_path, ToolRequest(what="status"))
        assert answer.facts["phase"] == "running"
        assert [worker["rank"] for worker in answer.facts["workers"]] == [0, 1]
        assert json.dumps(answer.facts)
        assert tool_client.ask(tmp_path, ToolRequest(what="scale", number=3)).done
        run.until(lambda: run.of(ViewChanged)[-1].members == [0, 1, 2])
        assert not tool_client.ask(tmp_path, ToolRequest(what="fly")).done
        assert tool_client.ask(tmp_path, ToolRequest(what="stop", text="seen enough")).done
        assert drop(run.finish()).stopped == "seen enough"


def test_a_folder_without_a_job_is_a_clear_mistake(tmp_path):
    with pytest.raises(UsageError, match="no supervisor runs there"):
        tool_client.ask(tmp_path, ToolRequest(what="status"))


def test_a_start_whose_port_is_taken_leaves_nothing_behind(tmp_path):
    with listener("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with (
            pytest.raises(ResourceError, match=f"cannot listen at .*:{port}"),
            running(tmp_path, workers=1, port=port),
        ):
            pass
    assert not {"control.secret", "control.json"} & {file.name for file in tmp_path.iterdir()}


def test_a_wrong_secret_is_refused(tmp_path):
    with running(tmp_path, workers=1, steps=10**6) as run:
        with pytest.raises(RendezvousError, match="refused"):
            tool_client.open_channel(run.supervised.address, b"x" * 32, None, 5.0)
        run.supervised.kill()


def test_another_machine_joins_works_and_leaves(tmp_path):
    # Another name makes it another host: no shared memory across.
    with running(tmp_path, workers=2, steps=10**6, shared=str(tmp_path)) as run:
        run.until_step(5)
        host, port = run.supervised.address
        with script(JOIN, host, port, tmp_path / "control.secret", 2, PACELINE_HOST="far") as agent:
            run.until(lambda: run.of(ViewChanged)[-1].members == [0, 1, 2, 3])
            assert run.of(ViewChanged)[-1].hosts[2:] == ["far", "far"]
            run.until_step(run.steps[-1] + 20)
            agent.send_signal(signal.SIGTERM)
            assert agent.wait(20) == 0
            run.until(lambda: run.of(ViewChanged)[-1].members == [0, 1])
        run.supervised.stop("seen")
        assert drop(run.finish()).ok
    assert run.steps == list(range(1, len(run.steps) + 1))


def test_where_a_worker_of_another_machine_stands_is_asked_there(tmp_path):
    with running(tmp_path, workers=2, steps=10**6, shared=str(tmp_path)) as run:
        run.until_step(5)
        host, port = run.supervised.address
        with script(JOIN, host, port, tmp_path / "control.secret", 1, PACELINE_HOST="far") as agent:
            run.until(lambda: run.of(ViewChanged)[-1].members == [0, 1, 2])
            # Not before it is in a step: while it starts, other lines are at the top of its stack.
            run.until_step(run.steps[-1] + 3)
            os.kill(run.of(ViewChanged)[-1].pids[2], signal.SIGSTOP)
            run.until(lambda: run.of(Verdict))
            run.supervised.stop("seen")
            assert drop(run.finish()).ok
            assert agent.wait(20) == 0
    (verdict,) = run.of(Verdict)
    assert (verdict.rank, verdict.host) == (2, "far")
    assert "the process is stopped (SIGSTOP)" in verdict.text
    # It is let run for a moment, to say where it was.
    assert "fake_member.py" in verdict.text
    assert verdict.line


def test_a_kill_for_memory_on_another_machine_is_named(tmp_path):
    try:
        memory_cgroup.make_cgroup_below(f"paceline-test-{os.getpid()}", 64 << 20).remove()
    except OSError as error:
        pytest.skip(f"no memory cgroup can be made here: {error}; run as root with cgroups mounted")
    # Running out of memory takes as long as it does: it is not to be found hanging before.
    patient = {"hang_least": 60.0}
    with running(tmp_path, workers=2, steps=10**6, shared=str(tmp_path), oom=2, machine=patient) as run:
        run.until_step(5)
        host, port = run.supervised.address
        with script(JOIN, host, port, tmp_path / "control.secret", 2, PACELINE_HOST="far") as agent:
            run.until(lambda: run.of(WorkerFailed))
            # The group goes with the process; with the last worker there, who removes it would go first.
            name = f"paceline-oom-{run.of(WorkerFailed)[0].pid}"
            present = memory_cgroup.cgroup_of(os.getpid())
            assert present is not None
            wait_for(lambda: not (present.path / name).exists(), "the cgroup is still there", seconds=5)
            run.supervised.stop("seen")
            assert drop(run.finish()).ok
            assert agent.wait(20) == 0
    (failed,) = run.of(WorkerFailed)
    assert (failed.rank, failed.host, failed.cause) == (2, "far", "memory")
    assert "killed by the kernel" in failed.reason


def test_a_machine_that_vanishes_is_left_out_and_the_job_ends_with_the_other(tmp_path):
    with running(
        tmp_path, workers=2, steps=10**6, shared=str(tmp_path), machine={"agent_seconds": 0.5}
    ) as run:
        run.until_step(5)
        host, port = run.supervised.address
        with script(JOIN, host, port, tmp_path / "control.secret", 1, PACELINE_HOST="far") as agent:
            run.until(lambda: run.of(ViewChanged)[-1].members == [0, 1, 2])
            agent.kill()
            run.until(lambda: run.of(ViewChanged)[-1].members == [0, 1])
        with script(JOIN, host, port, tmp_path / "control.secret", 1, PACELINE_HOST="far") as second:
            run.until(lambda: len(run.of(ViewChanged)[-1].members) == 3)
            run.supervised.stop("seen")
            assert drop(run.finish()).ok
            assert second.wait(20) == 0


def test_when_the_caller_dies_the_job_saves_and_ends(tmp_path):
    with script(CALLER, tmp_path, 30.0) as caller:
        assert caller.stdout is not None
        pids = [int(pid) for pid in caller.stdout.readline().split()]
        with watch(pids) as watched:
            caller.kill()
            assert all_gone(watched, 20.0)
    assert not (tmp_path / supervisor_address.ADDRESS_FILE).exists()


def test_when_the_caller_dies_and_a_member_hangs_nothing_is_left_behind(tmp_path):
    """The job is asked to save and end; after `patience` seconds what has not ended is killed."""
    with script(CALLER, tmp_path, 2.0, "hang") as caller:
        assert caller.stdout is not None
        supervisor, *members = [int(pid) for pid in caller.stdout.readline().split()]
        fork_server = int(Path(f"/proc/{members[0]}/stat").read_text().rpartition(")")[2].split()[1])
        with watch([supervisor, fork_server, *members]) as watched:
            caller.kill()
            assert all_gone(watched, 20.0)
    assert not (tmp_path / supervisor_address.ADDRESS_FILE).exists()


def test_when_the_fork_server_and_then_the_caller_die_nothing_is_left_behind(tmp_path):
    with script(CALLER, tmp_path, 2.0, "hang") as caller:
        assert caller.stdout is not None
        supervisor, *members = [int(pid) for pid in caller.stdout.readline().split()]
        fork_server = int(Path(f"/proc/{members[0]}/stat").read_text().rpartition(")")[2].split()[1])
        with watch([supervisor, fork_server, *members]) as watched:
            os.kill(fork_server, signal.SIGKILL)
            caller.kill()
            assert all_gone(watched, 20.0)
    assert not (tmp_path / supervisor_address.ADDRESS_FILE).exists()


def test_when_fork_server_caller_and_supervisor_die_members_leave(tmp_path):
    with script(CALLER, tmp_path, 1.0) as caller:
        assert caller.stdout is not None
        supervisor, *members = [int(pid) for pid in caller.stdout.readline().split()]
        fork_server = int(Path(f"/proc/{members[0]}/stat").read_text().rpartition(")")[2].split()[1])
        with watch([supervisor, fork_server, *members]) as watched:
            os.kill(caller.pid, signal.SIGSTOP)
            os.kill(fork_server, signal.SIGKILL)
            os.kill(supervisor, signal.SIGKILL)
            caller.kill()
            assert all_gone(watched, 30.0)
    assert sorted((tmp_path / "left").read_text().split()) == ["76"] * len(members)


def test_when_caller_and_supervisor_die_members_lose_patience_and_leave(tmp_path):
    with script(CALLER, tmp_path, 1.0) as caller:
        assert caller.stdout is not None
        supervisor, *members = [int(pid) for pid in caller.stdout.readline().split()]
        with watch(members) as watched:
            before = int((tmp_path / "count").read_text())
            os.kill(caller.pid, signal.SIGSTOP)
            os.kill(supervisor, signal.SIGKILL)
            caller.kill()
            # They train on without a supervisor and a caller, and then leave.
            wait_for(
                lambda: int((tmp_path / "count").read_text()) > before + 10,
                "the members do not train on",
                seconds=5,
            )
            assert all_gone(watched, 20.0)
    assert sorted((tmp_path / "left").read_text().split()) == ["76"] * len(members)


def test_a_full_disk_delays_the_journal_and_nothing_else(tmp_path):
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", small], check=False).returncode:
        pytest.skip("a small file system needs the right to mount one")
    try:
        with running(small, workers=2, steps=400, shared=str(tmp_path), count=str(tmp_path)) as run:
            run.until_step(10)
            with contextlib.suppress(OSError), open(small / "filler", "wb", buffering=0) as filler:
                while True:
                    filler.write(b"x" * 512)
            stuck = int((tmp_path / "count").read_text())
            run.until(lambda: int((tmp_path / "count").read_text()) > stuck + 100)
            (small / "filler").unlink()
            run.until_step(stuck + 50)
            run.supervised.stop("seen")
            drop(run.finish())
            assert run.steps == list(range(1, len(run.steps) + 1))
            assert not run.of(WorkerFailed)
            assert b"\x00" not in (small / "journal.jsonl").read_bytes()
    finally:
        subprocess.run(["umount", small], check=True)


def test_workers_tell_who_they_are(tmp_path):
    with running(tmp_path, workers=2, steps=20) as run:
        drop(run.finish())
    assert all(event.host and event.pid for event in run.of(WorkerStarted))
