"""A real supervisor over real processes: members die, hang, raise and leave, and every step comes once."""

from __future__ import annotations

import os
import signal

import pytest
from tests.elastic.supervised_jobs import drop, result_of, running
from tests.engines.local.processes import all_gone, watch

from paceline.core.errors import PeerLostError
from paceline.core.events import (
    Repaired,
    StepsReceived,
    SupervisorStarted,
    Verdict,
    ViewChanged,
    WorkerFailed,
    WorkerStarted,
)
from paceline.engines.local import fork_server_client, memfd_pickle


def test_a_job_runs_to_its_end_and_leaves_a_complete_journal(tmp_path):
    with running(tmp_path, steps=30) as run:
        outcome = run.finish()
    assert outcome.ok
    assert outcome.stopped is None
    assert result_of(outcome)["steps"] == 30
    assert run.steps == list(range(1, 31))
    assert sorted(run.pids()) == [0, 1, 2]
    (view,) = run.of(ViewChanged)
    assert sorted(shard for dealt in view.shards for shard in dealt) == list(range(8))
    received = {(one.rank, one.first, one.last) for one in run.of(StepsReceived)}
    assert {rank for rank, _, _ in received} == {0, 1, 2}
    assert not (tmp_path / "control.secret").exists()
    assert not (tmp_path / "supervisor.json").exists()


def test_the_secret_is_readable_by_the_owner_only(tmp_path):
    with running(tmp_path, steps=30) as run:
        assert (tmp_path / "control.secret").stat().st_mode & 0o777 == 0o600
        drop(run.finish())


def test_a_killed_member_is_replaced_and_no_step_is_lost(tmp_path):
    with running(tmp_path, steps=120) as run:
        run.until_step(20)
        before = run.pids()
        os.kill(before[1], signal.SIGKILL)
        run.until_views(3)
        assert {rank: pid for rank, pid in run.pids().items() if rank != 1} == {0: before[0], 2: before[2]}
        assert drop(run.finish()).ok
    (failure,) = run.of(WorkerFailed)
    assert (failure.rank, failure.pid, failure.cause) == (1, before[1], "crash")
    assert "SIGKILL" in failure.reason
    assert run.of(Repaired)[0].lost == [1]
    assert run.steps == list(range(1, 121))


def test_the_first_member_and_all_members_can_be_killed(tmp_path):
    with running(tmp_path, steps=150) as run:
        run.until_step(15)
        os.kill(run.pids()[0], signal.SIGKILL)
        run.until_views(3)
        for pid in run.pids().values():
            os.kill(pid, signal.SIGKILL)
        assert drop(run.finish()).ok
    assert run.steps == list(range(1, 151))
    assert len(run.of(WorkerFailed)) == 4


def test_a_stopped_process_is_named_with_its_line_and_replaced(tmp_path, capfd):
    with running(tmp_path, steps=400) as run:
        run.until_step(20)
        victim = run.pids()[2]
        os.kill(victim, signal.SIGSTOP)
        run.until(lambda: run.of(Verdict))
        drop(run.finish())
    (verdict,) = run.of(Verdict)
    assert (verdict.rank, verdict.pid) == (2, victim)
    assert "SIGSTOP" in verdict.text
    # Wherever it was stopped, also in a module of Python's own that it had called.
    assert verdict.line in verdict.text
    assert "fake_member.py" in verdict.text
    assert verdict.text in capfd.readouterr().err
    assert run.steps == list(range(1, 401))


def test_a_hanging_member_is_named_with_phase_and_line(tmp_path):
    with running(tmp_path, steps=60, hang_at=[0, 20]) as run:
        run.until(lambda: run.of(Verdict))
        assert drop(run.finish()).ok
    (verdict,) = run.of(Verdict)
    assert (verdict.rank, verdict.phase) == (0, "data")
    assert "_hang_here" in verdict.text
    assert run.of(WorkerFailed)[0].cause == "hung"


def test_a_users_error_ends_the_job_with_its_report_and_exception(tmp_path, capfd):
    with running(tmp_path, raise_at=10, fault="user") as run:
        outcome = run.finish()
    assert not outcome.ok
    assert outcome.rank == 0
    assert outcome.failure is not None
    report = memfd_pickle.load(outcome.failure[0])
    assert "no good in step 10" in report.summary
    assert isinstance(memfd_pickle.load(outcome.failure[1]), ValueError)
    drop(outcome)
    # The traceback is in what the caller raises: the terminal has one line.
    said = capfd.readouterr().err
    assert "Traceback" not in said
    assert said.count("raised in phase forward, and the run ends: ValueError: no good in step 10") == 1


def test_an_error_in_the_same_step_twice_ends_the_job(tmp_path):
    with running(tmp_path, raise_at=10) as run:
        outcome = drop(run.finish())
    assert not outcome.ok
    assert "not the first time" in outcome.reason
    # The first is forgiven; the second ends the job, and others may have raised by then.
    causes = [failure.cause for failure in run.of(WorkerFailed)]
    assert len(causes) >= 2
    assert set(causes) == {"raised"}


def test_a_member_that_is_asked_to_go_leaves_at_a_boundary(tmp_path):
    with running(tmp_path, steps=200) as run:
        run.until_step(10)
        os.kill(run.pids()[1], signal.SIGTERM)
        run.until(lambda: run.of(WorkerFailed))
        assert drop(run.finish()).ok
    (failure,) = run.of(WorkerFailed)
    assert failure.cause == "preempted"
    assert run.steps == list(range(1, 201))


def test_a_worker_that_comes_when_all_is_over_is_not_waited_for(tmp_path):
    with running(tmp_path, steps=40) as run:
        run.until_step(25)
        os.kill(run.pids()[1], signal.SIGKILL)
        # Its replacement may still be on its way at the end; a good end has a minute for those who pack.
        assert drop(run.finish(20.0)).ok


def test_a_job_can_be_stopped(tmp_path):
    with running(tmp_path, steps=100_000) as run:
        run.until_step(10)
        run.supervised.stop("that is enough")
        outcome = drop(run.finish())
    assert outcome.ok
    assert outcome.stopped == "that is enough"


def test_a_job_can_grow_and_shrink(tmp_path):
    with running(tmp_path, steps=100_000, workers=2) as run:
        run.until_step(10)
        run.supervised.scale(4)
        run.until(lambda: run.of(ViewChanged)[-1].members == [0, 1, 2, 3])
        first, *grown = run.of(ViewChanged)
        assert first.behind == []
        assert {rank for view in grown for rank in view.behind} >= {2, 3}
        run.supervised.scale(1)
        run.until(lambda: run.of(ViewChanged)[-1].members == [0])
        run.supervised.stop("seen")
        drop(run.finish())


def test_kill_ends_everything_at_once(tmp_path):
    with running(tmp_path, steps=100_000) as run:
        run.until_step(10)
        pids = run.pids().values()
        run.supervised.kill()
        assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)


def test_a_worker_with_another_fingerprint_is_refused_by_name(tmp_path):
    odd = {"2": {"cpu": "another"}}
    few = {"max_worker_failures": 0}
    with running(tmp_path, workers=2, steps=300, fingerprints=odd, exact=True, machine=few) as run:
        run.until_step(10)
        run.supervised.scale(3)
        run.until(lambda: "another" in (tmp_path / "journal.jsonl").read_text())
        assert drop(run.finish()).ok
    text = (tmp_path / "journal.jsonl").read_text()
    assert "cpu is 'another' instead of 'same'" in text
    assert {event.rank for event in run.of(WorkerStarted)} == {0, 1}


def test_a_killed_supervisor_is_replaced_while_members_train_on(tmp_path):
    with running(tmp_path, steps=300) as run:
        run.until_step(20)
        before, port = run.pids(), run.supervised.address[1]
        os.kill(run.supervised.pid, signal.SIGKILL)
        run.until(lambda: len(run.of(SupervisorStarted)) == 2)
        outcome = run.finish()
    assert outcome.ok
    assert result_of(outcome)["steps"] == 300
    assert run.supervised.address[1] == port
    assert run.pids() == before
    assert run.steps == list(range(1, 301))
    assert len(run.of(ViewChanged)) == 1


def test_a_supervisor_is_killed_while_its_first_workers_start(tmp_path):
    with running(tmp_path, steps=60) as run:
        os.kill(run.supervised.pid, signal.SIGKILL)
        assert drop(run.finish()).ok
    assert run.steps == list(range(1, 61))


def test_a_member_that_dies_while_no_supervisor_is_there_is_replaced(tmp_path):
    with running(tmp_path, steps=300) as run:
        run.until_step(20)
        victim = run.pids()[1]
        os.kill(run.supervised.pid, signal.SIGSTOP)
        os.kill(victim, signal.SIGKILL)
        os.kill(run.supervised.pid, signal.SIGKILL)
        run.until(lambda: run.of(WorkerFailed))
        drop(run.finish())
    (failure,) = run.of(WorkerFailed)
    assert failure.pid == victim
    assert "SIGKILL" in failure.reason
    assert run.steps == list(range(1, 301))


def test_a_member_whose_end_only_the_dead_supervisor_heard_is_replaced(tmp_path):
    """It had already told the caller to forget the worker, and no other process."""
    with running(tmp_path, steps=300) as run:
        run.until_step(20)
        victim = run.pids()[1]
        os.kill(run.supervised.pid, signal.SIGSTOP)
        os.kill(victim, signal.SIGKILL)
        (member,) = [number for number, kept in run.supervised._kept.items() if kept.pid == victim]
        run.supervised._drop(member)
        os.kill(run.supervised.pid, signal.SIGKILL)
        run.until(lambda: run.of(WorkerFailed))
        drop(run.finish())
    (failure,) = run.of(WorkerFailed)
    assert (failure.rank, failure.cause) == (1, "crash")
    assert "while no supervisor was there" in failure.reason
    assert run.steps == list(range(1, 301))


def test_when_the_fork_server_dies_its_workers_go_on(tmp_path):
    with running(tmp_path, steps=10**6) as run:
        run.until_step(20)
        fork_server = fork_server_client.fork_server().pid
        before = run.pids()
        with watch([fork_server]) as gone:
            os.kill(fork_server, signal.SIGKILL)
            assert all_gone(gone, 10.0)
        run.until_step(run.steps[-1] + 30)
        assert run.pids() == before
        # A replacement comes from a new server, and who dies without one is missed as well.
        os.kill(before[1], signal.SIGKILL)
        run.until(lambda: run.pids()[1] != before[1] and len(run.of(ViewChanged)[-1].members) == 3)
        run.supervised.stop("seen")
        assert drop(run.finish()).ok
    (failure,) = run.of(WorkerFailed)
    assert (failure.rank, failure.cause) == (1, "crash")
    assert run.steps == list(range(1, len(run.steps) + 1))


def test_a_job_whose_fork_server_died_can_be_killed(tmp_path):
    with running(tmp_path, steps=10**6) as run:
        run.until_step(20)
        os.kill(fork_server_client.fork_server().pid, signal.SIGKILL)
        with watch([*run.pids().values()]) as watched:
            run.supervised.kill()
            assert all_gone(watched, 20.0)


def test_supervisors_follow_each_other_where_the_fork_server_died(tmp_path):
    """Workers of the supervisor's own server are the next supervisor's too."""
    with running(tmp_path, steps=10**6) as run:
        run.until_step(20)
        os.kill(fork_server_client.fork_server().pid, signal.SIGKILL)
        first = run.pids()
        os.kill(first[1], signal.SIGKILL)
        run.until(lambda: run.pids()[1] != first[1] and len(run.of(ViewChanged)[-1].members) == 3)
        before = run.pids()
        os.kill(run.supervised.pid, signal.SIGKILL)
        run.until(lambda: len(run.of(SupervisorStarted)) == 2)
        run.until_step(run.steps[-1] + 50)
        assert run.pids() == before
        run.supervised.stop("seen")
        assert drop(run.finish()).ok
    assert run.steps == list(range(1, len(run.steps) + 1))


def test_a_supervisor_that_dies_again_and_again_ends_the_job(tmp_path):
    with running(tmp_path, steps=10**6) as run:
        run.until_step(10)
        pids = list(run.pids().values())

        def kill_again() -> None:
            while True:
                os.kill(run.supervised.pid, signal.SIGKILL)
                run.supervised.wait(0.3)

        with pytest.raises(PeerLostError, match="the supervisor was killed by signal 9"):
            kill_again()
        with watch(pids) as watched:
            assert all_gone(watched, 10.0)


def test_a_supervisor_that_is_suspended_blames_no_worker(tmp_path):
    with running(tmp_path, steps=500) as run:
        run.until_step(20)
        steps = int((tmp_path / "count").read_text())
        os.kill(run.supervised.pid, signal.SIGSTOP)
        run.until(lambda: int((tmp_path / "count").read_text()) > steps + 200)
        os.kill(run.supervised.pid, signal.SIGCONT)
        drop(run.finish())
    assert not run.of(WorkerFailed)
    assert run.steps == list(range(1, 501))
