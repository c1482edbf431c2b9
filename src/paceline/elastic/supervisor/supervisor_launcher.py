"""The parent's side of a supervised job: starts the supervisor process, restarts it when it dies, waits.

Keeps a copy of each worker's socket, so that workers outlive a supervisor and the next one finds them.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import sys
import threading
from typing import Any, Final, final

from paceline.control import liveness_lock
from paceline.core import fd_messages
from paceline.core.clock import Clock, MonotonicClock
from paceline.core.errors import PeerLostError, ResourceError, UnavailableError, UsageError
from paceline.core.listen_address import check_loopback
from paceline.core.sandbox_fallbacks import open_process
from paceline.elastic.supervisor import parent_messages as jobs
from paceline.elastic.supervisor.parent_messages import JobOutcome, JobSpec, SupervisedJob
from paceline.engines.local import engine_messages, fork_server_client, launch, memfd_pickle
from paceline.engines.local.engine_messages import EngineMessage
from paceline.engines.local.worker_handle import WorkerProcess

MAX_RESTARTS: Final = 3
# A supervisor that lived for longer was well, and its death is the first of a row.
_CALM_SECONDS: Final = 5.0
_UP_SECONDS: Final = 60.0
_KILL_SECONDS: Final = 15.0
# How long a thread that wants to kill the job may have to wait for the thread that waits.
_SLICE_SECONDS: Final = 0.5
_BOOT: Final = (
    "import sys; descriptor, *sys.path[:] = sys.argv[1:]; sys.argv[1:] = []; "
    "from paceline.elastic.supervisor.process_entry import main; main(int(descriptor))"
)


@final
class SupervisorLauncher:
    """A job with a supervisor. `payload`: descriptor of what the workers run; it stays the caller's. `fileno`
    can be polled: it is readable when `wait` has something to do.

    One thread waits; `stop`, `scale` and `kill` may come from any other.
    """

    def __init__(self, job: SupervisedJob, payload: int, clock: Clock | None = None) -> None:
        self._job = job
        self._payload = payload
        self._clock = clock or MonotonicClock()
        self._epoll: select.epoll | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._watch = -1
        self._server: fork_server_client.ForkServer | None = None
        self._kept: dict[int, WorkerProcess] = {}
        self._lock = threading.RLock()
        self._attempt = 0
        self._in_a_row = 0
        self._started_at = 0.0
        self._exit_code = 0
        self._outcome: JobOutcome | None = None
        self._requests: dict[str, dict[str, Any]] = {}
        self.address: tuple[str, int] = ("", 0)
        self.wanted_agent_workers: int | None = None  # once a tool asked for another size than the first

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
            raise UsageError(
                "the job was started already", remedy="make a new SupervisorLauncher for another run"
            )
        self._epoll = select.epoll()
        for stream in (sys.stdout, sys.stderr):
            # What was printed before must not appear after what the workers print.
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()
        try:
            self._launch()
            deadline = self._clock.now() + _UP_SECONDS
            while not self.address[1] and self._outcome is None:
                left = deadline - self._clock.now()
                if left < 0:
                    raise PeerLostError("the supervisor did not come up", remedy="its output above says why")
                self._turn(left)
        except BaseException:
            self.close()
            raise

    def wait(self, timeout: float | None = None) -> JobOutcome | None:
        """Return how the job ended, with descriptors for the caller; None when it has not within `timeout`
        seconds."""
        deadline = float("inf") if timeout is None else self._clock.now() + timeout
        while True:
            with self._lock:
                if self._outcome is not None:
                    outcome, self._outcome = self._outcome, None
                    self._reap()
                    return outcome
                left = deadline - self._clock.now()
                if not self._turn(max(0.0, min(left, _SLICE_SECONDS))) and left <= 0:
                    return None

    def stop(self, reason: str) -> None:
        """Have the job finish its step, save, and end."""
        self._request("stop", reason=reason)

    def scale(self, workers: int) -> None:
        """Have the job continue with this number of workers."""
        self._request("scale", workers=workers)

    def kill(self) -> None:
        """End everything at once; nothing is saved."""
        self._in_a_row = MAX_RESTARTS
        self._send("kill", reason="killed by the caller")
        with self._lock:
            deadline = self._clock.now() + _KILL_SECONDS
            with contextlib.suppress(PeerLostError):
                while self._outcome is None and self._process is not None and self._clock.now() < deadline:
                    self._turn(max(0.0, deadline - self._clock.now()))
            if self._process is not None and self._process.poll() is None and self._outcome is None:
                self._process.kill()
            self._kill_workers()

    def close(self) -> None:
        """End what is left, and close every descriptor."""
        if self._process is not None and self._outcome is None and self._process.poll() is None:
            self.kill()
        self._kill_workers()
        self._reap()
        if self._outcome is not None:
            fd_messages.close_all(self._outcome.descriptors)
            self._outcome = None
        if self._epoll is not None:
            self._epoll.close()
            self._epoll = None

    def _launch(self) -> None:
        """Start a supervisor process and send it all that it needs."""
        if not sys.executable:
            raise UnavailableError(
                "this Python does not know its own executable, so no supervisor can be started",
                remedy="set sys.executable to the path of a Python with Paceline installed",
            )
        check_loopback()
        self._attempt += 1
        self._started_at = self._clock.now()
        if self._server is None or not self._server.is_alive():
            self._server = fork_server_client.fork_server()
        control, watch = self._server.lend()
        ours, theirs = fd_messages.pair()
        flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
        paths = fork_server_client.import_paths()
        try:
            self._process = subprocess.Popen(
                [sys.executable, *flags, "-c", _BOOT, str(theirs.fileno()), *paths],
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
        self._send_job(control, watch)

    def _send_job(self, control: int, watch: int) -> None:
        assert self._socket is not None
        assert self._server is not None
        job = self._job
        order = launch.order_from_caller(job.entry, 1, job.preload, job.threads, {})
        spec = memfd_pickle.dump(JobSpec(job, order, self._attempt, self._server.pid))
        # Sent with the job: whatever becomes of this process, the run counts as alive from now on.
        lock = liveness_lock.acquire(job.folder)
        locks = () if lock is None else (lock,)
        # A supervisor that died at once is noticed by `_turn`.
        with contextlib.suppress(ConnectionError):
            jobs.send(self._socket, "job", (spec, self._payload, control, watch, *locks))
            for member, worker in self._kept.items():
                jobs.send(self._socket, "kept", worker.descriptors(), member=member, pid=worker.pid)
            jobs.send(self._socket, "begin")
            for kind, fields in list(self._requests.items()):
                jobs.send(self._socket, kind, **fields)
        fd_messages.close_all([spec, *locks])

    def _turn(self, seconds: float) -> bool:
        """Wait for a message or for the end of the supervisor, and handle it; False when neither came."""
        if self._epoll is None or self._process is None or self._socket is None:
            raise UsageError("the job was not started, or is over", remedy="call start() first")
        ready = {descriptor for descriptor, _ in self._epoll.poll(min(seconds, 3600.0))}
        # What the supervisor sent before it ended comes first.
        if self._socket.fileno() in ready:
            message = jobs.receive(self._socket)
            if message is not None:
                self._receive(*message)
                return True
        if ready:
            self._restart()
        return bool(ready)

    def _receive(self, kind: str, fields: dict[str, Any], descriptors: tuple[int, ...]) -> None:
        match kind:
            case "up":
                self.address = str(fields["host"]), int(fields["port"])
            case "agents":
                self.wanted_agent_workers = int(fields["workers"])
            case "keep":
                self._drop(int(fields["member"]))
                self._kept[int(fields["member"])] = WorkerProcess.adopt(int(fields["pid"]), descriptors)
            case "drop":
                self._drop(int(fields["member"]))
            case "error":
                self._in_a_row = MAX_RESTARTS
                self._kill_workers()
                self._reap()
                raise jobs.load(descriptors[0])
            case "ended":
                self._outcome = jobs.unpack_outcome(descriptors)
            case _:
                fd_messages.close_all(descriptors)

    def _restart(self) -> None:
        """Start the next supervisor; the workers train on meanwhile."""
        calm = self._clock.now() - self._started_at > _CALM_SECONDS
        self._in_a_row = 1 if calm else self._in_a_row + 1
        self._reap()
        code = self._exit_code
        how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        if self._in_a_row > MAX_RESTARTS:
            self._kill_workers()
            raise PeerLostError(
                f"the supervisor {how}, the last of {self._attempt}; the job is over",
                remedy="its output above says why; the newest checkpoint of the run can be resumed",
            )
        self._launch()

    def _reap(self) -> None:
        """Wait for the end of the supervisor process; what it left here stays."""
        if self._process is None:
            return
        try:
            self._exit_code = self._process.wait(_KILL_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._exit_code = self._process.wait()
        assert self._socket is not None
        self._socket.setblocking(False)
        with contextlib.suppress(OSError):
            while (message := jobs.receive(self._socket)) is not None and message[0] != "error":
                self._receive(*message)
        self._socket.close()
        os.close(self._watch)
        self._process, self._socket, self._watch = None, None, -1
        if self._server is not None:
            self._server.lent -= 1

    def _request(self, kind: str, **fields: Any) -> None:
        self._requests[kind] = fields  # for a supervisor that takes over, too
        self._send(kind, **fields)

    def _send(self, kind: str, **fields: Any) -> None:
        if self._socket is not None:
            with contextlib.suppress(ConnectionError):
                jobs.send(self._socket, kind, **fields)

    def _kill_workers(self) -> None:
        """Kill workers that have no supervisor."""
        for member, worker in list(self._kept.items()):
            # By way of its fork server too, which takes along what the worker has started.
            with socket.socket(fileno=os.dup(worker.fileno())) as server, contextlib.suppress(OSError):
                engine_messages.send(server, EngineMessage(engine_messages.KILL))
            worker.kill()
            self._drop(member)

    def _drop(self, member: int) -> None:
        if member in self._kept:
            self._kept.pop(member).close()
