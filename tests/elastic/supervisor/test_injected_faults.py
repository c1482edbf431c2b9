"""Faults on demand as a supervisor knows them: written once, remembered, told to the rank's next life."""

from __future__ import annotations

from pathlib import Path

from tests.elastic.supervisor.shell_parts import Parts, new_writer

from paceline.control.messages import Ack, InjectionRequest
from paceline.core import events, journal
from paceline.elastic.supervisor.control_port import RefusedPeers
from paceline.elastic.supervisor.journal_writer import JournalWriter
from paceline.elastic.supervisor.member_handler import InjectedFaults
from paceline.elastic.supervisor.supervisor_recovery import SnapshotFile, SupervisorSnapshot
from paceline.elastic.supervisor.worker_record import WorkerRecord, WorkerRecords


class Known:
    """As much of a supervisor as hears of faults; what it saves the next one finds."""

    def __init__(self, folder: Path, acked: list[int]) -> None:
        self.file = SnapshotFile(folder)
        snapshot = self.file.load() or SupervisorSnapshot()
        self.journal = new_writer(folder / "journal.jsonl")
        self.records = WorkerRecords()
        self.acked = acked
        self.faults = InjectedFaults(set(snapshot.injected), self.journal, self.records, self.save)

    def save(self) -> None:
        self.file.save(SupervisorSnapshot(injected=self.faults.known))

    def announced(self, parts: Parts, member: int, slot: int, request: InjectionRequest) -> None:
        """A worker announces a fault; whether it is acknowledged is in `acked`."""
        connection, peer = parts.connect(RefusedPeers(parts.clock))
        record = WorkerRecord(member, slot, connection=connection, received=1)
        self.faults.announced(record, request)
        self.acked += [member for message in peer.received() if isinstance(message, Ack)]
        connection.close()


def said(index: int, before: int = 0, time: float = 1.0, rank: int = 2) -> InjectionRequest:
    event = events.FaultInjected(time=time, rank=rank, step=5, phase="data", fault="kill", index=index)
    return InjectionRequest(index=index, before=before, line=events.to_json(event))


def test_what_came_is_known_to_the_next_supervisor_and_written_once(tmp_path, parts):
    acked: list[int] = []
    first = Known(tmp_path, acked)
    first.announced(parts, 7, 2, said(0))
    first.announced(parts, 7, 2, said(3))
    first.journal.close()
    second = Known(tmp_path, acked)
    # Its word did not arrive, so the worker says it again: at its next chance, so in another line.
    second.announced(parts, 7, 2, said(3, time=2.0))
    second.announced(parts, 8, 2, said(3, time=3.0))  # a fault with `times`, in the next life
    second.announced(parts, 8, 2, said(3, before=1, time=4.0))
    second.announced(parts, 4, 1, said(0, rank=1, time=5.0))
    second.journal.close()
    assert acked == [7, 7, 7, 8, 8, 4]
    assert second.faults.of(2) == (0, 3, 3, 3)
    assert second.faults.of(1) == (0,)
    assert second.faults.of(0) == ()
    written = [event.time for event in journal.iterate(tmp_path / "journal.jsonl")]
    assert written == [1.0, 1.0, 3.0, 4.0, 5.0]


def test_nothing_is_acked_while_the_disk_is_full(tmp_path, parts, monkeypatch):
    acked: list[int] = []
    one = Known(tmp_path, acked)
    with monkeypatch.context() as patched:
        patched.setattr(JournalWriter, "complete", property(lambda self: False))
        one.announced(parts, 7, 2, said(0))
    assert acked == []
    one.announced(parts, 7, 2, said(0))
    assert acked == [7]
    one.journal.close()
