"""The actor of one node: runs the agent (`paceline join`) as its child, and hands on what it wrote.

Runs inside Ray. The agent's process ends with the actor's, however that ends.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from typing import IO, Any, Final, final

from paceline.core.claims import claim
from paceline.core.host import host_name
from paceline.engines.ray.requests import PYTHON, TOKEN

_KEPT_LINES: Final = 10_000  # that no call has fetched yet
_LONGEST_LINE: Final = 16_384
_LAST_LINES_SECONDS: Final = 1.0

# An interpreter of its own asks the kernel for the signal: code between fork and exec of a process that has
# threads, as a Ray worker has, may deadlock.
_EXEC: Final = (
    "import os, sys; from paceline.engines.local.linux import die_with_parent; "
    "die_with_parent(int(sys.argv[1])); os.execv(sys.argv[2], sys.argv[2:])"
)


@final
class AgentActor:
    """One node's agent. `run` names the job: one agent of it per node, unless `run` is empty.

    Made in the process's main thread, which Ray does: the kernel ties a child to the thread that started it.
    """

    def __init__(self, agent: Mapping[str, Any], secret: bytes, run: str, node_id: str = "") -> None:
        self._changed = threading.Condition()
        self._lines: list[str] = []
        self._first = 0  # number of the oldest kept line
        self._is_over = False
        self._process: subprocess.Popen[bytes] | None = None
        self._node_id = node_id or _own_node_id()
        # One agent of the run on this node: the kernel frees the claim with this process.
        self._claim = claim(f"ray {run} {self._node_id}") if run else None
        self._is_taken = bool(run) and self._claim is None
        if not self._is_taken:
            self._start(agent, secret)

    def _start(self, agent: Mapping[str, Any], secret: bytes) -> None:
        folder = _folder_here(agent["folder"])
        environment = dict(os.environ)
        if not agent["keeps_threads"]:
            # Ray sets it to the actor's CPUs; workers have a number of their own.
            environment.pop("OMP_NUM_THREADS", None)
        environment |= agent["environment"]
        # A file without a name: its owner alone can read it, and a killed actor leaves none behind.
        with tempfile.TemporaryFile() as token:
            token.write(secret.hex().encode())
            token.flush()
            placed = {PYTHON: sys.executable, TOKEN: f"/proc/self/fd/{token.fileno()}"}
            command = [placed.get(word, word) for word in agent["command"]]
            process = subprocess.Popen(
                [sys.executable, "-c", _EXEC, str(os.getpid()), *command],
                cwd=folder,
                env={**environment, "PYTHONUNBUFFERED": "1"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=(token.fileno(),),
                start_new_session=True,
            )
        self._process = process
        assert process.stdout is not None
        reader = threading.Thread(target=self._read, args=(process.stdout,), daemon=True)
        reader.start()
        threading.Thread(target=self._wait, args=(process, reader), daemon=True).start()

    def report(self, after: int, seconds: float) -> dict[str, Any]:
        """Return what is new: lines from number `after` on, and the exit code once the agent is over. Waits
        for either at most this long."""
        process = self._process
        if process is None:
            return {"node_id": self._node_id, "taken": self._is_taken}
        with self._changed:
            self._changed.wait_for(lambda: self._is_over or self._first + len(self._lines) > after, seconds)
            is_over = self._is_over
            lines = self._lines[max(0, after - self._first) :]
            newest = self._first + len(self._lines)
            # What was asked for after has arrived.
            self._first, self._lines = newest - len(lines), list(lines)
        return {
            "node_id": self._node_id,
            "host": host_name(),
            "pid": process.pid,
            "lines": lines,
            "next": newest,
            "code": process.returncode if is_over else None,
        }

    def leave(self) -> None:
        """Have the workers leave at a step boundary, and the agent after them."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    def end(self, seconds: float) -> None:
        """Have the agent leave; kill it where it has not left by then."""
        process = self._process
        if process is None:
            return
        self.leave()
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _read(self, output: IO[bytes]) -> None:
        with output:
            for line in iter(lambda: output.readline(_LONGEST_LINE), b""):
                with self._changed:
                    self._lines.append(line.decode(errors="replace").rstrip("\n"))
                    if len(self._lines) > _KEPT_LINES:
                        self._lines.pop(0)
                        self._first += 1
                    self._changed.notify_all()

    def _wait(self, process: subprocess.Popen[bytes], reader: threading.Thread) -> None:
        process.wait()
        # A process that the agent left behind may hold the pipe open.
        reader.join(_LAST_LINES_SECONDS)
        if self._claim is not None:
            self._claim.close()
        with self._changed:
            self._is_over = True
            self._changed.notify_all()


def _folder_here(folder: str) -> str:
    """Return the script's folder on this node: the caller's path, else the copy that Ray brought along."""
    if folder and os.path.isdir(folder):
        return folder
    if folder and not _has_working_dir():
        raise FileNotFoundError(
            f"the script's folder {folder} is not on node {host_name()}: share it, or send it along with "
            'runtime_env={"working_dir": "."}'
        )
    return os.getcwd()


def _has_working_dir() -> bool:
    import ray

    return "working_dir" in ray.get_runtime_context().runtime_env


def _own_node_id() -> str:
    import ray

    return str(ray.get_runtime_context().get_node_id())
