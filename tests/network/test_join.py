"""`paceline join`: another machine takes part in a run, is cut off, comes back, is refused, leaves.

Two hosts as network namespaces: the first runs `Trainer.fit`, the second joins it.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest
from tests.network import joined_run
from typer.testing import CliRunner

import paceline
from paceline.checkpoint.store import CheckpointStore
from paceline.cli.main import app
from paceline.core import events, journal
from paceline.testing import netns
from paceline.testing.netns import Hosts

_WHY_NOT = netns.why_not()

pytestmark = [pytest.mark.netns, pytest.mark.skipif(bool(_WHY_NOT), reason=_WHY_NOT or "namespaces work")]

ROOT = Path(__file__).parents[2]
PATIENCE = 120.0
E = TypeVar("E", bound=events.Event)


def until(condition: Callable[[], bool], what: str) -> float:
    """Waits for what other processes do; the seconds it took."""
    begun = time.monotonic()
    while not condition():
        if time.monotonic() - begun > PATIENCE:
            raise TimeoutError(what)
        time.sleep(0.01)
    return time.monotonic() - begun


class Run:
    """A run on the first host, and what it tells."""

    def __init__(self, hosts: Hosts, tmp_path: Path, *options: str) -> None:
        self.hosts, self.folder, self._open = hosts, tmp_path / "runs" / "run", tmp_path / "open"
        self.token = tmp_path / "token"
        program = [sys.executable, "-m", "tests.network.joined_run", str(self.folder), str(self._open)]
        self.process = self._start(0, [*program, "bind=0.0.0.0", *options], stdout=subprocess.PIPE)
        until(lambda: len(self.of(events.StepCommitted)) > 2, "the run begins")
        shutil.copy(self.folder / "control.secret", self.token)

    def _start(self, host: int, command: Sequence[str], **options: Any) -> subprocess.Popen[str]:
        environment = {"PYTHONPATH": str(ROOT), "PACELINE_HOST": "ab"[host], **options.pop("env", {})}
        return self.hosts.start(
            host, command, env={**os.environ, **environment}, cwd=ROOT, text=True, **options
        )

    @property
    def port(self) -> int:
        return int(json.loads((self.folder / "control.json").read_text())["port"])

    def join(
        self, *options: str, token: Path | None = None, before: str = "", **environment: str
    ) -> subprocess.Popen[str]:
        """`paceline join` on the second host."""
        command = [sys.executable, "-m", "paceline", "join", f"{self.hosts.addresses[0]}:{self.port}"]
        command += ["--workers", "2", "--token-file", str(token or self.token), *options]
        if before:
            command = ["sh", "-c", f'{before} && exec "$@"', "sh", *command]
        return self._start(1, command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)

    def of(self, kind: type[E]) -> list[E]:
        file = self.folder / "journal.jsonl"
        return [event for event in journal.iterate(file) if isinstance(event, kind)] if file.exists() else []

    @property
    def view(self) -> events.ViewChanged:
        return self.of(events.ViewChanged)[-1]

    def until_view(self, hosts: str, after: int = 0) -> float:
        """Waits until workers of these hosts, a letter each, train together and have made a step."""

        def there() -> bool:
            view = self.view
            return view.generation > after and "".join(view.hosts) == hosts and self._last_step > view.step

        return until(there, f"a view of {hosts}: {self.of(events.ViewChanged)[-3:]}")

    @property
    def _last_step(self) -> int:
        return max((event.step for event in self.of(events.StepCommitted)), default=0)

    def finish(self) -> str:
        self._open.touch()
        told, _ = self.process.communicate(timeout=PATIENCE)
        assert self.process.returncode == 0
        return str(told).strip()

    def check_exactly_once(self) -> None:
        done = CliRunner().invoke(app, ["audit", str(self.folder)])
        assert done.exit_code == 0, done.output


@contextmanager
def training(tmp_path: Path, *options: str) -> Iterator[Run]:
    with Hosts(2) as hosts:
        yield Run(hosts, tmp_path, *options)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The hash of the run in one process, which nobody joins."""
    folder = tmp_path_factory.mktemp("undisturbed")
    (folder / "open").touch()
    config = joined_run.config_of(folder / "run", 1, paceline.FaultTolerance(enabled=False))
    return joined_run.fit(config, folder / "open")


def ended(agent: subprocess.Popen[str]) -> tuple[int, str]:
    """How it ended and what it said."""
    said, _ = agent.communicate(timeout=PATIENCE)
    return agent.returncode, said


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
