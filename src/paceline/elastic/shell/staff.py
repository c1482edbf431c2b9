"""The workers of a job: started here or by agents, taken in when they say hello, missed when they are gone.

A process that ended is reported at once, with how. A connection that closed while its process lives gets a
moment to come back. Must not decide who is replaced or when.
"""

from __future__ import annotations

import dataclasses
import selectors
import time
from collections import Counter, deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, final

from paceline.core.control.messages import Dismissed, Exited, Heard, Hello, Welcome
from paceline.core.errors import PacelineError
from paceline.core.events import Note, WorkerStarted
from paceline.elastic.model import HOME, HasRaised, Joined, Lost
from paceline.elastic.shell.connection import Connection
from paceline.elastic.shell.deaths import Deaths
from paceline.elastic.shell.hearing import Ear
from paceline.elastic.shell.likeness import Likeness
from paceline.elastic.shell.seats import Seat
from paceline.elastic.shell.unheard import take_in
from paceline.engines.local.worker import Worker

if TYPE_CHECKING:
    from paceline.elastic.supervisor import Supervisor

# A link tries again after 0.02 s; a process whose connection stays closed for longer is cut off or hangs.
RECONNECT_SECONDS: Final = 1.0
_EXIT_SECONDS: Final = 0.5
# A worker may be moved to another memory group at any time. So many are looked at in one turn, which takes a
# millisecond; the others follow in the next.
_NOTE_SECONDS: Final = 1.0
_NOTED_AT_ONCE: Final = 32
_FORMER: Final = 512
PATIENCE_SECONDS: Final = 60.0


@final
class Staff:
    """`seats` are workers whose process lives or may live, by member; `former` those of the recent past."""

    def __init__(self, supervisor: Supervisor, payload: int) -> None:
        self._supervisor = supervisor
        self._spec = supervisor.spec
        self._order = supervisor.spec.make_order
        self._payload = payload
        self.deaths = Deaths()
        self._next_note = time.monotonic() + _NOTE_SECONDS
        self._to_note: deque[int] = deque()
        self.seats: dict[int, Seat] = {}
        self.former: dict[int, Seat] = {}
        recalled = supervisor.recalled
        exact = bool(supervisor.spec.options.get("exact"))
        self.likeness = Likeness(recalled.fingerprint, recalled.model, exact=exact)
        self._pressing: set[int] = set()
        self._starts: Counter[int] = Counter()

    def find(self, member: int) -> Seat:
        """A worker that is or was here."""
        return self.seats.get(member) or self.former.get(member) or Seat(member, -1)

    @property
    def due(self) -> float:
        """When `tick` has something to do; cheap while nobody is pressing."""
        due = self._next_note
        for member in self._pressing:
            seat = self.seats.get(member)
            if seat is not None:
                due = min(due, seat.leave_by, self._cut_limit(seat))
        return due

    def tick(self, now: float) -> None:
        """Give up connections that stayed closed; kill who was to leave and has not."""
        for member in list(self._pressing):
            seat = self.seats.get(member)
            if seat is None:
                self._pressing.discard(member)
            elif seat.leave_by <= now:
                seat.leave_by = float("inf")
                self.kill(seat, "it was told to end and did not")
            elif self._cut_limit(seat) <= now:
                self._stayed_away(seat, now)
        if now >= self._next_note:
            self._next_note = now + _NOTE_SECONDS
            self._note_memory_groups()

    def _note_memory_groups(self) -> None:
        if not self._to_note:
            self._to_note.extend(self.seats)
        for _ in range(min(_NOTED_AT_ONCE, len(self._to_note))):
            seat = self.seats.get(self._to_note.popleft())
            if seat is not None and seat.worker is not None and seat.worker.pid:
                self.deaths.note(seat.worker.pid)

    def start(self, member: int, slot: int, place: int) -> None:
        """Start a worker, here or on another machine."""
        seat = Seat(member, slot, place)
        self.seats[member] = seat
        self._starts[slot] += 1
        if place != HOME:
            if not self._supervisor.places.start(place, member, slot, self._starts[slot]):
                self._end(seat, Lost(member, "preempted", "its machine is gone"))
            return
        options: dict[str, Any] = {**self._spec.options, **self._worker_options(member, slot)}
        order = dataclasses.replace(
            self._order,
            workers=1,
            options=options,
            first_rank=slot,
            world_size=self._spec.settings.workers,
            outlives_parent=True,
            outlives_server=True,
        )
        try:
            seat.worker = Worker.start(order, self._payload)
        except (PacelineError, OSError) as error:
            self._end(seat, Lost(member, "exit", f"it could not be started: {error}"))
            return
        self._attend(seat, seat.worker)

    def expect(self, members: Mapping[int, tuple[int, int]]) -> None:
        """Workers that an earlier supervisor started; the caller kept what belongs to them."""
        for member, (slot, place) in members.items():
            known = self._supervisor.recalled.processes.get(member, (0, ""))
            seat = Seat(member, slot, place, process=known, inherited=True)
            self.seats[member] = seat
            self._starts[slot] += 1
            kept = self._supervisor.caller.kept.pop(member, None)
            if kept is not None:
                seat.worker = Worker.adopt(*kept)
                self._attend(seat, seat.worker)
                if seat.worker.has_ended:
                    # How it ended may have been told to the supervisor before, and to nobody again.
                    self.cut(seat, "its process ended")
            elif place == HOME:
                self._end(seat, Lost(member, "crash", "it ended while no supervisor was there to see how"))

    def come(self, connection: Connection, hello: Hello) -> None:
        """A worker says hello."""
        seat = self.seats.get(hello.member)
        if seat is None or seat.expelled or seat.slot != hello.slot:
            self.refuse(connection, f"worker {hello.member} of rank {hello.slot} is not expected (any more)")
            return
        if seat.worker is not None and seat.worker.pid not in (0, hello.pid):
            self.refuse(connection, f"worker {hello.member} is process {seat.worker.pid}, not {hello.pid}")
            return
        difference = self.likeness.difference(hello)
        if difference:
            self.refuse(connection, difference, code=1)
            self._supervisor.chronicle.write(Note(time=time.time(), text=difference, rank=hello.slot))
            if seat.place != HOME:
                self._supervisor.places.expel(seat.place, difference)
            return
        self._seat(connection, seat, hello)

    def _seat(self, connection: Connection, seat: Seat, hello: Hello) -> None:
        first_time = seat.hello is None and hello.generation == 0
        if seat.connection is not None:
            seat.connection.close()
        seat.hello, seat.connection, seat.cut_at, seat.progress = hello, connection, None, hello.progress
        if seat.worker is not None:
            # A supervisor that died may have been the only one who had heard it.
            seat.worker.is_process(hello.pid)
            if not seat.worker.has_ended:
                self._watch_process(seat, seat.worker)
        connection.owner = Ear(self._supervisor, seat)
        if first_time:
            self._supervisor.chronicle.write(
                WorkerStarted(time=time.time(), rank=hello.slot, pid=hello.pid, host=hello.hostname)
            )
            if seat.worker is not None:
                self.deaths.note(hello.pid)
        patience = self._spec.options.get("patience", PATIENCE_SECONDS)
        connection.send(
            Welcome(
                heartbeat=self._spec.settings.heartbeat,
                patience=float(patience),
                injected=self._supervisor.injections.of(seat.slot),
            )
        )
        # What it was told last may have been lost with its connection. The machine asks members of a view
        # again; who is in none yet looks to it like one that has just come.
        again = (seat.stop, seat.view, seat.prepare) if hello.generation == 0 else (seat.stop,)
        for told in (*again, seat.goodbye):
            if told is not None:
                connection.send(told)
        self._supervisor.feed(Joined(hello.member, hello.slot, seat.place, hello.generation, hello.progress))

    def refuse(self, connection: Connection, reason: str, code: int = 0) -> None:
        """Send somebody away."""
        connection.send(Dismissed(reason=reason, code=code))
        self._supervisor.guests.part(connection)

    def cut(self, seat: Seat, why: str) -> None:
        """A member's connection closed."""
        seat.connection, seat.cut_at, seat.cut_why = None, time.monotonic(), why
        self._pressing.add(seat.member)

    def confirm(self, pid: int) -> None:
        """All that a process said so far is in the journal."""
        for seat in self.seats.values():
            if seat.pid == pid:
                self.confirm_seat(seat)

    def confirm_seat(self, seat: Seat) -> None:
        if seat.heard > seat.confirmed and seat.connection is not None:
            seat.confirmed = seat.heard
            seat.connection.send(Heard(number=seat.heard))

    def kill(self, seat: Seat, reason: str) -> None:
        """End a worker's process now."""
        if seat.worker is not None:
            seat.worker.kill()
        elif seat.place != HOME:
            self._supervisor.places.end(seat.place, seat.member, reason)

    def leave(self, seat: Seat, seconds: float) -> None:
        """It has so long to end by itself."""
        seat.leave_by = min(seat.leave_by, time.monotonic() + seconds)
        self._pressing.add(seat.member)

    def remote_exit(self, place: int, message: Exited) -> None:
        """The agent of this place reports how one of its workers ended."""
        seat = self.seats.get(message.member)
        if seat is not None and seat.place == place:
            self._ended(seat, message.status, message.reason, memory=message.memory)

    def place_gone(self, place: int) -> None:
        """A machine left, and nobody will tell how its workers ended."""
        for seat in [seat for seat in self.seats.values() if seat.place == place]:
            self._end(seat, None)

    def close(self) -> None:
        """Give back what is held. Workers that still live are not touched."""
        for seat in self.seats.values():
            if seat.connection is not None:
                seat.connection.close()
            if seat.worker is not None:
                self._unwatch(seat, seat.worker)
                self._supervisor.selector.unregister(seat.worker)
                seat.worker.close()
        self.seats.clear()
        self.deaths.close()

    def _worker_options(self, member: int, slot: int) -> dict[str, Any]:
        tls = self._spec.tls
        return {
            "member": member,
            "slot": slot,
            "address": list(self._supervisor.address),
            "secret": self._supervisor.secret.hex(),
            "folder": self._spec.folder,
            "tls": [tls["certificate"], tls["key"], tls["authority"]] if tls is not None else None,
            "attempt": self._starts[slot],
            # Where the control port listens, others reach workers of this machine too.
            "listen": self._spec.options.get("listen") or self._supervisor.gate.address[0],
            "ports": self._spec.listening.ports,
        }

    def _attend(self, seat: Seat, worker: Worker) -> None:
        self._supervisor.caller.keep(seat.member, worker)
        self._supervisor.selector.register(
            worker, selectors.EVENT_READ, lambda mask, now: self._worker_speaks(seat, worker)
        )
        self._watch_process(seat, worker)

    def _watch_process(self, seat: Seat, worker: Worker) -> None:
        """See its end, also where no fork server is left to say how it ended."""
        if not seat.watched and worker.watch >= 0:
            seat.watched = True
            self._supervisor.selector.register(
                worker.watch, selectors.EVENT_READ, lambda mask, now: self._process_ended(seat, worker, now)
            )

    def _process_ended(self, seat: Seat, worker: Worker, now: float) -> None:
        self._unwatch(seat, worker)
        seat.ended_at = now
        self._pressing.add(seat.member)

    def _unwatch(self, seat: Seat, worker: Worker) -> None:
        if seat.watched:
            seat.watched = False
            self._supervisor.selector.unregister(worker.watch)

    def _worker_speaks(self, seat: Seat, worker: Worker) -> None:
        before = worker.keep(), worker.pid
        worker.take()
        if (worker.keep(), worker.pid) != before and not worker.done:
            self._supervisor.caller.keep(seat.member, worker)
        self._watch_process(seat, worker)
        if worker.refusal is not None:
            self._end(seat, self.deaths.refused(seat, worker.refusal))
        elif worker.status is not None or worker.done:
            self._ended(seat, worker.status, "")

    def _stayed_away(self, seat: Seat, now: float) -> None:
        if seat.worker is not None and seat.worker.has_ended:
            self._ended(seat, None, "")
            return
        seat.cut_at = None
        why = f"its connection closed ({seat.cut_why}) and stayed closed for {RECONNECT_SECONDS:g} s"
        if seat.place != HOME and self._supervisor.places.is_away(seat.place):
            self._supervisor.places.give_up(seat.place, "the connections of its agent and workers closed")
            return
        self._supervisor.feed(Lost(seat.member, "silent", why))

    def _cut_limit(self, seat: Seat) -> float:
        gone = seat.ended_at + _EXIT_SECONDS
        if seat.cut_at is None:
            return gone
        ended = seat.worker is not None and seat.worker.has_ended
        return min(gone, seat.cut_at + (_EXIT_SECONDS if ended else RECONNECT_SECONDS))

    def _ended(self, seat: Seat, status: int | None, told: str, *, memory: bool = False) -> None:
        """The process is gone: hear its last words, then say how it went."""
        if seat.connection is not None:
            seat.connection.drain()
        self._supervisor.verdicts.settle(seat.member)
        if status is None and seat.worker is not None:
            seat.worker.end_family()
        event = self.deaths.ended(seat, status, told, memory=memory)
        if seat.inherited:
            # It may have been about to leave when this supervisor came.
            take_in(self._supervisor.chronicle, self._supervisor.folder, self._supervisor.secret)
        if self._supervisor.ending is None:
            # Only what is returned at the end of the job is its result.
            self.deaths.drop_result(seat.member)
        self._end(seat, event)

    def _end(self, seat: Seat, event: Lost | HasRaised | None) -> None:
        self.seats.pop(seat.member, None)
        self._pressing.discard(seat.member)
        self.former[seat.member] = seat
        if len(self.former) > _FORMER:
            del self.former[next(iter(self.former))]
        self._supervisor.caller.drop(seat.member)
        if seat.pid:
            self._supervisor.chronicle.flush(seat.pid)
        if seat.connection is not None:
            seat.connection.close()
            seat.connection = None
        if seat.worker is not None:
            self._unwatch(seat, seat.worker)
            self._supervisor.selector.unregister(seat.worker)
            seat.worker.close()
        if event is not None:
            self._supervisor.feed(event)
