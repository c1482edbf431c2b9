"""Programs beside a supervisor, each in a process of its own: a machine that joins, and any other code."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]

JOIN = """
import signal, sys
from pathlib import Path
from paceline.control.supervisor_address import read_token
from paceline.elastic.supervisor.agent import Agent
host, port, token, workers = sys.argv[1:]
agent = Agent((host, int(port)), read_token(Path(token)), int(workers), say=print)
signal.signal(signal.SIGTERM, lambda *_: agent.leave())
sys.exit(agent.run())
"""


@contextlib.contextmanager
def script(code: str, *arguments: object, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """Another process that runs this code, from the repository's folder, with the Paceline that is tested."""
    folders = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    process = subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(folders), **environment},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
