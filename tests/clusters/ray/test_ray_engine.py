"""The Ray engine beyond the contract: Ray client, nodes that are added, Ray's own failures, bad settings."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from pathlib import Path

import pytest
from tests.clusters.ray.ray_lab import ROOT, RayLab
from tests.waiting import wait_for

from paceline.core import events, journal
from paceline.engines.batch import BatchSpec
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


def test_client_takes_up_added_nodes(lab: RayLab, tmp_path: Path) -> None:
    expected = undisturbed_hash(tmp_path)
    engine = Ray(address=lab.cluster.client_address, nodes=3, max_nodes=4)
    with ContractRun.started(lab, tmp_path / "run", engine) as run:
        run.until_size(3)
        assert sorted(run.nodes) == sorted(lab.cluster.nodes)
        before = run.view
        lab.add_node()
        run.until_size(4, after=before.generation)
        assert sorted(run.nodes) == sorted(lab.cluster.nodes)
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
    expected, gate, folder = undisturbed_hash(tmp_path), tmp_path / "gate", tmp_path / "run"
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\nfrom pathlib import Path\nfrom paceline.testing.engine_contract import run\n"
        "print('hash', run.fit(run.config_of(Path(sys.argv[1])), Path(sys.argv[2])), flush=True)\n"
    )
    engine = Ray(dashboard=lab.cluster.dashboard, nodes=2)
    job = BatchSpec(
        script=str(script),
        arguments=(str(folder), str(gate)),
        options=("--resume", "auto"),
        nodes=2,
        folder=str(tmp_path),
        python=sys.executable,
        environment={"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "RAY_ADDRESS": lab.cluster.address},
    )
    first = engine.submit_batch(job)
    file = folder / "journal.jsonl"

    def has_begun() -> bool:
        assert not engine.batch_status(first).is_over, list(engine.batch_logs(first)(True))
        told = journal.read(file).events if file.exists() else []
        return any(isinstance(event, events.StepCommitted) for event in told)

    wait_for(has_begun, "its first step", seconds=120.0)
    engine.stop_batch(first)
    wait_for(lambda: engine.batch_status(first).is_over, "it saves and leaves")
    assert engine.batch_status(first).state == "stopped"
    assert any((folder / "checkpoints").iterdir())
    assert not lab.left_running(), lab.left_running()

    gate.touch()
    second = engine.submit_batch(job)
    wait_for(lambda: engine.batch_status(second).is_over, "it goes to its end", seconds=120.0)
    log = list(engine.batch_logs(second)(True))
    assert engine.batch_status(second).state == "succeeded", log[-20:]
    assert f"hash {expected}" in log
    assert not lab.left_running(), lab.left_running()
