"""The run's journal as its only writer keeps it: what members tell, once, and what happened to them.

Lines that come again after a reconnect or from the next first member are left out: a step that is in the
journal is not written again. Receipts of steps are merged: at most one line per member every 5 seconds and at
each change of the view, so that the journal grows by a known rate. A line or a receipt that no run can have
(another kind of value, a step far ahead of all that is known) is a WireError before anything of it is
written: the journal is the run's proof. The end of the run is written after the
last receipts: a journal that has it lacks none. While the disk is full, lines wait in memory. Must not know
sockets or processes.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

from paceline.core.control.messages import MOST_STEPS, Receipt
from paceline.core.errors import WireError
from paceline.core.events import (
    Event,
    RunEnded,
    RunResumed,
    RunStarted,
    ShardHashed,
    StepCommitted,
    StepsReceived,
    SupervisorStarted,
    WorkerFailed,
)
from paceline.core.journal import Journal, PatientJournal, last_lines

RECEIPT_SECONDS: Final = 5.0
RETRY_SECONDS: Final = 1.0
_EARLY: Final = 64
_REMEMBERED: Final = 4096
# What is told is at most some seconds old, and no run commits a million steps in that time.
_MOST_AHEAD: Final = 1 << 20
_LAST_TIME: Final = 1 << 40  # seconds; also excludes NaN


@final
@dataclass
class _Receipts:
    """Steps of one member that are not in the journal yet."""

    rank: int
    pid: int
    generation: int
    first: int
    last: int
    shards: tuple[int, ...]


@final
@dataclass(frozen=True)
class _Told:
    """A line of a member, and what it says."""

    line: str
    data: dict[str, Any]


@final
class Chronicle:
    """`journaled` is the last step that is written (or waits to be). `on_flush` hears of each process whose
    receipts were written."""

    def __init__(self, path: Path) -> None:
        self.journaled = 0
        self.on_flush: Callable[[int], None] = lambda pid: None
        self._retry_at = float("inf")
        self._receipts: dict[int, _Receipts] = {}
        self._flush_at = float("inf")
        self._received: dict[tuple[int, int], int] = {}
        self._early: dict[int, _Told] = {}  # steps that were told before the ones before them
        self._end: tuple[int, str] | None = None  # the run's end and who told it, until nobody tells any more
        self._seen: set[int] = set()
        self._seen_order: deque[int] = deque()
        self._hashed: set[tuple[int, int, int, str]] = set()
        self._failed: set[int] = set()  # processes of this run
        self._remember_tail(path)
        self._journal = PatientJournal(Journal(path), alone=True)

    @property
    def complete(self) -> bool:
        """Whether all that was told is in the file, but for what is held back."""
        return self._journal.complete

    @property
    def due(self) -> float:
        return min(self._flush_at, self._retry_at)

    def tick(self, now: float) -> None:
        """Write what is due."""
        if now >= self._retry_at:
            self._retry_at = float("inf")
            self._journal.retry()
            self._look_again(now)
        if now >= self._flush_at:
            self.flush()

    def write(self, event: Event) -> None:
        """Append one event, now or as soon as there is room for it. A process fails once: a supervisor that
        takes over may find out again what the one before it had written down."""
        if isinstance(event, WorkerFailed) and event.pid:
            if event.pid in self._failed:
                return
            self._failed.add(event.pid)
        self._journal.append(event)
        self._look_again(time.monotonic())

    def _look_again(self, now: float) -> None:
        if not self.complete:
            self._retry_at = min(self._retry_at, now + RETRY_SECONDS)

    def tell(self, lines: Iterable[str], pid: int = 0, known: int = MOST_STEPS) -> None:
        """Lines that a member tells, mostly the first; `known` is the step it was last known to be at."""
        news: list[str] = []
        # All are checked before any of them counts.
        fresh = _checked([line for line in lines if hash(line) not in self._seen], max(self.journaled, known))
        for told in fresh:
            mark, data = hash(told.line), told.data
            if mark in self._seen:
                continue
            self._remember(mark)
            if data["type"] == StepCommitted.type and data.get("step", 0) > self.journaled + 1:
                # The member that told the steps before is another one now, and its words are on their way.
                self._early[data["step"]] = told
                if len(self._early) > _EARLY:
                    self._add_early(news)
                continue
            if data["type"] == RunEnded.type:
                self._end = pid, told.line
                continue
            if data["type"] == RunResumed.type:
                self._add_early(news)
            self._add(told, news)
            while self.journaled + 1 in self._early:
                self._add(self._early.pop(self.journaled + 1), news)
        self._write_news(news)

    def _add(self, told: _Told, news: list[str]) -> None:
        if self._is_news(told.data):
            news.append(told.line)

    def _add_early(self, news: list[str]) -> None:
        """Nobody will tell what lies between."""
        for step in sorted(self._early):
            self._add(self._early.pop(step), news)

    def _write_news(self, news: Iterable[str]) -> None:
        """As they are, and at once: there is one for each step, and nothing but its name and step matters
        here."""
        self._journal.append_lines(line.encode() + b"\n" for line in news)
        self._look_again(time.monotonic())

    def receive(self, rank: int, pid: int, receipt: Receipt, known: int = MOST_STEPS) -> None:
        """A member's receipt: steps it committed and what it computed of them."""
        if receipt.last > max(self.journaled, known) + _MOST_AHEAD:
            raise WireError(f"a receipt up to step {receipt.last}, which the run cannot have reached")
        key = pid, receipt.generation
        first = max(receipt.first, self._received.get(key, 0) + 1)
        for step, shard, digest in receipt.shard_hashes:
            mark = step, shard, rank, digest
            if mark not in self._hashed:
                self._hashed.add(mark)
                self.write(ShardHashed(time=time.time(), step=step, shard=shard, rank=rank, hash=digest))
        if len(self._hashed) > _REMEMBERED:
            newest = max(mark[0] for mark in self._hashed)
            self._hashed = {mark for mark in self._hashed if mark[0] == newest}
        if first > receipt.last:
            return
        self._received[key] = receipt.last
        if len(self._received) > _REMEMBERED:
            del self._received[next(iter(self._received))]
        held = self._receipts.get(pid)
        if held is not None:
            if (held.generation, held.shards, held.last + 1) == (receipt.generation, receipt.shards, first):
                held.last = receipt.last
                return
            self._write_receipts(held)
        self._receipts[pid] = _Receipts(rank, pid, receipt.generation, first, receipt.last, receipt.shards)
        self._flush_at = min(self._flush_at, time.monotonic() + RECEIPT_SECONDS)

    def holds_back(self, pid: int) -> bool:
        """Whether something that this process said is not written yet, and waits for more."""
        return pid in self._receipts or (self._end is not None and self._end[0] == pid)

    def flush(self, pid: int | None = None, *, over: bool = False) -> None:
        """Write receipts that were held back: of one process, or of all; `over`: nobody tells any more."""
        if over:
            news: list[str] = []
            self._add_early(news)
            self._write_news(news)
        wanted = [pid] if pid is not None else list(self._receipts)
        flushed = [each for each in wanted if each in self._receipts]
        for each in flushed:
            self._write_receipts(self._receipts.pop(each))
        if not self._receipts:
            self._flush_at = float("inf")
        if over and self._end is not None:
            (teller, end), self._end = self._end, None
            self._write_news([end])
            flushed = [*flushed, teller]
        if self.complete:
            for each in flushed:
                if not self.holds_back(each):
                    self.on_flush(each)

    def close(self) -> None:
        """Write what can be written, and end."""
        self.flush()
        self._journal.close()

    def _write_receipts(self, held: _Receipts) -> None:
        self.write(
            StepsReceived(
                time=time.time(),
                rank=held.rank,
                pid=held.pid,
                generation=held.generation,
                first=held.first,
                last=held.last,
                shards=list(held.shards),
            )
        )

    def _is_news(self, data: dict[str, Any]) -> bool:
        match data:
            case {"type": StepCommitted.type, "step": int(step)}:
                if step <= self.journaled:
                    return False
                self.journaled = step
            case {"type": RunResumed.type, "step": int(step)}:
                # What was journaled after that step is done again, and so is journaled again.
                self.journaled, self._end = step, None
                self._received.clear()
            case {"type": RunStarted.type}:
                self.journaled, self._end = 0, None
        return True

    def _remember(self, mark: int) -> None:
        self._seen.add(mark)
        self._seen_order.append(mark)
        if len(self._seen_order) > _REMEMBERED:
            self._seen.discard(self._seen_order.popleft())

    def _remember_tail(self, path: Path) -> None:
        """What the end of an existing journal says, so that nothing of it is written twice."""
        lines = last_lines(path)
        for line in lines[-_REMEMBERED:]:
            self._remember(hash(line))
        for line in lines:
            data = _parsed(line)
            if data is not None:
                self._is_news(data)
                self._recall(data)

    def _recall(self, data: dict[str, Any]) -> None:
        match data:
            case {"type": SupervisorStarted.type, "attempt": 1}:
                self._failed.clear()  # what is before it belongs to an earlier run in this folder
            case {"type": WorkerFailed.type, "pid": int(pid)}:
                self._failed.add(pid)
            case {"type": StepsReceived.type, "pid": int(pid), "generation": int(view), "last": int(last)}:
                self._received[pid, view] = last
            case {
                "type": ShardHashed.type,
                "step": int(step),
                "shard": int(shard),
                "rank": int(rank),
                "hash": str(digest),
            }:
                self._hashed.add((step, shard, rank, digest))


def _checked(lines: list[str], base: int) -> list[_Told]:
    """Lines that a member tells when the run is at step `base`; WireError for what is no journal line."""
    found = []
    for line in lines:
        data = _parsed(line)
        if data is None or not 0 <= data["time"] < _LAST_TIME:
            raise WireError("a line for the journal is not one event as JSON, with its time")
        kind, step = data["type"], data.get("step", 0)
        if kind in (StepCommitted.type, RunResumed.type) and "step" not in data:
            raise WireError(f"a {kind} line for the journal has no step")
        # Who resumes may be at any step, and goes on from there.
        most = MOST_STEPS if kind == RunResumed.type else base + _MOST_AHEAD
        if type(step) is not int or not 0 <= step <= most:
            raise WireError(f"a {kind[:40]!r} line for the journal is of a step that the run cannot have")
        if kind == RunResumed.type:
            base = max(base, step)
        found.append(_Told(line, data))
    return found


def _parsed(line: str) -> dict[str, Any] | None:
    """The fields of a journal line; None for what is not one line of JSON."""
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
