"""The control port, and connections that have proved the secret and have not said what they are: a worker, an
agent, or a tool.

The first message decides. A peer that is refused keeps its connection for a moment, so that the reason
arrives before the connection closes. Tools (`paceline scale`, `stop` and `status`) are answered here.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final, final

from paceline.control.message_codec import ForeignVersion
from paceline.control.messages import (
    AgentEnd,
    AgentHello,
    ControlMessage,
    Dismissed,
    MemberHello,
    ToolReply,
    ToolRequest,
    View,
)
from paceline.control.run_status import RunStatus, WorkerFacts
from paceline.core import limit_errors
from paceline.core.clock import Clock
from paceline.core.errors import PacelineError, RendezvousError, ResourceError, UsageError, WireError
from paceline.core.listen_address import ANY_PORT, ListenAddress, resolves_to_loopback
from paceline.core.untrusted import printable
from paceline.core.wording import counted
from paceline.elastic.machine.machine_events import ScaleRequested, StopRequested
from paceline.elastic.supervisor.component_ports import EventLoop
from paceline.elastic.supervisor.connection import Connection
from paceline.elastic.supervisor.worker_record import WorkerRecord

PORT_RETRY_SECONDS: Final = 5.0
_AGAIN_SECONDS: Final = 0.05
HELLO_SECONDS: Final = 5.0
_MAX_REPORTS: Final = 64


def listen(
    host: str,
    port: int,
    clock: Clock,
    preferred: int = 0,
    listening: ListenAddress = ANY_PORT,
) -> socket.socket:
    """Open the listening socket. `preferred` is the port of the supervisor before this one, where other
    machines look for it: it is tried for some seconds, because the kernel may not have freed it yet."""
    if not listening.interface and (loopback := resolves_to_loopback(host)):
        raise UsageError(
            f"bind={host!r} stands for {loopback} on this host (see /etc/hosts): no other host could "
            "reach the control port there",
            remedy="give an address of the interface that the others reach (`ip address` lists them), or "
            "interface=; bind='127.0.0.1' where all workers run here",
        )
    until = clock.now() + PORT_RETRY_SECONDS
    while preferred:
        try:
            return listening.open(host, preferred)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or clock.now() >= until:
                break
        clock.sleep(_AGAIN_SECONDS)
    try:
        return listening.open(host, port)
    except OSError as error:
        trouble = error
    # A name that does not resolve: a plain OSError with the resolver's number, which is negative.
    unknown = trouble.errno is not None and trouble.errno < 0
    if unknown or trouble.errno == errno.EADDRNOTAVAIL:
        raise UsageError(
            f"the control port cannot listen at {host}: {trouble.strerror}",
            remedy="give an address of this host, or 0.0.0.0 for all of them",
        ) from trouble
    if port and trouble.errno == errno.EADDRINUSE:
        raise ResourceError(
            f"the supervisor cannot listen at {host}:{port}: another program does",
            remedy="choose another port, or 0 for any free one; `ss -tlnp` shows which program it is",
            limit=port,
        ) from trouble
    at = f"the supervisor cannot listen at {host}" + (f":{port}" if port else "")
    raise limit_errors.explain_os_error(trouble, at) from trouble


@dataclass(eq=False)
class _TimedConnections:
    """Owns connections for at most HELLO_SECONDS each: `_deadlines` are in the order in which they end."""

    clock: Clock
    _deadlines: dict[Connection, float] = field(default_factory=dict, kw_only=True)

    @property
    def due(self) -> float:
        return next(iter(self._deadlines.values()), float("inf"))

    def add(self, connection: Connection) -> None:
        connection.owner = self
        self._deadlines[connection] = self.clock.now() + HELLO_SECONDS

    def receive(self, connection: Connection, number: int, message: ControlMessage) -> None:
        """Ignore the message; a subclass handles it."""

    def disconnected(self, connection: Connection, reason: str) -> None:
        self._deadlines.pop(connection, None)

    def tick(self, now: float) -> None:
        """Close connections whose time is over."""
        for connection, deadline in list(self._deadlines.items()):
            if now < deadline:
                break
            del self._deadlines[connection]
            connection.close()

    def close(self) -> None:
        for connection in self._deadlines:
            connection.close()
        self._deadlines.clear()


@final
class RefusedPeers(_TimedConnections):
    """Connections that were refused: their messages are ignored."""

    def refuse(self, connection: Connection, reply: ControlMessage) -> None:
        """Send the last message of a connection, and close it a moment later."""
        connection.send(reply)
        self.add(connection)


@final
@dataclass(eq=False)
class PendingHellos(_TimedConnections):
    """Owns connections until their first message, which goes to one of the three handlers."""

    refused: RefusedPeers
    member: Callable[[Connection, MemberHello], None]
    agent: Callable[[Connection, AgentHello], None]
    tool: Callable[[ToolRequest], ToolReply]
    report: Callable[[PacelineError], None]
    _reported: set[tuple[str, str]] = field(default_factory=set)

    def receive(self, connection: Connection, number: int, message: ControlMessage) -> None:
        if isinstance(message, ToolRequest):
            # A tool may ask again, and its connection stays here.
            connection.send(self.tool(message))
            return
        if not isinstance(message, MemberHello | AgentHello | ForeignVersion):
            raise WireError(f"a {message.kind} message from a peer that has not said what it is")
        self._deadlines.pop(connection, None)
        match message:
            case MemberHello():
                self.member(connection, message)
            case AgentHello():
                self.agent(connection, message)
            case ForeignVersion():
                self._refuse_version(connection, message)

    def _refuse_version(self, connection: Connection, foreign: ForeignVersion) -> None:
        """Name the other version on both terminals. Every version understands these replies."""
        text = foreign.text
        reply: ControlMessage
        match foreign.what:
            case MemberHello.kind:
                reply = Dismissed(reason=text, code=1)
            case AgentHello.kind:
                reply = AgentEnd(member=-1, reason=text, code=1)
            case _:
                reply = ToolReply(done=False, text=text)
        self.refused.refuse(connection, reply)
        case = (connection.host, text)
        if case not in self._reported and len(self._reported) < _MAX_REPORTS:
            self._reported.add(case)
            self.report(
                RendezvousError(f"{connection.host}: {text}", remedy="use one version on all machines")
            )


def answer_tool(
    loop: EventLoop,
    refuse_size: Callable[[int], str | None],
    tell_status: Callable[[], RunStatus],
    request: ToolRequest,
) -> ToolReply:
    """Do what a tool asks for. `refuse_size` gives the reason why the job cannot have a number of workers, or
    None; `tell_status` what `paceline status` tells."""
    match request.what:
        case "scale":
            refusal = refuse_size(request.number)
            if refusal is not None:
                return ToolReply(done=False, text=refusal)
            loop.emit(ScaleRequested(request.number))
            size = counted(request.number, "worker")
            return ToolReply(done=True, text=f"the job is asked to have {size}")
        case "stop":
            loop.emit(StopRequested(printable(request.text) or "paceline stop"))
            return ToolReply(done=True, text="the job is asked to save and end")
        case "status":
            status = tell_status()
            text = f"{status.phase}, step {status.step}"
            return ToolReply(done=True, text=text, facts=status.to_plain())
    return ToolReply(done=False, text=f"the supervisor cannot {request.what} {request.number}")


def worker_facts(records: Iterable[WorkerRecord], view: View | None, now: float) -> Iterator[WorkerFacts]:
    """Yield what each worker does, by rank."""
    shards = dict(zip(view.members, view.shards, strict=True)) if view is not None else {}
    for record in sorted(records, key=lambda record: (record.slot, record.member)):
        yield WorkerFacts(
            rank=record.slot,
            member=record.member,
            pid=record.pid,
            host=record.hostname,
            place=record.agent_id,
            phase=record.phase,
            step=record.progress[0] if record.progress is not None else 0,
            shards=shards.get(record.member, ()),
            heard=round(now - record.heartbeat_at, 2) if record.heartbeat_at else None,
            shard_seconds=record.heartbeat.shard_seconds if record.heartbeat is not None else 0.0,
            rss=record.heartbeat.rss if record.heartbeat is not None else 0,
        )
