"""Records of workers, one for each: its process, its connection, its last messages.

A record is one incarnation of a worker, a member: the replacement of a worker has the same slot and another
member number. The table sends messages and acknowledgements; it decides nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, final

from paceline.control import channel, messages
from paceline.control.field_types import Progress
from paceline.elastic.machine.settings import LOCAL_AGENT
from paceline.elastic.supervisor.connection import Connection
from paceline.engines.local.worker_handle import WorkerProcess

_MAX_FORMER: Final = 512


@final
@dataclass
class WorkerRecord:
    """One incarnation of a worker.

    received     the highest number of a message of this worker; `acked`: the highest that was acknowledged
    disconnected_at  since when the worker has no connection, after it had one
    prepare, view, stop   the last of each that was sent: sent again after a reconnect
    dismissal    set: the worker has to end; exit_by: until when
    expelled     no message of this worker counts
    predecessor  pid and host name as an earlier supervisor knew them
    inherited    an earlier supervisor started the process
    watched      the end of the process wakes the loop; exited_at: when it ended
    """

    member: int
    slot: int
    agent_id: int = LOCAL_AGENT
    process: WorkerProcess | None = None
    connection: Connection | None = None
    hello: messages.MemberHello | None = None
    heartbeat: messages.Heartbeat | None = None
    heartbeat_at: float = 0.0
    progress: Progress | None = None
    received: int = 0
    acked: int = 0
    disconnected_at: float | None = None
    disconnect_reason: str = ""
    prepare: messages.Prepare | None = None
    view: messages.View | None = None
    stop: messages.Stop | None = None
    dismissal: messages.Dismissed | None = None
    exception: messages.WorkerException | None = None
    expelled: bool = False
    finished: bool = False
    predecessor: tuple[int, str] = (0, "")
    inherited: bool = False
    exit_by: float = float("inf")
    watched: bool = False
    exited_at: float = float("inf")

    @property
    def pid(self) -> int:
        if self.process is not None and self.process.pid:
            return self.process.pid
        return self.hello.pid if self.hello is not None else self.predecessor[0]

    @property
    def hostname(self) -> str:
        return self.hello.hostname if self.hello is not None else self.predecessor[1]

    @property
    def phase(self) -> str:
        return self.heartbeat.phase if self.heartbeat is not None else "start"


@final
class WorkerRecords:
    """`live` are workers whose process runs or may run, by member; the latest of the others are kept for
    reports about them."""

    def __init__(self) -> None:
        self.live: dict[int, WorkerRecord] = {}
        self._former: dict[int, WorkerRecord] = {}

    def find(self, member: int) -> WorkerRecord:
        """Return the record of a live or former worker; an empty one where the number is not known."""
        return self.live.get(member) or self._former.get(member) or WorkerRecord(member, -1)

    def retire(self, record: WorkerRecord) -> None:
        """Move the record of an ended process to the former ones."""
        self.live.pop(record.member, None)
        self._former[record.member] = record
        if len(self._former) > _MAX_FORMER:
            del self._former[next(iter(self._former))]

    def send(self, members: Iterable[int], message: messages.ControlMessage) -> list[WorkerRecord]:
        """Send one message to the live ones of these members, and return them. A member without a connection
        is among them: the caller keeps what has to be sent again."""
        frame = channel.frame(message)
        records = [record for member in members if (record := self.live.get(member)) is not None]
        for record in records:
            if record.connection is not None:
                record.connection.send_frame(frame)
        return records

    def ack(self, record: WorkerRecord) -> None:
        """Acknowledge all messages of a worker; to be called once what they say is in the journal."""
        if record.received > record.acked and record.connection is not None:
            record.acked = record.received
            record.connection.send(messages.Ack(number=record.received))

    def ack_process(self, process: tuple[int, int]) -> None:
        """Acknowledge all messages of the worker with this rank and pid."""
        for record in self.live.values():
            if (record.slot, record.pid) == process:
                self.ack(record)
