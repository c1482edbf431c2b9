"""A worker as a member of a job that is looked after: heartbeats, receipts, and meeting again.

The main thread trains; the link's thread beats, hears the supervisor and interrupts a collective when it is
told to. When the group breaks or is to change, the main thread comes here with how far it is and what it
holds, waits for the next view, and goes back to the loop in a new group with the state of the furthest
member. Must not know how a step is computed, nor decide who is a member: elastic/ does.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, NoReturn, final

from paceline.comm.context import DistributedContext
from paceline.comm.handover import receive_state, send_state
from paceline.comm.processes import resident_bytes, start_time
from paceline.comm.regroup import ViewPeer, open_view
from paceline.comm.waiting import waiting_for
from paceline.core import events, phase_page
from paceline.core.control.dialing import Dialer
from paceline.core.control.messages import (
    Beat,
    Claimed,
    Dial,
    Dismissed,
    Done,
    Hello,
    Installed,
    Leaving,
    Message,
    Prepare,
    Raised,
    Receipt,
    Report,
    ShardDone,
    Stop,
    View,
)
from paceline.core.errors import GroupInterruptedError, PacelineError, RendezvousError
from paceline.train import phases as phase_names
from paceline.train.chaos import Injector
from paceline.train.claims import Claims
from paceline.train.phases import Phases
from paceline.train.receipts import Receipts
from paceline.train.recorder import CommittedStep
from paceline.train.run import Run
from paceline.train.run_parts import GROUP_TROUBLE
from paceline.train.seat import ReleasedError, Seat, StartOverError, SupervisorGoneError
from paceline.train.signals import StopRequest
from paceline.train.team import Team
from paceline.train.telling import Telling
from paceline.train.trouble import broken

if TYPE_CHECKING:
    from paceline.core.control.member_link import MemberLink
    from paceline.train.assembly import Assembled

_LOOK_SECONDS = 0.25
_SMOOTH = 0.8  # of the running means: a few steps decide


@final
class Membership:
    """Made before the link is connected; `assembled` and `run` are given once they are there."""

    def __init__(
        self,
        seat: Seat,
        team: Team,
        phases: Phases,
        stop: StopRequest,
        injector: Injector,
        listener: socket.socket,
    ) -> None:
        self.seat, self._team, self._phases, self._stop = seat, team, phases, stop
        self._injector, self._listener = injector, listener
        self._dialer = Dialer(seat.member, seat.slot, seat.secret, listener, lambda m: self._link().send(m))
        self.link: MemberLink | None = None
        self._assembled: Assembled | None = None
        self._run: Run | None = None
        self._has_state = False
        self._trained = False  # whether it ever had one of its own
        self._fresh = True  # whether the weights are those that the model was built with
        self._view: View | None = None
        self._invited: View | None = None  # the view that was accepted last, installed or not
        self._lock = threading.Lock()
        self._asked: Prepare | None = None  # and not carried out yet
        self._cancelled = threading.Event()
        self._opening = False
        self._claims = Claims()
        self._leaving: str | None = None  # why, until it was told
        self._receipts = Receipts()
        self._telling = Telling()
        self._shard_seconds = self._step_seconds = 0.0
        self._committed_at = time.monotonic()
        self._disputed = -1  # a step that is computed again because members differed after it
        self.fingerprint: dict[str, str] = {}
        self.model = ""

    def close(self) -> None:
        """End what answers peers that dial this worker."""
        self._dialer.close()

    def attach(self, link: MemberLink, assembled: Assembled, run: Run) -> None:
        self.link, self._assembled, self._run = link, assembled, run

    # asked and told by the link's thread

    def hello(self) -> Hello:
        host, port = self._listener.getsockname()[:2]
        return Hello(
            member=self.seat.member,
            slot=self.seat.slot,
            pid=os.getpid(),
            host=self.seat.host,
            hostname=self.seat.hostname,
            endpoint=(str(host), int(port)),
            fingerprint=self.fingerprint,
            model=self.model,
            generation=0 if self._view is None else self._view.generation,
            progress=self._run.progress if self._run is not None and self._has_state else None,
        )

    def beat(self) -> Beat:
        if self._leaving and self.link is not None:
            reason, self._leaving = self._leaving, ""
            self.link.send(Leaving(reason=reason))
        self.tell_rest()
        phase, seconds = self._phases.now
        return Beat(
            phase=phase,
            seconds=seconds,
            progress=self._run.progress if self._run is not None and self._has_state else None,
            waits_for=self._waits_for(phase),
            shard_seconds=self._shard_seconds,
            step_seconds=self._step_seconds,
            longest=self._longest(phase),
            rss=resident_bytes(),
        )

    def _longest(self, phase: str) -> float:
        saver = None if self._assembled is None else self._assembled.saver
        return 0.0 if saver is not None and saver.waits_for_storage else self._phases.longest(phase)

    def hear(self, message: Message) -> None:
        """Each message as it arrives; the main thread reads them later."""
        if isinstance(message, Stop):
            self._stop.ask(message.reason)
        elif isinstance(message, Prepare):
            with self._lock:
                known = max(
                    self._asked.generation if self._asked is not None else 0,
                    self._view.generation if self._view is not None else 0,
                )
                # An abort counts also where a pause for the same generation was asked for before.
                if message.generation < known or (message.generation == known and not message.abort):
                    return
                self._asked = message
                if message.abort:
                    self._interrupt(message.reason)
        elif isinstance(message, Dial):
            self._dialer.dial(message.peers)
        elif isinstance(message, Claimed):
            self._claims.add(message.generation, message.step, message.shard)
        elif isinstance(message, Dismissed):
            with self._lock:
                self._interrupt(message.reason)

    def unheard(self) -> None:
        """The supervisor is not there. Who waits for others for as long as it is away is cut off from them
        too, and nobody else will end that wait."""
        if self.link is not None and self._invited is None and self.seat.is_taken:
            self.link.stop_looking("the run has ended, or was started again meanwhile")
        phase, seconds = self._phases.now
        away = 0.0 if self.link is None else self.link.away
        if self.seat.gives_up_waiting(min(away, seconds)) and self._waits_for(phase):
            with self._lock:
                self._interrupt("the supervisor stayed away")

    def _interrupt(self, reason: str) -> None:
        self._cancelled.set()
        if not self._opening:
            self._team.context.interrupt(reason)

    def leave(self, reason: str) -> None:
        """Asks to be let out at the next step boundary; safe in a signal handler."""
        if self._leaving is None:
            self._leaving = reason

    def tell(self, event: events.Event) -> None:
        """An event for the journal. Steps that follow each other quickly are told together."""
        if self._telling.add(event):
            self._tell_all()

    def _tell_all(self) -> None:
        self._telling.send(self.link, self._team.generation)

    def tell_rest(self) -> None:
        """What was kept to be told together."""
        self._tell_all()
        self._receipts.send(self.link)

    @property
    def phase(self) -> str:
        return self._phases.name

    @property
    def may_save(self) -> bool:
        """Whether this member, whose code has raised, holds a state that is worth a checkpoint."""
        run, assembled = self._run, self._assembled
        if run is None or assembled is None or assembled.saver is None or not self._has_state:
            return False
        return run.whole and not run.failing and run.position.step > assembled.saver.saved_step

    def failed(self, error: BaseException, traceback_text: str, *, phase: str, holds: bool) -> None:
        """This worker's own code raised, in this phase. With `holds` it goes on to `meet_again`."""
        assert self.link is not None
        self._tell_all()
        fault = error.fault if isinstance(error, PacelineError) else "code"
        lines = str(error).splitlines() or [""]
        self.link.send(
            Raised(
                summary=f"{type(error).__name__}: {lines[0]}",
                traceback=traceback_text,
                phase=phase,
                fault=fault,
                step=self._phases.step,
                holds=holds,
                progress=self._run.progress if self._run is not None and self._has_state else None,
            )
        )

    # asked by the loop

    def check(self) -> None:
        asked = self._asked
        if self._cancelled.is_set() or (asked is not None and asked.abort):
            raise GroupInterruptedError(asked.reason if asked is not None else "this worker is dismissed")

    @property
    def wants_pause(self) -> bool:
        why = self._forsaken
        if why is not None:
            self._stop.ask(why)
        return self._asked is not None

    @property
    def heard_at(self) -> float:
        return 0.0 if self.link is None else self.link.heard_at

    @property
    def _forsaken(self) -> str | None:
        """Why nobody will look after this member any more."""
        return None if self.link is None else self.seat.why_forsaken(self.link.away)

    def todo(self, step: int, missing: Sequence[int]) -> Iterator[int]:
        for shard in missing:
            self.check()
            if not (self._team.backup and self._claims.has(self._team.generation, step, shard)):
                yield shard
        while self._team.backup:
            spare = self._claims.wait_for_spare(step, self._team, self._shard_seconds, self.check)
            if spare is None:
                return
            yield spare

    def shard_done(self, step: int, shard: int, seconds: float) -> None:
        self._shard_seconds = _mean(self._shard_seconds, seconds + self._injector.slow(seconds))
        if self._team.backup:
            self._claims.add(self._team.generation, step, shard)
            self._link().send(ShardDone(generation=self._team.generation, step=step, shard=shard))

    def committed(
        self, step: CommittedStep, shards: tuple[int, ...], shard_hashes: Mapping[int, str]
    ) -> None:
        now = time.monotonic()
        self._step_seconds = _mean(self._step_seconds, now - self._committed_at)
        self._committed_at = now
        self._receipts.add(self._team.generation, step, shards, shard_hashes)
        if step.step == self._disputed:
            # Before the receipts: with their hashes the dispute may be decided.
            self._vote(step.step, self._digest())
        if step.hash is not None:
            # Who differs spoils every step that follows: the sooner it is found, the fewer are done again.
            self._receipts.send(self.link)

    def differ(self, step: int, digest: str, agreed: int) -> NoReturn:
        self._vote(step, digest, agreed)
        raise GroupInterruptedError(f"the weights after step {step} are not the same on all members")

    def broken_off(self, step: int, digest: str) -> None:
        self._vote(step, digest)

    def agree(self, step: int, digest: str) -> None:
        if step == self._disputed:
            self._vote(step, digest)

    def _vote(self, step: int, digest: str, agreed: int = -1) -> None:
        """What this member's state after a step hashes to, for who decides whose state is right."""
        self._link().send(
            Receipt(
                generation=self._team.generation,
                first=1,
                last=0,
                shards=(),
                hashes={str(step): digest},
                agreed=agreed,
                trail=self._run.trail.told if self._run is not None else (),
            )
        )

    def meet_again(self, run: Run, trouble: BaseException | None) -> None:
        while True:
            try:
                self._meet(run, trouble)
                return
            except (*GROUP_TROUBLE, RendezvousError) as again:
                # Also where the view could not be opened: whoever made its memory is gone, say.
                trouble = again

    def finish(self, run: Run, digest: str) -> Literal["dismissed", "orphaned", "again"]:
        """Stay until every member is done: another may still need this member's state. "orphaned": the
        supervisor stays away. "again": the group went back to a checkpoint; steps have to be done again."""
        link = self._link()
        while True:
            self.tell_rest()
            stopped = run.ended if run.stopped_on_request else None
            link.send(
                Done(generation=self._team.generation, progress=run.progress, hash=digest, stopped=stopped)
            )
            self._phases.enter(phase_names.WAIT)
            while True:
                message = link.receive(_LOOK_SECONDS)
                if isinstance(message, Dismissed):
                    return "dismissed"
                if isinstance(message, Prepare) and message.generation > self._team.generation:
                    break
                if message is None and self._forsaken:
                    return "orphaned"
            self._report(run, message)
            self.meet_again(run, None)
            if not run.conclude():
                return "again"

    @property
    def is_first_alive(self) -> bool:
        """Whether no member before this one, on this machine, still runs."""
        view = self._view
        if view is None or not self._has_state:
            return False
        for member, pid, host in zip(view.members, view.pids, view.hosts, strict=True):
            if member == self.seat.member:
                return True
            if host != self.seat.host or start_time(pid):
                return False
        return False

    # meeting again

    def _meet(self, run: Run, trouble: BaseException | None) -> None:
        assembled = self._assembled
        assert assembled is not None
        self._phases.enter(phase_names.WAIT)
        # While it is still clear who tells them: numbers of steps that were on their way from a device.
        assembled.recorder.flush()
        old = self._team.context
        old.close(error=trouble if trouble is not None else GroupInterruptedError("the group changes"))
        view = self._next_view(run, trouble)
        rank = view.members.index(self.seat.member)
        context = self._open(view, rank)
        with self._lock:
            self._view, self._opening, self._disputed = view, False, view.disputed
            self._team.install(
                context, view.shards, view.generation, backup=view.backup and self._may_back_up
            )
        self.check()
        had_state = self._has_state
        assembled.rebind()
        if view.restore:
            assembled.transaction.abandon()
            # If the group breaks in the middle of it, this member has neither the old state nor the new one.
            self._has_state = False
            self._restore(run, view)
        elif rank == view.source and view.behind:
            given = assembled.hand_over(run)
            send_state(context, view.behind, {**given.tensors, **given.own}, given.state)
        elif rank in view.behind:
            tensors, state = receive_state(context, view.source)
            assembled.take_over(run, tensors, state)
        if not view.restore:
            assembled.transaction.settle(run.position.step)
            assembled.transaction.share_residuals()
        self._has_state = self._trained = True
        self._fresh = False
        self._committed_at = time.monotonic()
        self._link().send(Installed(generation=view.generation, progress=run.progress))
        if view.ends:
            run.save_and_end(view.ends)
        # Told by whoever has the state: the first rank may have just come, and knows nothing of these steps.
        if had_state and not view.restore and rank == (view.source if view.behind else 0):
            for event in assembled.recorder.events_after(view.journaled):
                self.tell(event)

    def _restore(self, run: Run, view: View) -> None:
        assembled = self._assembled
        assert assembled is not None
        config = assembled.config
        which = config.resume if view.generation == 1 else "auto"
        fresh, self._fresh = self._fresh, False
        if view.restore_before >= 0:
            assembled.disown_after(view.restore_before)
        assembled.take_up(run, which, view.restore_before, fresh=fresh)
        if self._trained and assembled.parent is None:
            raise StartOverError("there is no checkpoint to go back to")

    def _next_view(self, run: Run, trouble: BaseException | None) -> View:
        link = self._link()
        self.tell_rest()
        if trouble is not None and self._asked is None and self._invited is not None:
            link.send(broken(self._invited, trouble))
        while True:
            message = link.receive(_LOOK_SECONDS)
            if message is None:
                if (why := self._forsaken) is not None:
                    raise SupervisorGoneError(why)
            elif isinstance(message, Dismissed):
                raise ReleasedError(message.reason, message.code)
            elif isinstance(message, Prepare) and message.generation > self._team.generation:
                self._report(run, message)
            elif isinstance(message, View) and self._accepts(message):
                return message

    def _report(self, run: Run, prepare: Prepare) -> None:
        assembled = self._assembled
        assert assembled is not None
        self._link().send(
            Report(
                generation=prepare.generation,
                progress=run.progress if self._has_state else None,
                held=assembled.transaction.held,
                alone=assembled.transaction.has_state_of_its_own,
                digest=self._digest() if self._has_state else "",
                agreed=run.agreed if self._has_state else -1,
                owed=assembled.transaction.owed,
                trail=run.trail.told if self._has_state else (),
                spoiled=self._has_state and run.spoiled,
                doubted=self._has_state and self._is_doubted(run),
            )
        )

    def _is_doubted(self, run: Run) -> bool:
        """Whether as many members of the view, gone or not, had something else after this step as had what
        this one had. Their pages outlive them."""
        view, mine, folder = self._view, run.left, self.seat.folder
        if view is None or mine is None or folder is None:
            return False
        others = [one for one in view.members if one != self.seat.member]
        found = [phase_page.left(phase_page.page_file(folder, one)) for one in others]
        same = [one[1] == mine for one in found if one is not None and one[0] == run.position.step]
        return same.count(False) > same.count(True)

    def _digest(self) -> str:
        assert self._assembled is not None
        return f"report:{self._assembled.digest()}"

    def _accepts(self, view: View) -> bool:
        """Whether this is the view to be in; prepares for an opening that can be cancelled."""
        if view.generation <= self._team.generation or self.seat.member not in view.members:
            return False
        with self._lock:
            if self._asked is not None and self._asked.generation > view.generation:
                return False
            self._asked, self._opening, self._invited = None, True, view
            self._cancelled.clear()
        return True

    def _open(self, view: View, rank: int) -> DistributedContext:
        peers = [
            ViewPeer(pid=pid, host=host, hostname=name, endpoint=endpoint)
            for pid, host, name, endpoint in zip(
                view.pids, view.hosts, view.hostnames, view.endpoints, strict=True
            )
        ]
        with self._dialer.paused():
            return open_view(
                rank=rank,
                world_size=len(view.members),
                segment=view.segment,
                members=peers,
                listener=self._listener,
                secret=self.seat.secret,
                generation=view.generation,
                timeout=self.seat.comm_timeout,
                links=self.seat.links,
                cancelled=self._cancelled,
                ports=self.seat.ports,
            )

    def _waits_for(self, phase: str) -> tuple[int, ...]:
        view = self._view
        if view is None or phase in phase_names.APART:
            return ()
        with contextlib.suppress(IndexError):  # the view may have changed since
            return tuple(view.members[rank] for rank in waiting_for(self._team.context))
        return ()

    @property
    def _may_back_up(self) -> bool:
        """Not where a shard has state of its own, nor where only the first rank can read its samples."""
        assert self._assembled is not None
        return self._assembled.config.compression is None and self._assembled.seekable

    def _link(self) -> MemberLink:
        assert self.link is not None
        return self.link


def _mean(before: float, now: float) -> float:
    return now if before == 0.0 else _SMOOTH * before + (1.0 - _SMOOTH) * now
