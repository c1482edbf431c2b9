"""The supervisor: one thread, one loop. Turns what happens into events and carries the machine's actions out.

    members, agents, tools --messages--> events --> machine.step --> actions --> messages, processes, journal

It decides nothing by itself but how long a closed connection may stay closed. It can be killed at any moment:
workers train on, and the next supervisor finds in the run's folder and at the caller what it needs to go on.
Must not know what a worker computes.
"""

from __future__ import annotations

import contextlib
import os
import resource
import selectors
import signal
import socket
import sys
import time
from collections import deque
from pathlib import Path
from typing import Final, final

from paceline.core.control import address, channel
from paceline.core.control.address import Whereabouts
from paceline.core.control.channel import Channel
from paceline.core.control.messages import Answer, Ask, Seen
from paceline.core.entrance import Entrance, Proven
from paceline.core.errors import PacelineError, PlatformError, RendezvousError, WireError
from paceline.core.events import Note, SupervisorStarted
from paceline.core.foreign import shown
from paceline.core.handshake import CONTROL
from paceline.elastic import machine
from paceline.elastic.job import Spec
from paceline.elastic.model import (
    HOME,
    Action,
    Beaten,
    Began,
    EndJob,
    Event,
    HasBroken,
    Hashed,
    HasInstalled,
    HasRaised,
    IsDone,
    Joined,
    NoteFailure,
    NoteVerdict,
    Phase,
    Reported,
    ScaleAsked,
    StopAsked,
    Ticked,
    WantsToLeave,
)
from paceline.elastic.shell import gate, recovery, unheard
from paceline.elastic.shell.actions import Actions
from paceline.elastic.shell.caller import Caller
from paceline.elastic.shell.chronicle import Chronicle
from paceline.elastic.shell.connection import Connection
from paceline.elastic.shell.ending import Ending
from paceline.elastic.shell.guests import Guests
from paceline.elastic.shell.injections import Injections
from paceline.elastic.shell.memory import Memory, Remembered
from paceline.elastic.shell.places import Places
from paceline.elastic.shell.probing import Probing
from paceline.elastic.shell.staff import PATIENCE_SECONDS, Staff
from paceline.elastic.shell.status import status_of
from paceline.elastic.shell.verdicts import Verdicts
from paceline.elastic.shell.views import Views
from paceline.elastic.tools import JOURNAL_FILE

_LONGEST_TURN: Final = 5.0
_STALL_SECONDS: Final = 1.0
# From about 130 turns a second on, the loop hears several messages per turn; it costs at most this delay.
_BUSY_GAP: Final = 0.0075
_BREATH_SECONDS: Final = 0.01
_OFFENCE_SECONDS: Final = 1.0
_OFFENCE_CHARACTERS: Final = 500
_FROM_MEMBERS: Final = (
    Beaten,
    HasBroken,
    Hashed,
    HasInstalled,
    HasRaised,
    IsDone,
    Joined,
    Reported,
    WantsToLeave,
)


@final
class Supervisor:
    """Everything that is alive in a supervised job, and the loop that looks after it."""

    def __init__(self, spec: Spec, payload: int, caller: socket.socket) -> None:
        self.spec = spec
        self.folder = Path(spec.folder)
        self.selector = selectors.DefaultSelector()
        self.memory = Memory(self.folder)
        if spec.attempt == 1:
            self.memory.forget()
        self.recalled = self.memory.recall() or Remembered()
        self.secret = self._secret()
        self.chronicle = Chronicle(self.folder / JOURNAL_FILE)
        self.verdicts = Verdicts(
            self.chronicle.write, self.folder, lambda seat: self.places.look_at(seat.place, seat.member)
        )
        self.views = Views(
            backup=spec.settings.stragglers == "backup", exact=bool(spec.options.get("exact", True))
        )
        self.caller = Caller(
            caller, self.selector, self, float(spec.options.get("patience", PATIENCE_SECONDS))
        )
        self.injections = Injections(self)
        self.staff = Staff(self, payload)
        self.chronicle.on_flush = self.staff.confirm
        self.guests = Guests(
            self.staff.come,
            lambda *offer: self.places.come(*offer),
            self._asked,
            lambda text: self.complain(RendezvousError(text, remedy="use one version on all machines")),
        )
        granted = {
            "options": {**spec.options, "ports": spec.listening.ports},
            **{name: spec.order[name] for name in ("entry", "preload", "threads")},
        }
        self.places = Places(
            payload,
            granted,
            spec.settings.agent_seconds,
            self.feed,
            self.staff.remote_exit,
            self._seen,
            self.staff.place_gone,
        )
        self.listener = gate.listen(spec.bind, spec.port, self.recalled.port, listening=spec.listening)
        self.gate = Entrance(
            self.listener,
            CONTROL,
            self.secret,
            self.selector,
            self._let_in,
            tls=spec.make_tls.server() if spec.make_tls is not None else None,
            complain=self.complain,
        )
        self.probing = Probing(self)
        self.actions = Actions(self)
        self.ending: Ending | None = None
        self.state = machine.initial(spec.settings)
        self._events: deque[Event] = deque()
        self._asked_to_end = False
        self.dropped = 0  # connections of peers that had proved themselves
        self._offence_at = 0.0
        self._last_turn = 0.0
        self._usual_gap = 1.0

    @property
    def address(self) -> tuple[str, int]:
        """Where workers of this machine find the control port."""
        host, port = self.gate.address
        return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host), port

    def feed(self, event: Event) -> None:
        """Something happened; it is decided upon after what happened before it."""
        self._events.append(event)

    def complain(self, error: PacelineError) -> None:
        """Tell people about a shortage that training survives."""
        with contextlib.suppress(OSError, ValueError):  # nobody may read the terminal any more
            print(f"paceline: {shown(error)}", file=sys.stderr, flush=True)
        self.chronicle.write(Note(time=time.time(), text=str(error)))

    def kill(self, reason: str) -> None:
        """End everything at once."""
        self.ending = Ending(self, EndJob(ok=False, reason=reason, stopped=reason), at_once=True)

    def run(self) -> None:
        """Until the job is over and its outcome was told."""
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            self._begin()
            self._loop()
        finally:
            self._close()

    def _begin(self) -> None:
        host, port = self.address
        tls = self.spec.tls or {}
        address.write(
            self.folder, Whereabouts(host=host, port=port, pid=os.getpid(), attempt=self.spec.attempt, **tls)
        )
        # Before anything else is written: it happened before.
        unheard.take_in(self.chronicle, self.folder, self.secret)
        now = time.time()
        where = f"{host}:{port}"
        self.chronicle.write(
            SupervisorStarted(time=now, pid=os.getpid(), attempt=self.spec.attempt, address=where)
        )
        self.caller.say("up", host=host, port=port)
        began = self._what_was_known() if self.spec.attempt > 1 else Began()
        for _, place in began.members.values():
            if place != HOME:
                self.places.resume(place)
        # In this order: who is missed was known before.
        self.feed(began)
        self.staff.expect(began.members)
        self._decide_all()

    def _what_was_known(self) -> Began:
        """What the supervisor before this one wrote down, or what the journal and the caller know."""
        if not self.memory.trouble:
            return self.recalled.began
        began = recovery.from_journal(self.folder / JOURNAL_FILE, self.caller.kept)
        if began is None:
            return Began()
        self.complain(
            PlatformError(
                f"what the supervisor before this one knew is lost: {self.memory.trouble}. "
                f"{len(began.members)} workers are known from the journal and train on; failures and speeds "
                "are counted anew, and workers of other machines start again",
                remedy="see who removes or changes files in the run's folder while it is used, and whether "
                "its disk is full",
            )
        )
        recovery.end_unknown(self.caller.kept, began.members)
        return began

    def _loop(self) -> None:
        components = (
            self.gate,
            self.guests,
            self.places,
            self.staff,
            self.chronicle,
            self.verdicts,
            self.caller,
        )
        while self.ending is None or not self.ending.over:
            before = time.monotonic()
            due = min(machine.next_deadline(self.state) or float("inf"), *(one.due for one in components))
            if self.ending is not None:
                due = min(due, self.ending.due)
            asked = min(max(0.0, due - before), _LONGEST_TURN)
            if self._is_busy(before):
                time.sleep(_BREATH_SECONDS)
            ready = self.selector.select(asked)
            now = time.monotonic()
            if now - before - asked > _STALL_SECONDS:
                # First of all: nobody is to be blamed for what the supervisor itself missed.
                self.feed(Ticked(stalled=now - before - asked))
                self._decide_all()
            for key, mask in ready:
                key.data(mask, now)
            for one in components:
                if now >= one.due:
                    one.tick(now)
            if self._asked_to_end:
                self._asked_to_end = False
                self.feed(StopAsked("the supervisor got SIGTERM"))
            if now >= (machine.next_deadline(self.state) or float("inf")):
                self.feed(Ticked())
            self._decide_all()
            if self.ending is not None:
                self.ending.tick(now)
                self._decide_all()

    def _is_busy(self, now: float) -> bool:
        """Whether so many heartbeats come that hearing several at once saves more than it delays. Never while
        members wait for each other or for us."""
        gap, self._last_turn = now - self._last_turn, now
        self._usual_gap += 0.05 * (min(gap, 1.0) - self._usual_gap)
        return self._usual_gap < _BUSY_GAP and self.state.phase is Phase.RUNNING and self.ending is None

    def _decide_all(self) -> None:
        while self._events:
            self._decide(self._events.popleft())

    def _decide(self, event: Event) -> None:
        if self.ending is not None:
            return
        before = self.state.committed
        try:
            self.state, actions, reason = machine.step(self.state, event, time.monotonic())
        except Exception as error:
            if not isinstance(event, _FROM_MEMBERS):
                raise
            # The machine works on a copy: its state is as it was before this event.
            self._drop(event.member, f"{type(event).__name__}: {type(error).__name__}: {error}")
            return
        told = {action.member for action in actions if isinstance(action, NoteVerdict)}
        for action in actions:
            # Told before it is kept: after it nobody would find out about this failure again.
            if isinstance(action, NoteFailure):
                self._carry_out(action, reason, told)
        if actions or not isinstance(event, Beaten | Ticked) or self.state.committed is not before:
            self.keep()
        for action in actions:
            if not isinstance(action, NoteFailure):
                self._carry_out(action, reason, told)

    def _drop(self, member: int, what: str) -> None:
        """What this member said cannot be decided upon."""
        seat = self.staff.find(member)
        if seat.connection is None:
            self.complain(WireError(f"what worker {member} sent could not be handled: {what}"))
            return
        seat.connection.channel.closed, seat.connection.channel.nonsense = what, True
        seat.connection.check()

    def _carry_out(self, action: Action, reason: str, told: set[int]) -> None:
        if isinstance(action, EndJob):
            self.verdicts.close()
            self.ending = Ending(self, action)
        else:
            self.actions.carry_out(action, reason, told)

    def keep(self) -> None:
        """Write down what the next supervisor must know."""
        self.memory.keep(
            Remembered(
                began=machine.remembered(self.state),
                port=self.gate.address[1],
                fingerprint=self.staff.likeness.fingerprint,
                model=self.staff.likeness.model,
                processes={n: (seat.pid, seat.hostname) for n, seat in self.staff.seats.items() if seat.pid},
                injected=self.injections.came,
            )
        )

    def _seen(self, place: int, seen: Seen) -> None:
        """What the agent of this place found of a worker of its own."""
        if self.staff.find(seen.member).place != place:
            return
        if seen.stopped is None:
            self.verdicts.seen(seen.member, seen.state, seen.frames)
        else:
            self.probing.seen(seen)

    def _let_in(self, context: bytes, proven: Proven) -> None:
        channel.tune(proven.sock)
        opened = Channel(proven.sock, proven.session)
        connection = Connection(opened, proven.host, self.selector, self.guests, self.offended)
        self.guests.add(connection, time.monotonic())

    def offended(self, connection: Connection, what: str) -> None:
        """A peer with the token, or a machine on the path to it, sent what cannot be: it is dropped, which is
        noted, but not as often as it can send."""
        self.dropped += 1
        now = time.monotonic()
        if now < self._offence_at:
            return
        self._offence_at = now + _OFFENCE_SECONDS
        self.complain(
            WireError(
                f"a connection from {connection.host} was dropped: {what[:_OFFENCE_CHARACTERS]} "
                f"({self.dropped} in all)",
                remedy="a worker connects again by itself; else see who has the job's token",
            )
        )

    def _asked(self, connection: Connection, ask: Ask) -> None:
        """A tool wants something."""
        match ask.what:
            case "scale" if (why := machine.why_not_this_size(self.state, ask.number)) is not None:
                connection.send(Answer(done=False, text=why))
            case "scale":
                self.feed(ScaleAsked(ask.number))
                many = "1 worker" if ask.number == 1 else f"{ask.number} workers"
                connection.send(Answer(done=True, text=f"the job is asked to have {many}"))
            case "stop":
                self.feed(StopAsked(shown(ask.text) or "paceline stop"))
                connection.send(Answer(done=True, text="the job is asked to save and end"))
            case "status":
                connection.send(status_of(self))
            case _:
                connection.send(Answer(done=False, text=f"the supervisor cannot {ask.what} {ask.number}"))

    def _on_signal(self, *_: object) -> None:
        self._asked_to_end = True

    def _secret(self) -> bytes:
        if self.spec.attempt > 1:
            with contextlib.suppress(PacelineError):
                return address.read_secret(self.folder)
        secret = address.new_secret()
        address.write_secret(self.folder, secret)
        return secret

    def _close(self) -> None:
        self.gate.close()
        self.listener.close()
        self.guests.close()
        self.staff.close()
        self.views.release()
        self.chronicle.close()
        self.caller.close()
        self.selector.close()


def raise_file_limit() -> None:
    """Use all descriptors that the system allows: each worker takes about six."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
