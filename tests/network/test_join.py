"""`paceline join`: another machine takes part in a run, is cut off, comes back, is refused, leaves.

Two hosts as network namespaces: the first runs `Trainer.fit`, the second joins it.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from tests.network import joined_run
from tests.network.joined_runs import ended, training
from tests.waiting import wait_for

import paceline
from paceline.checkpoint.store import CheckpointStore
from paceline.core import events
from paceline.testing import netns

_WHY_NOT = netns.why_not()

pytestmark = [pytest.mark.netns, pytest.mark.skipif(bool(_WHY_NOT), reason=_WHY_NOT or "namespaces work")]


def test_a_machine_joins_and_its_lost_worker_is_replaced_there(tmp_path: Path, undisturbed: str) -> None:
    # Without a step it is killed in its first one; its replacement is another attempt.
    with training(tmp_path, "chaos=kill rank=3 phase=backward") as run:
        agent = run.join()
        run.until_view("aabb")
        assert run.finish() == undisturbed
        assert ended(agent)[0] == 0
        assert not run.hosts.pids(0)
        assert not run.hosts.pids(1)
        run.check_exactly_once()
        assert [event.rank for event in run.of(events.WorkerFailed)] == [3]


def test_a_machine_is_cut_off_comes_back_and_is_cut_off_for_good(tmp_path: Path, undisturbed: str) -> None:
    with training(tmp_path, "patience=6") as run:
        agent = run.join()
        run.until_view("aabb")
        before = run.view
        run.hosts.cut(1)
        assert run.until_view("aa", before.generation) < 15.0
        # The machine is asked where they are; it does not answer.
        wait_for(lambda: len(run.of(events.Verdict)) == 2, "two verdicts")
        verdicts = run.of(events.Verdict)
        assert sorted(verdict.rank for verdict in verdicts) == [2, 3]
        assert {verdict.host for verdict in verdicts} == {"b"}
        assert all(verdict.phase for verdict in verdicts)
        assert run.view.pids == before.pids[:2]
        run.hosts.heal(1)
        run.until_view("aabb", run.view.generation)
        assert not {*run.view.pids[2:]} & {*before.pids[2:]}
        # One way: it hears no peer, and is heard.
        run.hosts.drop(0, 1)
        assert run.until_view("aa", run.view.generation) < 30.0
        assert run.finish() == undisturbed
        run.check_exactly_once()
        code, said = ended(agent)
        assert code == 76, said
        assert not run.hosts.pids(1)


def test_an_agent_is_killed_and_another_is_told_to_leave(tmp_path: Path, undisturbed: str) -> None:
    with training(tmp_path) as run:
        killed = run.join()
        run.until_view("aabb")
        before = run.view.generation
        killed.kill()
        run.until_view("aa", before)
        failed = run.of(events.WorkerFailed)
        assert [(event.rank, event.cause) for event in failed] == [(2, "preempted"), (3, "preempted")]
        wait_for(lambda: not run.hosts.pids(1), "workers end with their agent")

        agent = run.join()
        run.until_view("aabb", run.view.generation)
        repaired = len(run.of(events.Repaired))
        agent.send_signal(signal.SIGTERM)
        run.until_view("aa", run.view.generation)
        code, said = ended(agent)
        assert code == 0, said
        assert "this host has left the job" in said
        assert run.finish() == undisturbed
        # No worker failed: nothing had to be repaired or computed again.
        assert len(run.of(events.Repaired)) == repaired
        assert not run.hosts.pids(1)
        run.check_exactly_once()


def test_the_supervisor_is_killed_while_another_machine_is_in(tmp_path: Path, undisturbed: str) -> None:
    with training(tmp_path) as run:
        agent = run.join()
        run.until_view("aabb")
        port, before = run.port, run.view
        os.kill(int(json.loads((run.folder / "control.json").read_text())["pid"]), signal.SIGKILL)
        wait_for(lambda: len(run.of(events.SupervisorStarted)) == 2, "another supervisor")
        assert run.port == port
        # It looks after the other machine as before.
        os.kill(before.pids[3], signal.SIGKILL)
        run.until_view("aabb", before.generation)
        assert run.view.pids[:3] == before.pids[:3]
        assert run.finish() == undisturbed
        assert ended(agent)[0] == 0
        assert [event.rank for event in run.of(events.WorkerFailed)] == [3]
        run.check_exactly_once()


def test_who_is_let_in(tmp_path: Path, undisturbed: str) -> None:
    with training(tmp_path) as run:
        (tmp_path / "wrong").write_text("ab" * 32)
        code, said = ended(run.join(token=tmp_path / "wrong"))
        assert code == 1
        assert "it does not know this secret" in said
        assert "give the token file of this very job" in said

        code, said = ended(run.join(ATEN_CPU_CAPABILITY="default"))
        assert code == 1
        assert "this host is refused" in said
        assert "instructions is 'DEFAULT' instead of" in said
        assert not run.hosts.pids(1)
        assert run.finish() == undisturbed
        assert {host for view in run.of(events.ViewChanged) for host in view.hosts} == {"a"}


def test_a_large_job_over_tls(tmp_path: Path, undisturbed: str) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificates")
    authority, key, certificate = (tmp_path / name for name in ("ca.pem", "key.pem", "certificate.pem"))
    own = ["openssl", "req", "-x509", "-newkey", "ed25519", "-nodes", "-subj", "/CN=paceline"]
    subprocess.run([*own, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    shutil.copy(certificate, authority)
    files = {"certificate": certificate, "key": key, "authority": authority}
    given = [f"{name}={path}" for name, path in files.items()]
    with training(tmp_path, "ballast=100", *given) as run:
        plain = run.join()
        code, said = ended(plain)
        assert code == 1
        assert "TLS" in said
        agent = run.join(*[part for name, path in files.items() for part in (f"--{name}", str(path))])
        run.until_view("aabb")
        assert run.finish() == undisturbed
        assert ended(agent)[0] == 0
        run.check_exactly_once()


def test_checkpoints_while_another_machine_does_not_see_the_folder(tmp_path: Path, undisturbed: str) -> None:
    with training(tmp_path) as run:
        agent = run.join(before=f"mount -t tmpfs none {run.folder.parent}")
        run.until_view("aabb")
        since = run.view.step
        wait_for(
            lambda: any(saved.step > since + 3 for saved in run.of(events.CheckpointSaved)),
            "a checkpoint of four workers",
        )
        saved = run.of(events.CheckpointSaved)[-1]
        (tmp_path / "kept").mkdir()
        shutil.copytree(run.folder / "checkpoints", tmp_path / "kept" / "checkpoints")
        shutil.copy(run.folder / "config.toml", tmp_path / "kept")
        assert not run.of(events.CheckpointFailed)
        # All who see the folder are lost: the others keep the state for their successors.
        before = run.view
        for pid in before.pids[:2]:
            os.kill(pid, signal.SIGKILL)
        run.until_view("aabb", before.generation)
        assert run.view.pids[2:] == before.pids[2:]
        assert run.finish() == undisturbed
        assert ended(agent)[0] == 0
        assert CheckpointStore(run.folder / "checkpoints").open().manifest.info.step == joined_run.STEPS
        run.check_exactly_once()
    manifest = CheckpointStore(tmp_path / "kept" / "checkpoints").open(saved.version).manifest
    assert (manifest.info.workers, manifest.info.step) == (4, saved.step)
    config = joined_run.config_of(tmp_path / "kept", 1, paceline.FaultTolerance(enabled=False))
    resumed = joined_run.fit(joined_run.resuming(config, saved.version), tmp_path / "open")
    assert resumed == undisturbed
