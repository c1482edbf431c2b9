"""The contract of engines on nodes that are processes of this machine."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from paceline.testing.engine_contract import (
    EngineLab,
    check_caller_killed,
    check_faults,
    check_stop_and_resume,
)
from paceline.testing.process_engine import ProcessEngine


class Lab(EngineLab):
    """Nodes are processes: one that is lost is killed, and another takes its place at once."""

    def engine(self, nodes: int, workers_per_node: int) -> ProcessEngine:
        return ProcessEngine(nodes=nodes, workers_per_node=workers_per_node)

    def start(self, command: Sequence[str], **options: Any) -> subprocess.Popen[str]:
        self.mark = secrets.token_hex(8)
        environment = {**os.environ, "PACELINE_CONTRACT": self.mark}
        self.caller = subprocess.Popen(command, env=environment, **options)
        return self.caller

    def kill_process(self, node: str, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)

    def kill_agent(self, node: str) -> None:
        for process in self._agents():
            if process.environ().get("PACELINE_HOST") == node and "join" in process.cmdline():
                process.kill()
                return
        raise AssertionError(f"no agent of {node}")

    def lose_node(self, node: str) -> None:
        there = [each for each in self._agents() if each.environ().get("PACELINE_HOST") == node]
        for process in there:
            with contextlib.suppress(psutil.NoSuchProcess):  # an agent ends with the process that started it
                process.kill()

    def add_node(self) -> None:
        """There are enough."""

    def left_running(self) -> list[str]:
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("PACELINE_CONTRACT") == self.mark and process.pid != self.caller.pid:
                    found.append(" ".join(process.cmdline()))
        return found

    def _agents(self) -> list[psutil.Process]:
        found = psutil.Process(self.caller.pid).children(recursive=True)
        return [process for process in found if "remote_agent" in " ".join(process.cmdline())] + [
            process for process in found if "join" in process.cmdline()
        ]


@pytest.mark.timeout(240)
def test_faults(tmp_path: Path) -> None:
    run = check_faults(Lab(), tmp_path)
    assert "joined the job" in run.output


@pytest.mark.timeout(240)
def test_stop_and_resume(tmp_path: Path) -> None:
    check_stop_and_resume(Lab(), tmp_path)


@pytest.mark.timeout(240)
def test_the_caller_is_killed(tmp_path: Path) -> None:
    check_caller_killed(Lab(), tmp_path)
