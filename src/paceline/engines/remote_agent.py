"""The process on a node that an engine started over ssh or mpirun: runs the agent, and ends it when the
connection to the engine ends.

    python3 -m paceline.engines.remote_agent VERSION COMMAND...

Standard input carries, a line each: the job's secret, which the command reads from its own standard input;
then empty lines as a sign of life, `leave` (the agent leaves at a step boundary) or `stop` (soon). sshd keeps
a program running when its connection is gone: the end of standard input ends the agent here, and so does
silence, where neither side can tell the other. Exits with the agent's code, or 128 + its signal.
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Final, final

from paceline.core.host import host_name
from paceline.core.version import VERSION
from paceline.engines.local import linux

OTHER_VERSION_CODE: Final = 79
NO_SECRET_CODE: Final = 80
MARK: Final = "paceline-agent-runs"
"""First word of the line that says that the agent's process was started, then host name and pid."""
BEAT_SECONDS: Final = 2.0
_SILENCE_SECONDS: Final = 60.0
_STOP_SECONDS: Final = 5.0
_LEAVE_SECONDS: Final = 600.0  # a step, and a checkpoint after it
_CUT_SECONDS: Final = 30.0
_LONGEST_SECRET: Final = 4096


def main(arguments: Sequence[str]) -> int:
    expected, *command = arguments
    if expected != VERSION:
        print(f"Paceline {VERSION} is installed here, and the job runs {expected}", file=sys.stderr)
        return OTHER_VERSION_CODE
    secret = _first_line(0)
    if not secret:
        print("the connection ended before the job's secret came", file=sys.stderr)
        return NO_SECRET_CODE
    return _RemoteAgent(command, secret).run()


def _first_line(descriptor: int) -> bytes:
    """Read a line and no byte after it; empty where the input ends before."""
    line = bytearray()
    while len(line) < _LONGEST_SECRET and (byte := os.read(descriptor, 1)):
        if byte == b"\n":
            return bytes(line)
        line += byte
    return b""


@final
class _RemoteAgent:
    def __init__(self, command: Sequence[str], secret: bytes) -> None:
        self._wake, self._woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(self._woken, warn_on_full_buffer=False)
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._note)
        self._signalled = False
        self._kill_at: float | None = None
        self._heard_at = time.monotonic()
        own = os.getpid()
        reading, writing = os.pipe2(os.O_CLOEXEC)
        os.write(writing, secret + b"\n")  # less than a pipe holds
        os.close(writing)
        self._process = subprocess.Popen(
            command, stdin=reading, process_group=0, preexec_fn=lambda: linux.die_with_parent(own)
        )
        os.close(reading)
        print(f"{MARK} {host_name()} {self._process.pid}", flush=True)

    def _note(self, number: int, _: object) -> None:
        if number != signal.SIGCHLD:
            self._signalled = True

    def run(self) -> int:
        with selectors.DefaultSelector() as selector:
            selector.register(0, selectors.EVENT_READ)
            selector.register(self._wake, selectors.EVENT_READ)
            while self._process.poll() is None:
                for key, _ in selector.select(self._patience()):
                    if key.fd == self._wake:
                        os.read(self._wake, 4096)
                    elif not self._hear(os.read(0, 4096)):
                        selector.unregister(0)
                self._look_at_the_clock()
        linux.kill_process_group(self._process.pid)
        code = self._process.returncode
        return code if code >= 0 else 128 - code

    def _hear(self, data: bytes) -> bool:
        """Handle what the engine sent; False once it can send nothing more."""
        self._heard_at = time.monotonic()
        if not data:
            self._end(_CUT_SECONDS)
        elif b"stop" in data:
            self._end(_STOP_SECONDS)
        elif b"leave" in data:
            self._end(_LEAVE_SECONDS)
        return bool(data)

    def _patience(self) -> float:
        """Return for how long nothing has to be done unless something happens."""
        if self._kill_at is None:
            return BEAT_SECONDS
        return min(BEAT_SECONDS, max(0.0, self._kill_at - time.monotonic()) + 0.01)

    def _look_at_the_clock(self) -> None:
        now = time.monotonic()
        if self._signalled or now - self._heard_at > _SILENCE_SECONDS:
            self._signalled = False
            self._end(_CUT_SECONDS)
        if self._kill_at is not None and now >= self._kill_at:
            linux.kill_process_group(self._process.pid)

    def _end(self, seconds: float) -> None:
        """Have the agent leave, and kill it once the time is over; a shorter time replaces a longer one."""
        end = time.monotonic() + seconds
        if self._kill_at is None:
            self._process.send_signal(signal.SIGTERM)
        self._kill_at = end if self._kill_at is None else min(self._kill_at, end)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
