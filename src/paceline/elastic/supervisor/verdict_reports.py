"""Verdicts, failures and warnings for people: one block on the terminal, one line in the journal.

A verdict holds the Python line at which a worker stands: the worker writes its stack when it is asked, or the
agent of its host sends it. That takes a few milliseconds, so a verdict is opened, polled by the loop, and
reported when the stack is complete or cannot be had. An exception that several workers raise is shown once.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, final

from paceline.control.messages import StackRequest
from paceline.core import phase_page, traceback_filter
from paceline.core.clock import Clock
from paceline.core.errors import PacelineError
from paceline.core.events import Note, Verdict, WorkerFailed
from paceline.core.untrusted import printable
from paceline.elastic.machine.actions import RecordFailure, RecordVerdict
from paceline.elastic.machine.settings import LOCAL_AGENT
from paceline.elastic.supervisor.agents import Agents
from paceline.elastic.supervisor.journal_writer import JournalWriter
from paceline.elastic.supervisor.process_probe import MAX_STACK_SECONDS, PROBE_POLL_SECONDS, StackProbe
from paceline.elastic.supervisor.worker_record import WorkerRecord

_ROUND_TRIP_SECONDS: Final = 0.6  # for the request to an agent and its reply
_SAME_SECONDS: Final = 10.0
_MAX_SUMMARIES: Final = 64


@final
@dataclass
class _OpenVerdict:
    """`probe` is of a worker of this host; `deadline`: until when an agent may reply."""

    note: RecordVerdict
    record: WorkerRecord
    probe: StackProbe | None
    deadline: float
    state: str = ""
    frames: Sequence[str] = ()
    then: Callable[[], None] | None = None


@final
@dataclass(eq=False)
class VerdictReports:
    """In the run's `folder` workers of this host keep a page with their phase, which is newer than their
    last heartbeat. `agents` are asked about theirs; their reply is `stack_found`. `last_text` is what was
    shown last."""

    clock: Clock
    journal: JournalWriter
    folder: Path
    agents: Agents
    due: float = float("inf")
    last_text: str = ""
    _open: dict[int, _OpenVerdict] = dataclasses.field(default_factory=dict)
    _raised: dict[str, tuple[float, int]] = dataclasses.field(default_factory=dict)

    def warn(self, error: PacelineError) -> None:
        """Report a shortage or a refusal that training survives."""
        self._print(f"paceline: {printable(error)}")
        self.journal.write(Note(time=self.journal.time(), text=str(error)))

    def open(self, note: RecordVerdict, record: WorkerRecord) -> None:
        """Begin a verdict: ask the worker for its stack."""
        now, process = self.clock.now(), record.process
        # Before the probe: a worker that was stopped may be let run to write its stack, and enter a phase.
        note = dataclasses.replace(note, phase=self._phase(note, record))
        probe = StackProbe(process, now) if process is not None else None
        asked = (
            probe is None
            and record.agent_id != LOCAL_AGENT
            and self.agents.request(record.agent_id, StackRequest(member=record.member))
        )
        deadline = now + MAX_STACK_SECONDS + _ROUND_TRIP_SECONDS if asked else now
        self._open[note.member] = _OpenVerdict(note, record, probe, deadline)
        at_once = not asked and (process is None or process.has_ended)
        self.due = now if at_once else min(self.due, now + PROBE_POLL_SECONDS)

    def stack_found(self, member: int, state: str, frames: Sequence[str]) -> None:
        """Complete a verdict with what the worker's agent found."""
        case = self._open.get(member)
        if case is not None:
            case.state, case.frames = state, frames
            self._report(case)

    def after(self, member: int, then: Callable[[], None]) -> bool:
        """Call `then` once the verdict about `member` is reported; False: there is none, call it now."""
        case = self._open.get(member)
        if case is None:
            return False
        case.then = then
        if case.probe is not None:
            case.probe.wake()
        return True

    def tick(self, now: float) -> None:
        """Report the verdicts whose stack is complete or cannot be had."""
        if now < self.due:
            return
        for case in list(self._open.values()):
            if case.probe.is_over(now) if case.probe is not None else now >= case.deadline:
                self._report(case)
        self.due = now + PROBE_POLL_SECONDS if self._open else float("inf")

    def report_open(self, member: int) -> None:
        """Report the open verdict about a member as it is: its process has ended."""
        if member in self._open:
            self._report(self._open[member])

    def close(self) -> None:
        """Report all open verdicts as they are."""
        for member in list(self._open):
            self.report_open(member)

    def failure(self, note: RecordFailure, record: WorkerRecord, *, has_verdict: bool) -> None:
        """Report a failed worker: in the journal, and on the terminal unless a verdict is shown there."""
        if note.kind == "preempted" and not record.pid:
            return  # it was asked for and never started
        # Of an exception one line: its traceback is in the worker's log, and in the error that the caller
        # raises if the run ends.
        exception = record.exception if note.kind == "raised" else None
        # The exception's message is newer than the last heartbeat.
        phase = exception.phase if exception is not None else self._phase(note, record)
        note = dataclasses.replace(note, phase=phase)
        self.journal.write(
            WorkerFailed(
                time=self.journal.time(),
                rank=note.slot,
                pid=record.pid,
                phase=note.phase,
                reason=note.reason,
                host=record.hostname,
                cause=note.kind,
            )
        )
        if not has_verdict:
            self._show(self._failure_text(note, record))

    def _phase(self, note: RecordFailure | RecordVerdict, record: WorkerRecord) -> str:
        if note.sure or record.agent_id != LOCAL_AGENT:
            return note.phase
        page = phase_page.read(phase_page.page_file(self.folder, note.member))
        return note.phase if page is None else page.phase

    def _failure_text(self, note: RecordFailure, record: WorkerRecord) -> str:
        who = f"rank {note.slot} ({_process(record)})"
        if note.kind != "raised" or record.exception is None:
            return f"paceline: {who} failed in phase {note.phase}: {note.reason}"
        summary = record.exception.summary.splitlines()[0] if record.exception.summary else "an error"
        now = self.clock.now()
        before, slot = self._raised.get(summary, (float("-inf"), -1))
        self._raised[summary] = now, note.slot
        if len(self._raised) > _MAX_SUMMARIES:
            del self._raised[next(iter(self._raised))]
        if now - before < _SAME_SECONDS:
            same = f"paceline: {who} raised the same as rank {slot}"
            return f"{same}, and the run ends" if note.final else same
        if note.final:
            return f"paceline: {who} raised in phase {note.phase}, and the run ends: {summary}"
        place = traceback_filter.last_place(record.exception.traceback)
        return f"paceline: {who} raised in phase {note.phase}{place}: {summary}"

    def _report(self, case: _OpenVerdict) -> None:
        del self._open[case.note.member]
        note, record = case.note, case.record
        state, frames = case.state, case.frames
        if case.probe is not None:
            state, frames = case.probe.state, case.probe.frames()
        parts = [f"paceline: verdict: rank {note.slot} ({_process(record)}), phase {note.phase}: {note.what}"]
        if state:
            parts.append(f"  the kernel says: {state}")
        if frames:
            parts.append("  it was at " + "\n    called from ".join(frames))
        else:
            parts.append(f"  its Python line is not known; {self._last_heartbeat(record)}")
        parts += [f"  the others: {note.waiting}"] if note.waiting else []
        parts += [f"  what was done: {note.done}"] if note.done else []
        text = "\n".join(parts)
        self.journal.write(
            Verdict(
                time=self.journal.time(),
                rank=note.slot,
                host=record.hostname,
                pid=record.pid,
                phase=note.phase,
                line=frames[0] if frames else "",
                waiting=note.waiting,
                action=note.done,
                text=text,
            )
        )
        self._show(text)
        if case.then is not None:
            case.then()

    def _last_heartbeat(self, record: WorkerRecord) -> str:
        if record.heartbeat is None:
            return "it sent no heartbeat"
        ago, seconds = self.clock.now() - record.heartbeat_at, record.heartbeat.seconds
        return f"last heartbeat {ago:.1f} s ago: {record.heartbeat.phase} for {seconds:.1f} s"

    def _show(self, text: str) -> None:
        self.last_text = text
        self._print(printable(text))

    def _print(self, text: str) -> None:
        try:
            print(text, file=sys.stderr, flush=True)
        except (OSError, ValueError):
            # The terminal is closed; the journal has the text.
            sys.stderr = None


def _process(record: WorkerRecord) -> str:
    return f"pid {record.pid}{f' on {record.hostname}' if record.hostname else ''}"
