"""The agent: a host's part in a job. Gets the payload, starts workers when asked, reports how they end.

The agent ends with the job, and its workers end with it. What the supervisor sends starts code here, so it
is carried out only where it carries the tag of a session that was keyed by the job's secret: a host on the
path that passes the proof on cannot add an AgentAccepted, a PayloadChunk or an AgentStart. When the
connection is cut, workers train on and the agent reconnects under its number; when the supervisor stays away
for the job's patience, workers leave by themselves, and the agent after them.
"""

from __future__ import annotations

import dataclasses
import os
import selectors
import signal
from collections.abc import Callable
from typing import Final, final

from paceline.control import messages
from paceline.control.channel import Channel, pause_after_drops
from paceline.control.spool import STOPPED_EXIT_CODE, SUPERVISOR_LOST_EXIT_CODE
from paceline.control.worker_options import WORKER_PRELOAD, AgentLaunch
from paceline.core import fd_messages
from paceline.core.clock import Clock, MonotonicClock
from paceline.core.errors import PacelineError, RendezvousError, WireError
from paceline.core.host import host_identity, host_name
from paceline.core.listen_address import ANY_PORT, ListenAddress
from paceline.core.process_state import is_stopped_or_frozen
from paceline.core.sandbox_fallbacks import memory_file
from paceline.core.tls import Tls
from paceline.core.wording import counted
from paceline.elastic.supervisor.agents import payload_digest
from paceline.elastic.supervisor.process_probe import PROBE_POLL_SECONDS, StackProbe
from paceline.elastic.supervisor.tool_client import open_channel
from paceline.elastic.supervisor.worker_exits import describe_exit
from paceline.elastic.supervisor.worker_files import SentFiles
from paceline.engines.local import fork_server_client, launch
from paceline.engines.local.oom_detection import OomWatch
from paceline.engines.local.worker_handle import WorkerProcess

_CONNECT_SECONDS: Final = 10.0
_RECONNECT_SECONDS: Final = 3.0
_SAVE_SECONDS: Final = 600.0  # after which workers that do not end without a supervisor are killed
_PAUSE_SECONDS: Final = 0.2
_MAX_PAUSE_SECONDS: Final = 10.0
_END_SECONDS: Final = 30.0
_EXIT_SECONDS: Final = 0.5  # within which the fork server reports the exit status of an ended process


@final
@dataclasses.dataclass(eq=False)
class Agent:
    """One host's part in a job. `run` returns an exit code: 0 the job is over or this host left, 1 this
    host is refused, 76 the supervisor is gone. `first_wait`: seconds to wait for a job that does not listen
    yet; `until_finished`: 75 in place of 0 where the job ends, or this host leaves it, before its training
    has come to its end, and 76 where no job listened within `first_wait`."""

    address: tuple[str, int]
    secret: bytes
    workers: int
    tls: Tls | None = None
    say: Callable[[str], object] = lambda text: None
    listening: ListenAddress = ANY_PORT
    first_wait: float = 0.0
    until_finished: bool = False
    clock: Clock = dataclasses.field(default_factory=MonotonicClock)
    selector: selectors.BaseSelector = dataclasses.field(default_factory=selectors.DefaultSelector)

    def __post_init__(self) -> None:
        self._reached_at = ""
        self._channel: Channel | None = None
        self._disconnect_reason = ""
        self._attempts = 0  # connections since the supervisor last accepted this agent
        self._away_since: float | None = None
        self._workers: dict[int, WorkerProcess] = {}
        self._probes: dict[int, StackProbe] = {}
        self._ended_at: dict[int, float] = {}  # of processes whose exit status has not come
        self._oom = OomWatch()
        self._files = SentFiles()
        self._unsent: list[messages.ControlMessage] = []
        self._number = 0
        self._accepted: messages.AgentAccepted | None = None
        self._launch = AgentLaunch(entry="")
        self._payload = -1
        self._has_payload = False
        self._waiting: list[messages.AgentStart] = []
        self._end: messages.AgentEnd | None = None
        self._leaving = False

    def run(self) -> int:
        """Take part until the job is over, or this host has left it."""
        try:
            # Takes longer than all else before the first worker: while this agent connects, or waits for a
            # job that does not listen yet.
            launch.import_ahead(WORKER_PRELOAD)
            if code := self._connect_first():
                return code
            has_told = False
            while self._end is None:
                if self._leaving and not has_told:
                    has_told = True
                    self.say("this host leaves the job at the end of the step")
                if self._leaving and not self._workers:
                    self._send(self._hello(0))
                    self.say("this host has left the job")
                    # 0 would tell the engine that no other host is needed in the place of this one.
                    return STOPPED_EXIT_CODE if self.until_finished else 0
                if self._channel is None and not self._reconnect():
                    self.say("the supervisor is gone and the workers have ended")
                    return SUPERVISOR_LOST_EXIT_CODE
                self._turn(1.0)
            is_refused = self._end.code not in (0, STOPPED_EXIT_CODE)
            what = "this host is refused" if is_refused else "the job has ended"
            self.say(f"{what}: {self._end.reason}")
            self._wait_for_workers()
            return self._end.code if is_refused or self.until_finished else 0
        finally:
            self._close()

    @property
    def has_connected(self) -> bool:
        """Whether the supervisor was reached, now or before."""
        return self._attempts > 0

    def leave(self) -> None:
        """Have the workers leave at the next step boundary, then leave. May be called by a signal handler."""
        self._leaving = True
        for process in self._workers.values():
            process.signal(signal.SIGTERM)

    def _connect_first(self) -> int:
        """Connect; a job that does not listen yet is waited for. Return 0, or with `until_finished` the exit
        code of an agent that found none."""
        deadline = self.clock.now() + self.first_wait
        while True:
            try:
                self._connect(_CONNECT_SECONDS)
                return 0
            except RendezvousError as error:
                is_absent = bool(error.facts.get("absent"))
                if self._leaving or self.clock.now() >= deadline or not is_absent:
                    if not (is_absent and self.until_finished):
                        raise
                    self.say(error.message)
                    # 1 would tell the engine that this agent failed, and too many such end the run.
                    return STOPPED_EXIT_CODE if self._leaving else SUPERVISOR_LOST_EXIT_CODE
            self.clock.sleep(_PAUSE_SECONDS)

    def _connect(self, seconds: float) -> None:
        opened = open_channel(self.address, self.secret, self.tls, seconds, self.clock)
        self._attempts += 1
        opened.send(self._hello(self.workers))
        self._channel = opened
        self._files.restart()
        self._send_waiting()
        self._reached_at = self.listening.address(opened.own_host())
        self.selector.register(opened, selectors.EVENT_READ, None)

    def _hello(self, workers: int) -> messages.AgentHello:
        # Without the payload this agent joins as a new one, so that it is sent.
        number = self._number if self._has_payload else 0
        return messages.AgentHello(
            workers=workers, host=host_identity(), hostname=host_name(), pid=os.getpid(), agent=number
        )

    def _reconnect(self) -> bool:
        """Connect again; False once the supervisor stayed away and no worker is left."""
        if self._away_since is None:
            self._away_since = self.clock.now()
            self.say(f"the connection to the supervisor is cut: {self._disconnect_reason}")
        again_at = self.clock.now() + pause_after_drops(self._attempts, _PAUSE_SECONDS, _MAX_PAUSE_SECONDS)
        while True:
            if self.clock.now() >= again_at:
                try:
                    self._connect(_RECONNECT_SECONDS)
                    return True
                except RendezvousError:
                    again_at = self.clock.now() + _PAUSE_SECONDS
            self._turn(_PAUSE_SECONDS)
            away = self.clock.now() - self._away_since
            patience = self._launch.options.patience
            if not self._workers and (away > patience or self._leaving):
                return False
            if away > patience + _SAVE_SECONDS:
                for process in self._workers.values():
                    process.kill()

    def _turn(self, seconds: float) -> None:
        """Wait for messages and ends of processes, and handle them."""
        if not self.selector.get_map():
            self.clock.sleep(seconds)
            return
        if self._channel is not None:
            mask = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._channel.wants_write else 0)
            if self.selector.get_key(self._channel).events != mask:
                self.selector.modify(self._channel, mask, None)
        for key, _ in self.selector.select(PROBE_POLL_SECONDS if self._probes else seconds):
            if key.data is None:
                self._receive()
            else:
                self._attend(key.data)
        now = self.clock.now()
        for member, process in list(self._workers.items()):
            if process.pid:
                self._oom.note(process.pid)
            ended_at = self._ended_at.setdefault(member, now) if process.pid and process.has_ended else now
            if now - ended_at >= _EXIT_SECONDS:
                # The fork server reports the exit status, unless it is gone itself.
                self._attend(member, gone=True)
        for member, probe in list(self._probes.items()):
            if probe.is_over(now):
                self._send_stack(member)

    def _receive(self) -> None:
        opened = self._channel
        if opened is None:
            return
        opened.flush()
        self._send_waiting()
        for _, message in opened.receive():
            self._handle(message)
        if opened.closed:
            self._disconnect_reason = opened.closed
            self.selector.unregister(opened)
            opened.close()
            self._channel = None

    def _handle(self, message: messages.ControlMessage) -> None:
        match message:
            case messages.AgentAccepted():
                self._accept(message)
            case messages.PayloadChunk():
                self._add_chunk(message)
            case messages.AgentStart():
                if not self._has_payload:
                    self._waiting.append(message)
                elif not self._leaving:
                    self._start(message)
            case messages.StackRequest(member=member, probe=True):
                process = self._workers.get(member)
                stopped = is_stopped_or_frozen(process.pid) if process is not None and process.pid else None
                if stopped is not None:
                    self._send(messages.StackReply(member=member, state="", frames=(), stopped=stopped))
            case messages.StackRequest(member=member):
                if member in self._workers:
                    self._probes[member] = StackProbe(self._workers[member], self.clock.now())
                    self._probes[member].wake()
            case messages.AgentNotice(text=text):
                self.say(text)
            case messages.AgentEnd(member=-1):
                self._end = message
            case messages.AgentEnd(member=member):
                if member in self._workers:
                    self._workers[member].kill()
            case _:
                raise WireError(f"the supervisor sent a {message.kind} to an agent")

    def _accept(self, accepted: messages.AgentAccepted) -> None:
        if self._accepted is None:
            where = f"{self.address[0]}:{self.address[1]}"
            self.say(f"joined the job at {where}, with {counted(self.workers, 'worker')}")
        else:
            self.say("the supervisor is back")
        self._attempts, self._away_since = 0, None
        is_same = self._accepted is not None and accepted.digest == self._accepted.digest
        self._accepted, self._number = accepted, accepted.agent
        self._launch = AgentLaunch.from_plain(accepted.options)
        if self._has_payload and is_same:
            return
        if self._payload >= 0:
            os.close(self._payload)
        self._payload = memory_file("paceline-payload")
        self._has_payload = False
        self._waiting.clear()  # of an earlier connection

    def _add_chunk(self, chunk: messages.PayloadChunk) -> None:
        accepted, end = self._accepted, chunk.offset + len(chunk.data)
        if accepted is None or self._has_payload or end > accepted.payload_bytes:
            raise WireError("a chunk of a payload that was not announced")
        os.pwrite(self._payload, chunk.data, chunk.offset)
        if end < accepted.payload_bytes:
            return
        if payload_digest(self._payload) != accepted.digest:
            raise WireError("the job's payload was damaged on the way", remedy="join again")
        self._has_payload = True
        for start in self._waiting:
            self._start(start)
        self._waiting.clear()

    def _start(self, start: messages.AgentStart) -> None:
        given = self._launch
        options = dataclasses.replace(
            given.options,
            member=start.member,
            slot=start.slot,
            attempt=start.attempt,
            address=self.address,
            secret=self.secret.hex(),
            folder="",
            tls=self.tls,
            # The supervisor reaches this host at the address of the control connection: so do members.
            listen=self._reached_at,
            ports=self.listening.ports or given.options.ports,
        )
        order = dataclasses.replace(
            launch.order_from_caller(given.entry, 1, given.preload, given.threads, options.to_plain()),
            first_rank=start.slot,
            world_size=max(1, self.workers),
            outlives_server=True,
        )
        try:
            process = WorkerProcess.start(order, self._payload)
        except (PacelineError, OSError) as error:
            reason = f"it could not be started: {error}"
            self._send(messages.WorkerExited(member=start.member, status=1, reason=reason))
            return
        self._workers[start.member] = process
        self.selector.register(process, selectors.EVENT_READ, start.member)

    def _attend(self, member: int, *, gone: bool = False) -> None:
        """Read what a worker's process reported, and send its end; `gone`: its exit status will not come."""
        process = self._workers[member]
        process.receive()
        if process.status is None and not process.done and not gone:
            return
        self._ended_at.pop(member, None)
        process.kill_orphans()
        if member in self._probes:
            self._send_stack(member)
        memory = False
        if process.refusal is not None:
            reason, status = f"it could not be started: {process.refusal.message}", 1
        else:
            status = process.status if process.status is not None else -signal.SIGKILL
            memory, reason = describe_exit(process, status, self._oom)
        returned, failed = process.release()
        travels = self._launch.options.returns_from_agents
        self._files.add(member, returned if travels else (), failed)
        if not travels:
            fd_messages.close_all(returned)
        self.selector.unregister(process)
        process.close()
        del self._workers[member]
        self._unsent.append(messages.WorkerExited(member=member, status=status, reason=reason, memory=memory))
        self._send_waiting()

    def _send_stack(self, member: int) -> None:
        probe = self._probes.pop(member)
        self._send(messages.StackReply(member=member, state=probe.state, frames=tuple(probe.frames())))

    def _send(self, message: messages.ControlMessage) -> None:
        if self._channel is None or self._channel.closed:
            self._unsent.append(message)
        else:
            self._channel.send(message)

    def _send_waiting(self) -> None:
        """Send files of workers that have ended, and the messages that wait; the end of a worker after its
        files."""
        opened = self._channel
        if opened is None or opened.closed:
            return
        self._files.send(opened)
        held = []
        for message in self._unsent:
            if isinstance(message, messages.WorkerExited) and self._files.holds(message.member):
                held.append(message)
            else:
                opened.send(message)
        self._unsent[:] = held

    def _wait_for_workers(self) -> None:
        """Wait for workers that the supervisor dismissed. Those that do not end are killed by `_close`, and
        so are those whose code has not begun: their imports may take minutes, and they hold nothing."""
        deadline = self.clock.now() + _END_SECONDS
        while self.clock.now() < deadline:
            can_send = self._channel is not None and not self._channel.closed
            if not (self._unsent and can_send) and not any(one.is_ready for one in self._workers.values()):
                return
            self._turn(0.2)

    def _close(self) -> None:
        for process in self._workers.values():
            process.kill()
        for process in self._workers.values():
            process.close()
        self._files.close()
        if self._channel is not None:
            self._channel.close()
        self.selector.close()
        if self._payload >= 0:
            os.close(self._payload)
        fork_server_client.shutdown()
