"""A queue over the workers of two hosts: runs on the ssh engine give nodes away and get them back."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.clusters.ssh import ssh_hosts as lab
from tests.frontends.run_queue.training_queue import check_undisturbed, members, training, undisturbed_hash
from tests.train import small_run
from tests.waiting import wait_for

from paceline.frontends.run_queue import run_observation
from paceline.frontends.run_queue.queue_folder import QueueFolder

_SCRIPT = """
from tests.train import small_run
if __name__ == "__main__":
    config = small_run.settings("ignored", 1)
    print("hash", small_run.fit(config).state_hash, flush=True)
"""

_WHY_NOT = lab.why_not()

pytestmark = [
    pytest.mark.netns,
    pytest.mark.skipif(bool(_WHY_NOT), reason=_WHY_NOT or "sshd is here"),
    pytest.mark.timeout(600),
]


def test_runs_on_hosts_shrink_and_grow(tmp_path):
    (tmp_path / "alone").mkdir()
    gates = range(5, 13)
    expected = undisturbed_hash(tmp_path / "alone", *gates)
    (tmp_path / "ssh").mkdir()
    with (
        lab.ssh_hosts(2, tmp_path / "ssh") as hosts,
        hosts.on_first(),
        training(tmp_path, capacity=2, options=_options(hosts, tmp_path)) as queue,
    ):
        first = queue.add("first", "1-2", *gates)
        queue.at_gate(first, 5)
        assert members(queue.run_dir(first))[-1] == 2
        second = queue.add("second", "1", 5, 12, priority=5)
        queue.until(lambda: queue.run(first).workers == 1, "it was not told to shrink")
        log = queue.folder.log_of(queue.run(first).id)
        queue.until(lambda: "leaves the job at the end of the step" in log.read_text(), "no agent was told")
        # A boundary or two later the view has one member.
        for step in gates[:-1]:
            queue.at_gate(first, step)
            queue.open_gate(first, step)
        queue.until_state(second, "running")
        queue.at_gate(first, 12)
        assert members(queue.run_dir(first))[-1] == 1
        for step in (5, 12):
            queue.open_gate(second, step)
        queue.until_state(second, "finished")
        queue.until(lambda: run_observation.workers_now(queue.run_dir(first)) == 2, "no node came back")
        queue.open_gate(first, 12)
        queue.until_state(first, "finished")
        assert queue.run(first).attempt == queue.run(second).attempt == 1
        for name in (first, second):
            check_undisturbed(queue.run_dir(name), expected)


def test_a_run_is_handed_over_and_waited_for(tmp_path):
    """`paceline submit --engine ssh`: a queue of this machine keeps the run."""
    (tmp_path / "ssh").mkdir()
    script, folder = tmp_path / "script.py", tmp_path / "run"
    script.write_text(_SCRIPT)
    path = f"{lab.ROOT / 'src'}:{lab.ROOT}"
    program = [sys.executable, "-m", "paceline", "submit", str(script), "--nodes", "2", "--wait"]
    with lab.ssh_hosts(2, tmp_path / "ssh") as hosts, hosts.on_first():
        done = subprocess.run(
            [*program, "--run-dir", str(folder), *_options(hosts, tmp_path)],
            env={**os.environ, "XDG_STATE_HOME": str(tmp_path / "state"), "PYTHONPATH": path},
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        assert "is in a queue of this machine: paceline queue ls --queue" in done.stderr
        trained = small_run.fit(small_run.settings(tmp_path / "one", 1, fault_tolerance=small_run.UNATTENDED))
        assert f"hash {trained.state_hash}" in done.stdout
        assert members(folder)[-1] == 2
        server = tmp_path / "state" / "paceline" / "submitted" / "server.lock"
        wait_for(lambda: not QueueFolder(server.parent).is_served, "the server ends with its work")


def _options(hosts: lab.SshHosts, folder: Path) -> list[str]:
    return lab.engine_words(hosts.engine(1, 2, folder=str(folder)))
