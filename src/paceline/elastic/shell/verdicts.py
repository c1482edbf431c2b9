"""Verdicts and failures for people: one block on the terminal, one line in the journal.

The Python line is what the worker itself writes when it is asked, or what the agent of its machine sends.
That takes a moment, so a verdict is opened, looked after by the loop, and told when the stack is complete or
cannot be had. Errors that several workers raise are told once. Must not know how workers are started or
ended.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, final

from paceline.core import phase_page
from paceline.core.events import Event, Verdict, WorkerFailed
from paceline.core.foreign import shown
from paceline.elastic.model import HOME, NoteFailure, NoteVerdict
from paceline.elastic.shell.look import LOOK_SECONDS, STACK_SECONDS, Look
from paceline.elastic.shell.seats import Seat

_THERE_AND_BACK_SECONDS: Final = 0.6  # for the question to another machine and for its answer
_FOLD_SECONDS: Final = 10.0
_FOLDED: Final = 64


@final
@dataclass
class _Open:
    """`look` is ours at a worker of this machine; `limit`: until when another machine may answer."""

    note: NoteVerdict
    seat: Seat
    look: Look | None
    limit: float
    state: str = ""
    frames: Sequence[str] = ()
    then: Callable[[], None] | None = None


@final
class Verdicts:
    """`write` puts an event into the journal. In the run's `folder` workers of this machine keep a page with
    their phase, which knows better than their last heartbeat. `ask` has another machine look at a worker of
    its own, and is False where it cannot be asked; its answer is `seen`."""

    def __init__(
        self,
        write: Callable[[Event], None],
        folder: Path | None = None,
        ask: Callable[[Seat], bool] = lambda seat: False,
    ) -> None:
        self._write = write
        self._ask = ask
        self._folder = folder
        self._open: dict[int, _Open] = {}
        self._next_look = float("inf")
        self._raised: dict[str, tuple[float, int]] = {}
        self.last_text = ""

    @property
    def due(self) -> float:
        return self._next_look

    def open(self, note: NoteVerdict, seat: Seat, now: float) -> None:
        """Begin a verdict: ask the worker where it is."""
        # Before the look: one that was stopped goes on for a moment, to say where it was.
        note = dataclasses.replace(note, phase=self._phase(note, seat))
        look = Look(seat.worker, now) if seat.worker is not None else None
        asked = look is None and seat.place != HOME and self._ask(seat)
        case = _Open(note, seat, look, now + STACK_SECONDS + _THERE_AND_BACK_SECONDS if asked else now)
        self._open[note.member] = case
        at_once = not asked and (look is None or seat.worker is None or seat.worker.has_ended)
        self._next_look = now if at_once else min(self._next_look, now + LOOK_SECONDS)

    def seen(self, member: int, state: str, frames: Sequence[str]) -> None:
        """What its machine found when it was asked to look."""
        case = self._open.get(member)
        if case is not None:
            case.state, case.frames = state, frames
            self._close(case)

    def after(self, member: int, then: Callable[[], None]) -> bool:
        """Do this when the verdict about `member` was told; False: there is none, do it now."""
        case = self._open.get(member)
        if case is None:
            return False
        case.then = then
        if case.look is not None:
            case.look.wake()
        return True

    def tick(self, now: float) -> None:
        """See which stacks have arrived."""
        if now < self._next_look:
            return
        for case in list(self._open.values()):
            if case.look.is_over(now) if case.look is not None else now >= case.limit:
                self._close(case)
        self._next_look = now + LOOK_SECONDS if self._open else float("inf")

    def settle(self, member: int) -> None:
        """The process is gone: tell what is known."""
        if member in self._open:
            self._close(self._open[member])

    def close(self) -> None:
        """Tell all that are open, as they are."""
        for case in list(self._open.values()):
            self._close(case)

    def failure(self, note: NoteFailure, seat: Seat, *, told: bool) -> None:
        """A worker failed: a line in the journal, and on the terminal unless a verdict tells it."""
        if note.kind == "preempted" and not seat.pid:
            return  # it was asked for and never started
        if seat.raised is not None and note.kind == "raised":
            # It knew better than its last heartbeat.
            note = dataclasses.replace(note, phase=seat.raised.phase)
        else:
            note = dataclasses.replace(note, phase=self._phase(note, seat))
        self._write(
            WorkerFailed(
                time=time.time(),
                rank=note.slot,
                pid=seat.pid,
                phase=note.phase,
                reason=note.reason,
                host=seat.hostname,
                cause=note.kind,
            )
        )
        if not told:
            self._say(self._failure_text(note, seat))

    def _phase(self, note: NoteFailure | NoteVerdict, seat: Seat) -> str:
        if note.sure or self._folder is None or seat.place != HOME:
            return note.phase
        seen = phase_page.read(phase_page.page_file(self._folder, note.member))
        return note.phase if seen is None else seen.phase

    def _failure_text(self, note: NoteFailure, seat: Seat) -> str:
        who = f"rank {note.slot} (pid {seat.pid}{f' on {seat.hostname}' if seat.hostname else ''})"
        if note.kind != "raised" or seat.raised is None:
            return f"paceline: {who} failed in phase {note.phase}: {note.reason}"
        summary = seat.raised.summary.splitlines()[0] if seat.raised.summary else "an error"
        before, slot = self._raised.get(summary, (float("-inf"), -1))
        self._raised[summary] = time.monotonic(), note.slot
        if len(self._raised) > _FOLDED:
            del self._raised[next(iter(self._raised))]
        if time.monotonic() - before < _FOLD_SECONDS:
            same = f"paceline: {who} raised the same as rank {slot}: {summary}"
            return f"{same}; the run ends" if note.final else same
        if note.final:
            # The traceback is in the error that the caller raises: once is enough.
            return f"paceline: {who} raised in phase {note.phase}, and the run ends: {summary}"
        return (
            f"paceline: {who} raised in phase {note.phase}: {summary}\n"
            + seat.raised.traceback.rstrip().replace("\n", "\n  ").join(("  ", ""))
        )

    def _close(self, case: _Open) -> None:
        del self._open[case.note.member]
        note, seat = case.note, case.seat
        state, frames = case.state, case.frames
        if case.look is not None:
            state, frames = case.look.state, case.look.frames()
        line = frames[0] if frames else ""
        where = f" on {seat.hostname}" if seat.hostname else ""
        parts = [
            f"paceline: verdict: rank {note.slot} (pid {seat.pid}{where}), phase {note.phase}: {note.what}"
        ]
        if state:
            parts.append(f"  the kernel says: {state}")
        if frames:
            parts.append("  it was at " + "\n    called from ".join(frames))
        else:
            parts.append(f"  its Python line is not known; {_last_known(seat)}")
        parts += [f"  the others: {note.waiting}"] if note.waiting else []
        parts += [f"  what was done: {note.done}"] if note.done else []
        text = "\n".join(parts)
        self._write(
            Verdict(
                time=time.time(),
                rank=note.slot,
                host=seat.hostname,
                pid=seat.pid,
                phase=note.phase,
                line=line,
                waiting=note.waiting,
                action=note.done,
                text=text,
            )
        )
        self._say(text)
        if case.then is not None:
            case.then()

    def _say(self, text: str) -> None:
        self.last_text = text
        try:
            print(shown(text), file=sys.stderr, flush=True)
        except (OSError, ValueError):
            # Nobody reads the terminal any more; the journal has it.
            sys.stderr = None


def _last_known(seat: Seat) -> str:
    if seat.beat is None:
        return "it never said what it did"
    ago = time.monotonic() - seat.beat_at
    return f"{ago:.1f} s ago it said: {seat.beat.phase} for {seat.beat.seconds:.1f} s"
