"""Training programs on several hosts."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from tests.waiting import PATIENCE, wait_for
from typer.testing import CliRunner

from paceline.cli.main import app
from paceline.core import events, journal
from paceline.testing.netns import Hosts

ROOT = Path(__file__).parents[2]

E = TypeVar("E", bound=events.Event)


class Run:
    """A run on the first host, and what it tells."""

    def __init__(self, hosts: Hosts, tmp_path: Path, *options: str) -> None:
        self.hosts, self.folder, self._open = hosts, tmp_path / "runs" / "run", tmp_path / "open"
        self.token = tmp_path / "token"
        self._told: list[events.Event] = []
        self._offset = 0
        program = [sys.executable, "-m", "tests.network.joined_run", str(self.folder), str(self._open)]
        self.process = self._start(0, [*program, *options], stdout=subprocess.PIPE)
        wait_for(lambda: len(self.of(events.StepCommitted)) > 2, "the run begins")
        shutil.copy(self.folder / "control.secret", self.token)

    def _start(self, host: int, command: Sequence[str], **options: Any) -> subprocess.Popen[str]:
        environment = {
            "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
            "PACELINE_HOST": "abc"[host],
            **options.pop("env", {}),
        }
        return self.hosts.start(
            host, command, env={**os.environ, **environment}, cwd=ROOT, text=True, **options
        )

    @property
    def port(self) -> int:
        return int(json.loads((self.folder / "control.json").read_text())["port"])

    def join(
        self, *options: str, token: Path | None = None, before: str = "", on: int = 1, **environment: str
    ) -> subprocess.Popen[str]:
        """`paceline join` on the second host, or another."""
        host = self.hosts.addresses[0]
        where = f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"
        command = [sys.executable, "-m", "paceline", "join", where]
        command += ["--workers", "2", "--token-file", str(token or self.token), *options]
        if before:
            command = ["sh", "-c", f'{before} && exec "$@"', "sh", *command]
        return self._start(on, command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)

    def of(self, kind: type[E]) -> list[E]:
        file = self.folder / "journal.jsonl"
        if file.exists():
            chunk = journal.read(file, self._offset)  # only what is new: it is asked for all the time
            self._told += chunk.events
            self._offset = chunk.offset
        return [event for event in self._told if isinstance(event, kind)]

    @property
    def view(self) -> events.ViewChanged:
        return self.of(events.ViewChanged)[-1]

    def until_view(self, hosts: str, after: int = 0) -> float:
        """Waits until workers of these hosts, a letter each, train together and have made a step."""

        def there() -> bool:
            view = self.view
            return view.generation > after and "".join(view.hosts) == hosts and self.last_step > view.step

        return wait_for(there, f"a view of {hosts}: {self.of(events.ViewChanged)[-3:]}")

    @property
    def last_step(self) -> int:
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
def training(tmp_path: Path, *options: str, where: str = "bind=0.0.0.0", count: int = 2) -> Iterator[Run]:
    with Hosts(count) as hosts:
        yield Run(hosts, tmp_path, where, *options)


def ended(agent: subprocess.Popen[str]) -> tuple[int, str]:
    """How it ended and what it said."""
    said, _ = agent.communicate(timeout=PATIENCE)
    return agent.returncode, said
