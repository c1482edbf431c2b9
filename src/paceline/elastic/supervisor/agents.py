"""Agents: other hosts that joined the job. They get the payload, and start workers when they are asked.

This is the table of agents and all that is sent to them; member_handler.py handles what they send. An agent
has a number for as long as the job knows it. When its connection closes, it has `agent_seconds` to reconnect
under that number, and its workers train on meanwhile: they have connections to the supervisor themselves.
After that the agent is given up, and its workers with it; should it come back, it joins as a new one.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, field
from typing import Final, final

from paceline.control.messages import (
    AgentAccepted,
    AgentEnd,
    AgentHello,
    ControlMessage,
    PayloadChunk,
    StackRequest,
)
from paceline.control.spool import STOPPED_EXIT_CODE
from paceline.control.worker_options import AgentLaunch
from paceline.elastic.machine.machine_events import AgentJoined, AgentLost
from paceline.elastic.supervisor.component_ports import EventLoop
from paceline.elastic.supervisor.connection import Connection
from paceline.elastic.supervisor.control_port import RefusedPeers

PAYLOAD_CHUNK_BYTES: Final = 1 << 20


@final
@dataclass
class _AgentRecord:
    """`give_up_at` is finite while the agent has no connection. Messages wait in `unsent` until the agent is
    connected and has the payload: a start needs it."""

    number: int
    hello: AgentHello
    connection: Connection | None
    give_up_at: float = float("inf")
    unsent: list[ControlMessage] = field(default_factory=list)


@final
@dataclass(eq=False)
class Agents:
    """The table of agents, and what is sent to them. `payload`: descriptor of what workers run; `launch`:
    what agents need beside it; `patience`: seconds that an agent may be away."""

    loop: EventLoop
    refused: RefusedPeers
    payload: int
    launch: AgentLaunch
    patience: float
    _records: dict[int, _AgentRecord] = field(default_factory=dict)
    _digest: str = ""
    _last_number: int = 0

    @property
    def due(self) -> float:
        return min((record.give_up_at for record in self._records.values()), default=float("inf"))

    def overdue(self, now: float) -> list[tuple[int, str]]:
        """Return number and host name of the agents that were away for too long."""
        return [
            (record.number, record.hello.hostname)
            for record in self._records.values()
            if record.give_up_at <= now
        ]

    def join(self, connection: Connection, hello: AgentHello) -> None:
        """Accept an agent: under its number where it reconnects, else as a new one."""
        record = self._records.get(hello.agent)
        if record is None:
            self._last_number += 1
            record = _AgentRecord(self._last_number, hello, connection)
            self._records[record.number] = record
        elif record.connection is not None:
            # Its host reconnected before the end of the old connection was seen.
            record.connection.close()
        record.hello, record.connection, record.give_up_at = hello, connection, float("inf")
        self._accept(record, connection)
        self.loop.emit(AgentJoined(record.number, hello.workers, hello.hostname))

    def expect(self, number: int) -> None:
        """Wait for an agent that an earlier supervisor knew to reconnect under this number."""
        hello = AgentHello(workers=0, host="", hostname="", pid=0)
        give_up_at = self.loop.clock.now() + self.patience
        self._last_number = max(self._last_number, number)
        self._records.setdefault(number, _AgentRecord(number, hello, None, give_up_at))

    def number_of(self, connection: Connection) -> int | None:
        """Return the number of the agent at the other end; None where it was given up."""
        return next((r.number for r in self._records.values() if r.connection is connection), None)

    def disconnected(self, number: int) -> None:
        """Give the agent time to reconnect."""
        record = self._records[number]
        record.connection, record.give_up_at = None, self.loop.clock.now() + self.patience

    def send(self, number: int, message: ControlMessage) -> bool:
        """Send, now or once the agent is connected and has the payload; False: there is no such agent."""
        record = self._records.get(number)
        if record is None:
            return False
        if record.connection is None or record.connection.refill is not None:
            record.unsent.append(message)
        else:
            record.connection.send(message)
        return True

    def request(self, number: int, request: StackRequest) -> bool:
        """Send a request whose answer is of use only now; False: the agent cannot be asked now."""
        return not self.is_away(number) and self.send(number, request)

    def is_away(self, number: int) -> bool:
        """Return whether the agent has no connection."""
        record = self._records.get(number)
        return record is None or record.connection is None

    def remove(self, number: int, reason: str, *, refuse: bool = False) -> bool:
        """Forget an agent; False: there is no such agent. `refuse`: send it away with this reason."""
        record = self._records.pop(number, None)
        if record is None:
            return False
        if refuse and record.connection is not None:
            self.refused.refuse(record.connection, AgentEnd(member=-1, reason=reason, code=1))
        self.loop.emit(AgentLost(number, reason))
        return True

    def close(self, reason: str, *, unfinished: bool = False) -> None:
        """End all agents: the job is over, and may be started again where it did not come to its end."""
        code = STOPPED_EXIT_CODE if unfinished else 0
        for record in self._records.values():
            if record.connection is not None:
                record.connection.send(AgentEnd(member=-1, reason=reason, code=code))
                record.connection.close()
        self._records.clear()

    def _accept(self, record: _AgentRecord, connection: Connection) -> None:
        size = os.fstat(self.payload).st_size
        self._digest = self._digest or payload_digest(self.payload)
        launch = self.launch.to_plain()
        connection.send(
            AgentAccepted(agent=record.number, payload_bytes=size, digest=self._digest, options=launch)
        )
        if record.hello.agent:
            # It reconnects, and has the payload.
            self._send_unsent(record, connection)
            return
        offset = 0

        def refill() -> None:
            # A chunk at a time, whenever the one before is sent: a payload may be larger than what a
            # connection may have waiting.
            nonlocal offset
            while offset < size and not connection.channel.wants_write:
                chunk = os.pread(self.payload, PAYLOAD_CHUNK_BYTES, offset)
                connection.send(PayloadChunk(offset=offset, data=chunk))
                offset += len(chunk)
            if offset >= size:
                connection.refill = None
                self._send_unsent(record, connection)

        connection.refill = refill
        refill()

    def _send_unsent(self, record: _AgentRecord, connection: Connection) -> None:
        for message in record.unsent:
            connection.send(message)
        record.unsent.clear()


def payload_digest(descriptor: int) -> str:
    """Return the SHA-256 of a payload file, for both ends of its transfer."""
    digest = hashlib.sha256()
    offset = 0
    while data := os.pread(descriptor, PAYLOAD_CHUNK_BYTES, offset):
        digest.update(data)
        offset += len(data)
    return digest.hexdigest()
