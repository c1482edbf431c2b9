"""The only writer of the run's journal: what members report, once, and what happened to them.

Duplicate lines (resent after a reconnect, or by a member of a new view) are dropped: a step that is in the
journal is not written again. Receipts of steps are merged: at most one line per member every 5 seconds and at
each view change, so that the journal grows by a known rate. A line or a receipt that no run can have (another
kind of value, a step far ahead of all that is known) raises WireError before anything of its message is
written: the journal is the run's proof. The end of the run is written after the last receipts: a journal that
has its end lacks none. While the disk is full, lines wait in memory.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, TypeAlias, final

from paceline.control import spool
from paceline.control.field_types import MOST_STEPS
from paceline.control.messages import JournalLines, StepReceipt
from paceline.core.clock import Clock
from paceline.core.errors import WireError
from paceline.core.events import (
    EpochEnded,
    Evaluated,
    Event,
    RunEnded,
    RunResumed,
    RunStarted,
    ShardHashed,
    StepCommitted,
    StepsReceived,
    SupervisorStarted,
    WorkerFailed,
    WorkerStarted,
)
from paceline.core.journal import Journal, PatientJournal, last_lines

JOURNAL_FILE: Final = "journal.jsonl"
RECEIPT_SECONDS: Final = 5.0
RETRY_SECONDS: Final = 1.0
_MAX_EARLY: Final = 64
_MAX_REMEMBERED: Final = 4096
# What a member sends is at most some seconds old, and no run commits a million steps in that time.
_MAX_AHEAD: Final = 1 << 20
_LAST_TIME: Final = 1 << 40  # seconds; also excludes NaN

_log = logging.getLogger(__name__)


_JournalLine: TypeAlias = tuple[str, dict[str, Any]]
"""A line of a member, and its fields."""


ProcessKey: TypeAlias = tuple[int, int]
"""A worker's process: its rank and its pid. Hosts and containers number their processes alike, so that a pid
by itself is that of many, and in a container also that of the next process of the rank."""

_NO_PROCESS: Final[ProcessKey] = (-1, 0)


@final
class JournalWriter:
    """Writes each line and receipt once. `journaled` is the last step that is written, or waits to be.
    `on_flush` gets each process whose messages are all in the file: then they can be acknowledged."""

    def __init__(
        self,
        path: Path,
        clock: Clock,
        wall_clock: Clock,
        on_flush: Callable[[ProcessKey], None] = lambda process: None,
    ) -> None:
        self.journaled = 0
        # The last evaluation and the last end of an epoch that are written: each member has its own line.
        self._evaluated, self._ended_epoch = -1, -1
        self._clock = clock
        self._wall_clock = wall_clock
        self._on_flush = on_flush
        self._retry_at = float("inf")
        self._receipts: dict[ProcessKey, StepsReceived] = {}  # merged until they are due
        self._flush_at = float("inf")
        self._received: dict[tuple[ProcessKey, int], int] = {}
        self._early: dict[int, _JournalLine] = {}  # steps that came before the steps before them
        self._end: tuple[ProcessKey, str] | None = None  # the run's end and the process that sent it
        self._seen: set[int] = set()
        self._seen_order: deque[int] = deque()
        self._hashed: set[tuple[int, int, int, str]] = set()
        self._failed: set[ProcessKey] = set()  # and not started since
        self._remember_tail(path)
        self._journal = PatientJournal(Journal(path), alone=True)

    @property
    def complete(self) -> bool:
        """Whether all lines are in the file, but for those that are held back."""
        return self._journal.complete

    @property
    def due(self) -> float:
        return min(self._flush_at, self._retry_at)

    def tick(self, now: float) -> None:
        """Write what is due."""
        if now >= self._retry_at:
            self._retry_at = float("inf")
            self._journal.retry()
            self._schedule_retry()
        if now >= self._flush_at:
            self.flush()

    def time(self) -> float:
        """Return the time for an event of the supervisor: seconds since 1970."""
        return self._wall_clock.now()

    def write(self, event: Event) -> None:
        """Append one event, now or as soon as there is room for it. A process fails once: a supervisor that
        takes over may notice again a failure that the one before it wrote."""
        if isinstance(event, WorkerStarted):
            self._failed.discard((event.rank, event.pid))
        elif isinstance(event, WorkerFailed) and event.pid:
            if (event.rank, event.pid) in self._failed:
                return
            self._failed.add((event.rank, event.pid))
        self._journal.append(event)
        self._schedule_retry()

    def add_lines(
        self, lines: Iterable[str], process: ProcessKey = _NO_PROCESS, known: int = MOST_STEPS
    ) -> None:
        """Write the new ones of a member's lines; `known` is the step at which the member was last seen.

        The first member in the view sends the lines of all steps. After a view change another member may be
        the first, and one that has the state of the steps before sends those that were not in the journal
        when the view was made, while messages of the former first member may still be on their way. So the
        same line comes twice, and a step may come before the one before it.
        """
        news: list[str] = []
        # Duplicates are known by their text and, for steps, by their number (`_is_news`). The numbers of
        # messages do not find them: another member sends its copies of them, and a supervisor that
        # took over has seen no message before.
        # All lines are checked before any of them counts: a message is taken as a whole or not at all.
        fresh = _checked([line for line in lines if hash(line) not in self._seen], max(self.journaled, known))
        for entry in fresh:
            line, data = entry
            mark = hash(line)
            if mark in self._seen:
                continue
            self._remember(mark)
            if data["type"] == StepCommitted.type and data.get("step", 0) > self.journaled + 1:
                # A gap. The steps between are on their way from the former first member, so this one waits
                # for them: the journal is in the order of steps. Where more than _MAX_EARLY wait, nothing can
                # be on its way, and the gap is final.
                self._early[data["step"]] = entry
                if len(self._early) > _MAX_EARLY:
                    self._add_early(news)
                continue
            if data["type"] == RunEnded.type:
                # Held back until all receipts are written, see `flush`. Of several ends the last counts.
                self._end = process, line
                continue
            if data["type"] == RunResumed.type:
                # The run goes back to a checkpoint: no step before it can come.
                self._add_early(news)
            self._add(entry, news)
            while self.journaled + 1 in self._early:
                self._add(self._early.pop(self.journaled + 1), news)
        self._write_lines(news)

    def add_receipt(self, rank: int, pid: int, receipt: StepReceipt, known: int = MOST_STEPS) -> None:
        """Add a member's receipt: steps it committed and which shards it computed of them."""
        if receipt.last > max(self.journaled, known) + _MAX_AHEAD:
            raise WireError(f"a receipt up to step {receipt.last}, which the run cannot have reached")
        # By generation: after a restore the same steps are committed again, in a later view, and count again.
        # Cut to what is new: after a reconnect, and from the spool, a receipt comes again.
        process = rank, pid
        key = process, receipt.generation
        first = max(receipt.first, self._received.get(key, 0) + 1)
        for step, shard, digest in receipt.shard_hashes:
            mark = step, shard, rank, digest
            if mark not in self._hashed:
                self._hashed.add(mark)
                self.write(ShardHashed(time=self.time(), step=step, shard=shard, rank=rank, hash=digest))
        if len(self._hashed) > _MAX_REMEMBERED:
            newest = max(mark[0] for mark in self._hashed)
            self._hashed = {mark for mark in self._hashed if mark[0] == newest}
        if first > receipt.last:
            return
        self._received[key] = receipt.last
        if len(self._received) > _MAX_REMEMBERED:
            del self._received[next(iter(self._received))]
        shards, pending = list(receipt.shards), self._receipts.get(process)
        if pending is not None:
            follows = pending.generation, pending.shards, pending.last + 1
            if follows == (receipt.generation, shards, first):
                self._receipts[process] = replace(pending, last=receipt.last)
                return
            self._write_receipts(process)
        self._receipts[process] = StepsReceived(
            time=0.0,
            rank=rank,
            pid=pid,
            generation=receipt.generation,
            first=first,
            last=receipt.last,
            shards=shards,
        )
        self._flush_at = min(self._flush_at, self._clock.now() + RECEIPT_SECONDS)

    def has_written_all_of(self, process: ProcessKey) -> bool:
        """Return whether all messages of this process are in the file, so that they can be acknowledged."""
        # A worker deletes what is acknowledged. What waits here in memory dies with this supervisor, so that
        # the worker has to keep its copy until the line is in the file.
        held_back = process in self._receipts or (self._end is not None and self._end[0] == process)
        return self.complete and not held_back

    def flush(self, process: ProcessKey | None = None, *, over: bool = False) -> None:
        """Write receipts that are held back: of one process, or of all. `over`: no member sends more, so the
        end of the run is written too."""
        if over:
            news: list[str] = []
            self._add_early(news)
            self._write_lines(news)
        wanted = [process] if process is not None else list(self._receipts)
        flushed = [each for each in wanted if each in self._receipts]
        for each in flushed:
            self._write_receipts(each)
        if not self._receipts:
            self._flush_at = float("inf")
        if over and self._end is not None:
            # Last of all lines, so that a journal with an end lacks no receipt.
            (sender, end), self._end = self._end, None
            self._write_lines([end])
            flushed = [*flushed, sender]
        for each in flushed:
            if self.has_written_all_of(each):
                self._on_flush(each)

    def import_spool(self, folder: Path, secret: bytes) -> None:
        """Write what workers spooled while no supervisor ran, and delete the files once it is written. Lines
        and receipts that the journal has are dropped like those that are sent again after a reconnect."""
        if not spool.has_spool(folder):
            return
        spooled = spool.read(folder, secret)
        # Steps first: a receipt is about a step that the journal has.
        for entry in spooled:
            for message in entry.messages:
                if isinstance(message, JournalLines):
                    with _skipping_damage(entry.file):
                        self.add_lines(message.lines)
        for entry in spooled:
            for message in entry.messages:
                if isinstance(message, StepReceipt):
                    with _skipping_damage(entry.file):
                        self.add_receipt(entry.rank, entry.pid, message)
        self.flush(over=True)
        if self.complete:
            spool.remove_spool(folder, spooled)

    def close(self) -> None:
        """Write what can be written, and close the file."""
        self.flush()
        self._journal.close()

    def _schedule_retry(self) -> None:
        if not self.complete:
            self._retry_at = min(self._retry_at, self._clock.now() + RETRY_SECONDS)

    def _add(self, entry: _JournalLine, news: list[str]) -> None:
        line, data = entry
        if self._is_news(data):
            news.append(line)

    def _add_early(self, news: list[str]) -> None:
        """Add the steps that wait for steps before them: those will not come."""
        for step in sorted(self._early):
            self._add(self._early.pop(step), news)

    def _write_lines(self, lines: Iterable[str]) -> None:
        """Write members' lines as they are, without building events: there is one for each step."""
        self._journal.append_lines(line.encode() + b"\n" for line in lines)
        self._schedule_retry()

    def _write_receipts(self, process: ProcessKey) -> None:
        self.write(replace(self._receipts.pop(process), time=self.time()))

    def _is_news(self, data: dict[str, Any]) -> bool:
        match data:
            case {"type": StepCommitted.type, "step": int(step)}:
                if step <= self.journaled:
                    return False
                self.journaled = step
            case {"type": RunResumed.type, "step": int(step)}:
                # Steps after that one are done again, and journaled again: their lines have other times, so
                # that they are no duplicates of the first ones.
                self.journaled, self._end = step, None
                # Those of this step may be done again.
                self._evaluated = min(self._evaluated, step - 1)
                epoch = data.get("epoch")
                self._ended_epoch = min(self._ended_epoch, epoch - 1) if isinstance(epoch, int) else -1
                self._received.clear()
            case {"type": RunStarted.type}:
                self.journaled, self._end = 0, None
                self._evaluated = self._ended_epoch = -1
            case {"type": Evaluated.type, "step": int(step)}:
                if step <= self._evaluated:
                    return False
                self._evaluated = step
            case {"type": EpochEnded.type, "epoch": int(epoch)}:
                if epoch <= self._ended_epoch:
                    return False
                self._ended_epoch = epoch
        return True

    def _remember(self, mark: int) -> None:
        self._seen.add(mark)
        self._seen_order.append(mark)
        if len(self._seen_order) > _MAX_REMEMBERED:
            self._seen.discard(self._seen_order.popleft())

    def _remember_tail(self, path: Path) -> None:
        """Read the end of an existing journal, so that nothing of it is written twice."""
        lines = last_lines(path)
        for line in lines[-_MAX_REMEMBERED:]:
            self._remember(hash(line))
        for line in lines:
            data = _parsed(line)
            if data is not None:
                self._is_news(data)
                self._recall(data)

    def _recall(self, data: dict[str, Any]) -> None:
        match data:
            case {"type": SupervisorStarted.type, "attempt": 1}:
                self._failed.clear()  # processes before it belong to an earlier run in this folder
            case {"type": WorkerStarted.type, "rank": int(rank), "pid": int(pid)}:
                self._failed.discard((rank, pid))
            case {"type": WorkerFailed.type, "rank": int(rank), "pid": int(pid)}:
                self._failed.add((rank, pid))
            case {
                "type": StepsReceived.type,
                "rank": int(rank),
                "pid": int(pid),
                "generation": int(view),
                "last": int(last),
            }:
                self._received[(rank, pid), view] = last
            case {
                "type": ShardHashed.type,
                "step": int(step),
                "shard": int(shard),
                "rank": int(rank),
                "hash": str(digest),
            }:
                self._hashed.add((step, shard, rank, digest))


@contextlib.contextmanager
def _skipping_damage(file: Path) -> Iterator[None]:
    """Skip a damaged message: it must not keep a supervisor from starting."""
    try:
        yield
    except WireError as error:
        _log.warning("%s: a message is left out: %s", file, error.message)


def _checked(lines: list[str], base: int) -> list[_JournalLine]:
    """Parse lines that a member sends when the run is at step `base`; WireError for an impossible one."""
    entries = []
    for line in lines:
        data = _parsed(line)
        if data is None or not 0 <= data["time"] < _LAST_TIME:
            raise WireError("a line for the journal is not one event as JSON, with its time")
        kind, step = data["type"], data.get("step", 0)
        if kind in (StepCommitted.type, RunResumed.type) and "step" not in data:
            raise WireError(f"a {kind} line for the journal has no step")
        # A run may resume at any step, and continues from there.
        limit = MOST_STEPS if kind == RunResumed.type else base + _MAX_AHEAD
        if type(step) is not int or not 0 <= step <= limit:
            raise WireError(f"a {kind[:40]!r} line for the journal is of a step that the run cannot have")
        if kind == RunResumed.type:
            base = max(base, step)
        entries.append((line, data))
    return entries


def _parsed(line: str) -> dict[str, Any] | None:
    """Return the fields of a journal line; None for what is not one line of JSON."""
    if "\n" in line:
        return None
    try:
        line.encode()
        data = json.loads(line)
    except (ValueError, RecursionError):
        return None
    match data:
        case {"type": str(), "time": float() | int()}:
            return dict(data)
    return None
