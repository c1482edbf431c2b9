"""The Ray engine beyond the contract: Ray client, nodes that are added, Ray's own failures, bad settings."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.clusters.ray import small_training
from tests.clusters.ray.ray_lab import RayLab
from tests.waiting import wait_for

from paceline.core import events, journal
from paceline.engines.ray.ray_engine import Ray
from paceline.testing.engine_contract.cases import ContractRun, undisturbed_hash

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.leaky("Ray starts and ends processes when it likes; the tests look for those of runs"),
]

# What a message must have, of each case of bad_settings, and what is tried.
EXPECTED = {
    "no head": r"UnavailableError a Ray client server at 127.0.0.1:1 .*: Connection refused.*try:",
    "no head by gcs": r"UnavailableError a Ray head at 127.0.0.1:1 .*: Connection refused.*try:",
    "not Ray": r"UnavailableError .* something listens there that is not Ray.*try:",
    "unknown name": r"UnavailableError .*no-such-host.invalid:10001 does not answer: .*try:",
    "too large": r"UsageError no node of the Ray cluster .* needs CPU 64: the most .* is CPU 4 .*try:",
    "no such resource": r"UsageError .* needs CPU 1, fast_disk 1: the most .* is fast_disk 0 .*try:",
    "no such folder to send": r"UnavailableError Ray at .* refused the agents: .*/no/such.*try: ",
    "no supervisor": r"RuntimeError ended 1: .*127.0.0.1:1",
}
OTHER_VERSION = (
    r"UnavailableError the Ray cluster at \S+ runs other versions .*%s.*try: install the cluster's"
)
# `make test-engines` installs it, without what it needs, which is the same for both.
OTHER_RAY = Path(sys.prefix) / "other-ray"


def test_client_takes_up_added_nodes_and_scales(lab: RayLab, tmp_path: Path) -> None:
    expected = undisturbed_hash(tmp_path)
    engine = Ray(address=lab.cluster.client_address, nodes=3, max_nodes=4)
    with ContractRun.started(lab, tmp_path / "run", engine) as run:
        run.until_size(3)
        assert sorted(run.nodes) == sorted(lab.cluster.nodes)
        before = run.view
        lab.add_node()
        added = lab.cluster.nodes[-1]
        wait_for(lambda: lab.cluster.agents(added), "the added node has an agent")
        run.until_size(4, after=before.generation)
        assert sorted(run.nodes) == sorted(lab.cluster.nodes)

        def scaled(workers: int) -> None:
            told = [sys.executable, "-m", "paceline", "scale", str(run.folder), "--workers", str(workers)]
            subprocess.run(told, check=True, capture_output=True)

        before = run.view
        scaled(3)  # as many as at first, which nobody had asked for
        run.until_size(3, after=before.generation)
        before = run.view
        scaled(6)
        run.until_size(4, after=before.generation)
        assert run.finish() == expected
        run.check_once()
    assert not lab.left_running(), lab.left_running()
    assert re.search(r"agent \d runs on \w", run.output)
    assert "the job has ended" in run.output  # what the agents wrote


def test_a_killed_actor_is_replaced(lab: RayLab, tmp_path: Path) -> None:
    expected = undisturbed_hash(tmp_path)
    with ContractRun.started(lab, tmp_path / "run", lab.engine(2, 1)) as run:
        run.until_size(2)
        before = run.view
        (actor,) = lab.actors(run.nodes[-1])
        os.kill(actor, signal.SIGKILL)
        run.until_size(1, after=before.generation)
        run.until_size(2, after=run.view.generation)
        assert run.finish() == expected
        run.check_once()
    assert "is lost: The actor is dead because its worker process has died" in run.output
    assert not lab.left_running(), lab.left_running()


def test_a_run_whose_client_connection_is_lost_ends_and_starts_no_ray_here(
    lab: RayLab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Of the caller, which is the one process that is started from here on.
    monkeypatch.setitem(lab.cluster.environment, "RAY_CLIENT_RECONNECT_GRACE_PERIOD", "2")
    engine = Ray(address=lab.cluster.client_address, nodes=2)
    earlier = set(lab.client_servers())  # they outlive their clients for a while
    with ContractRun.started(lab, tmp_path / "run", engine) as run:
        run.until_size(2)
        (driver,) = set(lab.client_servers()) - earlier
        os.kill(driver, signal.SIGKILL)
        assert run.process.wait(timeout=60.0) != 0
    assert f"the connection to Ray at {lab.cluster.client_address} is lost" in run.output
    assert 'try: start the run again with resume="auto"' in run.output
    assert "Started a local Ray instance" not in run.output
    assert not lab.left_running(), lab.left_running()


def test_bad_settings_have_one_clear_message_and_leave_nothing(lab: RayLab) -> None:
    printed = lab.run("bad_settings", lab.cluster.address, lab.cluster.client_address)
    found = json.loads(printed.splitlines()[-1])
    assert [name for name, *_ in found] == list(EXPECTED)
    for name, kind, message, seconds in found:
        assert re.search(EXPECTED[name], f"{kind} {message}", re.DOTALL), (name, kind, message)
        assert "Traceback" not in message
        assert seconds < 25.0, (name, seconds)
    assert not lab.left_running(), lab.left_running()


@pytest.mark.skipif(
    not OTHER_RAY.is_dir(), reason=f"no other version of Ray in {OTHER_RAY}: make test-engines"
)
def test_another_version_than_the_clusters_is_refused(lab: RayLab) -> None:
    (installed,) = OTHER_RAY.glob("ray-*.dist-info")
    version = installed.name.removeprefix("ray-").removesuffix(".dist-info")
    paths = f"{OTHER_RAY}:{lab.cluster.environment['PYTHONPATH']}"
    addresses = (lab.cluster.address, lab.cluster.client_address)
    printed = lab.run("bad_settings", *addresses, "good", PYTHONPATH=paths)
    found = json.loads(printed.splitlines()[-1])
    assert [name for name, *_ in found] == ["client", "head"]
    for name, kind, message, seconds in found:
        assert re.search(OTHER_VERSION % re.escape(version), f"{kind} {message}", re.DOTALL), (name, message)
        assert "Traceback" not in message
        assert seconds < 25.0, (name, seconds)
    assert not lab.left_running(), lab.left_running()


def test_a_run_is_handed_over_stopped_and_resumed(lab: RayLab, tmp_path: Path) -> None:
    """By the dashboard's address alone, as `ray job submit` has it; under a limit, which stands between the
    job's stop and the run."""
    expected, gate, folder = undisturbed_hash(tmp_path), tmp_path / "gate", tmp_path / "run"
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\nfrom pathlib import Path\nfrom paceline.testing.engine_contract import run\n"
        "print('hash', run.fit(run.config_of(Path(sys.argv[1])), Path(sys.argv[2])), flush=True)\n"
    )
    environment = {**lab.cluster.environment, "RAY_ADDRESS": lab.cluster.dashboard}
    command = [sys.executable, "-m", "paceline", "submit", str(script), "--engine", "ray", "--nodes", "2"]
    command += ["--set", "resume=auto", "--time", "1:00:00", "--wait", str(folder), str(gate)]

    def submitted() -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        return subprocess.Popen(command, cwd=tmp_path, env=environment, text=True, stdout=pipe, stderr=pipe)

    engine = Ray(dashboard=lab.cluster.dashboard)
    file = folder / "journal.jsonl"
    with submitted() as first:
        assert first.stdout is not None
        identifier = first.stdout.readline().strip()

        def has_begun() -> bool:
            assert first.poll() is None, first.communicate()
            told = journal.read(file).events if file.exists() else []
            return any(isinstance(event, events.StepCommitted) for event in told)

        wait_for(has_begun, "its first step", seconds=120.0)
        engine.stop_batch(identifier)
        printed, errors = first.communicate(timeout=90.0)
    assert engine.batch_status(identifier).state == "stopped"
    # Ray says of a job that was stopped how that came, and not with which code it left.
    assert first.returncode == 1, (first.returncode, printed, errors)
    assert f"{identifier} stopped: Job was intentionally stopped" in errors
    told = journal.read(file).events
    (ended,) = [event for event in told if isinstance(event, events.RunEnded)]
    *_, saved = [event for event in told if isinstance(event, events.CheckpointSaved)]
    # Ray signals the caller and its supervisor at once: the one that acts first is named.
    assert ended.reason in ("SIGTERM", "the supervisor got SIGTERM")
    assert saved.step == ended.step
    assert not lab.left_running(), lab.left_running()

    gate.touch()
    with submitted() as second:
        printed, errors = second.communicate(timeout=150.0)
    assert second.returncode == 0, printed + errors
    assert f"hash {expected}" in printed.splitlines()
    assert not lab.left_running(), lab.left_running()


@pytest.mark.parametrize("how", ["own", "users", "auto"])
def test_without_an_address_agents_share_a_local_cluster(lab: RayLab, how: str, tmp_path: Path) -> None:
    """Or have a node each of the one that runs on this machine, by address="auto"."""
    expected = small_training.one_process(0.05).state_hash
    printed = lab.run("local_fits", how, str(tmp_path / "run"))
    assert json.loads(printed.splitlines()[-1]) == [expected, how == "users"]
    told = journal.read(tmp_path / "run" / "journal.jsonl").events
    views = [event for event in told if isinstance(event, events.ViewChanged)]
    assert len(views[0].members) == 2, views
    nodes = set(views[0].hosts)
    assert nodes <= set(lab.cluster.nodes) if how == "auto" else nodes == {"caller"}
    assert not lab.left_running(), lab.left_running()
