"""The caller's side of a supervised job: starts the supervisor process, starts it again when it dies, waits.

Keeps a copy of each worker's socket, so that workers outlive a supervisor and the next one finds them. Must
not know what the job computes, nor decide anything about it.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import Any, Final, final

from paceline.core import loopback, typed
from paceline.core.control import crew
from paceline.core.errors import PeerLostError, ResourceError, UnavailableError, UsageError
from paceline.core.system_calls import open_process
from paceline.elastic import job as jobs
from paceline.elastic.job import Job, Outcome
from paceline.engines.local import client, launch, protocol
from paceline.engines.local.protocol import Message

RESTARTS: Final = 3
# One that lived for longer was well, and its death is the first of a row.
_CALM_SECONDS: Final = 5.0
_UP_SECONDS: Final = 60.0
_KILL_SECONDS: Final = 15.0
# How long another thread that wants to kill the job may have to wait for the one that waits.
_SLICE_SECONDS: Final = 0.5
_BOOT: Final = (
    "import sys; descriptor, *sys.path[:] = sys.argv[1:]; sys.argv[1:] = []; "
    "from paceline.elastic.main import main; main(int(descriptor))"
)


@final
class Supervised:
    """A job with a supervisor. `fileno` can be polled: it is readable when `wait` has something to do.

    One thread waits; `stop`, `scale` and `kill` may come from any other.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._epoll: select.epoll | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._watch = -1
        self._server: client.Server | None = None
        self._kept: dict[int, tuple[int, tuple[int, ...]]] = {}
        self._watches: dict[int, int] = {}  # of kept workers, as their fork server may be gone
        self._lock = threading.RLock()
        self._attempt = 0
        self._in_a_row = 0
        self._started_at = 0.0
        self._exit_code = 0
        self._outcome: Outcome | None = None
        self._asked: list[tuple[str, dict[str, Any]]] = []
        self.address: tuple[str, int] = ("", 0)

    @property
    def pid(self) -> int:
        """The supervisor's process."""
        return self._process.pid if self._process is not None else 0

    def fileno(self) -> int:
        if self._epoll is None:
            raise UsageError("the job was not started, or is closed", remedy="call start() first")
        return self._epoll.fileno()

    def start(self) -> None:
        """Start the supervisor; returns when it listens and is about to start workers."""
        if self._epoll is not None:
            raise UsageError("the job was started already", remedy="make a new Supervised for another run")
        self._epoll = select.epoll()
        for stream in (sys.stdout, sys.stderr):
            # What was printed before must not appear after what the workers print.
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()
        try:
            self._launch()
            limit = time.monotonic() + _UP_SECONDS
            while not self.address[1] and self._outcome is None:
                if time.monotonic() > limit:
                    raise PeerLostError("the supervisor did not come up", remedy="its output above says why")
                self._turn(limit - time.monotonic())
        except BaseException:
            self.close()
            raise

    def wait(self, timeout: float | None = None) -> Outcome | None:
        """How the job ended; None when it has not within `timeout` seconds. Descriptors are the caller's."""
        limit = float("inf") if timeout is None else time.monotonic() + timeout
        while True:
            with self._lock:
                if self._outcome is not None:
                    outcome, self._outcome = self._outcome, None
                    self._reap()
                    return outcome
                left = limit - time.monotonic()
                if not self._turn(max(0.0, min(left, _SLICE_SECONDS))) and left <= 0:
                    return None

    def stop(self, reason: str) -> None:
        """Have the job finish its step, save, and end."""
        self._say("stop", reason=reason)

    def scale(self, workers: int) -> None:
        """Have the job go on with so many workers."""
        self._say("scale", workers=workers)

    def kill(self) -> None:
        """End everything at once; nothing is saved."""
        self._in_a_row = RESTARTS
        self._say("kill", reason="killed by the caller")
        with self._lock:
            limit = time.monotonic() + _KILL_SECONDS
            with contextlib.suppress(PeerLostError):
                while self._outcome is None and self._process is not None and time.monotonic() < limit:
                    self._turn(max(0.0, limit - time.monotonic()))
            if self._process is not None and self._process.poll() is None and self._outcome is None:
                self._process.kill()
            self._kill_workers()

    def close(self) -> None:
        """End what is left, and give back every descriptor."""
        if self._process is not None and self._outcome is None and self._process.poll() is None:
            self.kill()
        self._kill_workers()
        self._reap()
        if self._outcome is not None:
            _drop_outcome(self._outcome)
            self._outcome = None
        if self._epoll is not None:
            self._epoll.close()
            self._epoll = None

    def _launch(self) -> None:
        """Start a supervisor process and hand it all that it needs."""
        if not sys.executable:
            raise UnavailableError(
                "this Python does not know its own executable, so no supervisor can be started",
                remedy="set sys.executable to the path of a Python with Paceline installed",
            )
        loopback.check()
        self._attempt += 1
        self._started_at = time.monotonic()
        if self._server is None or not self._server.is_alive():
            self._server = client.server()
        control, watch = self._server.lend()
        ours, theirs = protocol.pair()
        flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
        try:
            self._process = subprocess.Popen(
                [sys.executable, *flags, "-c", _BOOT, str(theirs.fileno()), *client.import_paths()],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            ours.close()
            self._server.lent -= 1
            raise ResourceError(
                f"the supervisor could not be started with {sys.executable}: {error.strerror}",
                remedy="free memory, or raise the limit on processes (`ulimit -u`)",
            ) from error
        finally:
            theirs.close()
        self._socket, self._watch = ours, open_process(self._process.pid)
        assert self._epoll is not None
        self._epoll.register(ours, select.EPOLLIN)
        self._epoll.register(self._watch, select.EPOLLIN)
        self._hand_over(control, watch)

    def _hand_over(self, control: int, watch: int) -> None:
        assert self._socket is not None
        assert self._server is not None
        job = self._job
        order = launch.order_here(job.entry, 1, job.preload, job.threads, {})
        spec = jobs.write_spec(jobs.spec_of(job, order, self._attempt, self._server.pid))
        # Sent with it: whatever becomes of this process, the supervisor is at work there from now on.
        place = crew.take_place(job.folder)
        places = () if place is None else (place,)
        # One that died at once is noticed by the loop.
        with contextlib.suppress(ConnectionError):
            jobs.send(self._socket, "job", (spec, job.payload, control, watch, *places))
            for member, (pid, files) in self._kept.items():
                jobs.send(self._socket, "kept", files, member=member, pid=pid)
            jobs.send(self._socket, "begin")
            for kind, fields in self._asked:
                jobs.send(self._socket, kind, **fields)
        protocol.close_all([spec, *places])

    def _turn(self, seconds: float) -> bool:
        """Wait for something and take it in; False when nothing came."""
        if self._epoll is None or self._process is None or self._socket is None:
            raise UsageError("the job was not started, or is over", remedy="call start() first")
        ready = {descriptor for descriptor, _ in self._epoll.poll(min(seconds, 3600.0))}
        # What was said before the supervisor ended is heard first.
        if self._socket.fileno() in ready:
            message = jobs.receive(self._socket)
            if message is not None:
                self._hear(*message)
                return True
        if ready:
            self._supervisor_is_gone()
        return bool(ready)

    def _hear(self, kind: str, fields: dict[str, Any], descriptors: tuple[int, ...]) -> None:
        match kind:
            case "up":
                self.address = str(fields["host"]), int(fields["port"])
            case "keep":
                self._drop(int(fields["member"]))
                self._keep(int(fields["member"]), int(fields["pid"]), descriptors)
            case "drop":
                self._drop(int(fields["member"]))
            case "error":
                self._in_a_row = RESTARTS
                self._kill_workers()
                self._reap()
                raise jobs.error_from(fields)
            case "ended":
                told, *files = descriptors
                with os.fdopen(told, "rb") as file:
                    file.seek(0)
                    outcome = typed.convert(json.load(file), Outcome, "outcome")
                assert isinstance(outcome, Outcome)
                self._outcome = jobs.with_descriptors(outcome, files)
            case _:
                protocol.close_all(descriptors)

    def _supervisor_is_gone(self) -> None:
        assert self._process is not None
        calm = time.monotonic() - self._started_at > _CALM_SECONDS
        self._in_a_row = 1 if calm else self._in_a_row + 1
        self._reap()
        code = self._exit_code
        how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        if self._in_a_row > RESTARTS:
            self._kill_workers()
            raise PeerLostError(
                f"the supervisor {how}, the last of {self._attempt}; the job is over",
                remedy="its output above says why; the newest checkpoint of the run can be resumed",
            )
        self._launch()

    def _reap(self) -> None:
        """The supervisor's end: wait for it and forget it; what it left with us stays."""
        if self._process is None:
            return
        try:
            self._exit_code = self._process.wait(_KILL_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._exit_code = self._process.wait()
        assert self._socket is not None
        while (message := self._last_words()) is not None:
            self._hear(*message)
        self._socket.close()
        os.close(self._watch)
        self._process, self._socket, self._watch = None, None, -1
        if self._server is not None:
            self._server.lent -= 1

    def _last_words(self) -> tuple[str, dict[str, Any], tuple[int, ...]] | None:
        assert self._socket is not None
        self._socket.setblocking(False)
        try:
            message = jobs.receive(self._socket)
        except OSError:
            return None
        return message if message is not None and message[0] != "error" else None

    def _say(self, kind: str, **fields: Any) -> None:
        if kind != "kill":
            # A supervisor that takes over is to know it too.
            self._asked = [one for one in self._asked if one[0] != kind] + [(kind, fields)]
        if self._socket is not None:
            with contextlib.suppress(ConnectionError):
                jobs.send(self._socket, kind, **fields)

    def _kill_workers(self) -> None:
        """Workers that no supervisor looks after any more."""
        for member in list(self._kept):
            _, files = self._kept[member]
            with socket.socket(fileno=os.dup(files[0])) as worker, contextlib.suppress(OSError):
                protocol.send(worker, Message(protocol.KILL))
            if member in self._watches:
                # Not only by way of its fork server, which may be gone.
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self._watches[member], signal.SIGKILL)
            self._drop(member)

    def _keep(self, member: int, pid: int, files: tuple[int, ...]) -> None:
        self._kept[member] = pid, files
        if pid:
            with contextlib.suppress(ProcessLookupError):
                self._watches[member] = open_process(pid)

    def _drop(self, member: int) -> None:
        _, files = self._kept.pop(member, (0, ()))
        watch = self._watches.pop(member, -1)
        protocol.close_all([*files, watch] if watch >= 0 else files)


def _drop_outcome(outcome: Outcome) -> None:
    files = [*(outcome.failure or ()), *([outcome.result] if outcome.result is not None else [])]
    protocol.close_all(files)
