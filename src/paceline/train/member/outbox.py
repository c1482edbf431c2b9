"""Collect what a worker sends about its steps, journal lines and receipts, into few messages.

Both are filled by the training thread and sent by any: with the next heartbeat, or at once where it matters.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, final

from paceline.control.messages import ControlMessage, JournalLines, StepReceipt
from paceline.core import events
from paceline.core.clock import Clock, MonotonicClock
from paceline.train.team import Team

# Longer than the time between two heartbeats: the lines of steps travel with heartbeats, and cost no wake-up.
_BATCH_SECONDS = 0.3
_MAX_LINES = 256  # in one message, whose size has a limit


class MessageSender(Protocol):
    def send(self, message: ControlMessage) -> object: ...


@dataclass
class _PendingReceipt:
    """A StepReceipt that later steps are still added to."""

    generation: int
    first: int
    last: int
    shards: tuple[int, ...]
    hashes: dict[str, str] = field(default_factory=dict)
    shard_hashes: list[tuple[int, int, str]] = field(default_factory=list)


@final
class Outbox:
    """Journal lines and receipts of one worker, each sent in the order in which they came."""

    def __init__(self, client: MessageSender, team: Team, clock: Clock | None = None) -> None:
        self._client, self._team = client, team
        self._clock: Clock = clock or MonotonicClock()
        # Held while sending: of two threads that send, the one with the earlier steps is first. The
        # supervisor ignores receipts for steps before the last one that it has seen.
        self._lock = threading.Lock()
        self._lines: list[str] = []
        self._lines_sent_at = -math.inf
        self._receipts: list[_PendingReceipt] = []

    def tell(self, event: events.Event) -> None:
        """Send an event to the journal; steps and metrics that come quickly are sent together."""
        with self._lock:
            self._lines.append(events.to_json(event))
            recent = self._clock.now() - self._lines_sent_at < _BATCH_SECONDS
            if not (recent and isinstance(event, events.StepCommitted | events.MetricReported)):
                self._send_lines()

    def committed(
        self, step: events.StepCommitted, shards: tuple[int, ...], shard_hashes: Mapping[int, str]
    ) -> None:
        """Keep a receipt; steps in a row with the same shards become one."""
        generation = self._team.generation
        with self._lock:
            last = self._receipts[-1] if self._receipts else None
            found = None if last is None else (last.generation, last.last + 1, last.shards)
            if last is None or found != (generation, step.step, shards):
                last = _PendingReceipt(generation, step.step, step.step, shards)
                self._receipts.append(last)
            last.last = step.step
            if step.hash is not None:
                last.hashes[str(step.step)] = step.hash
            last.shard_hashes += [(step.step, shard, digest) for shard, digest in shard_hashes.items()]

    def send_receipts(self) -> None:
        with self._lock:
            self._send_receipts()

    def flush(self) -> None:
        """Send everything."""
        with self._lock:
            self._send_lines()
            self._send_receipts()

    def _send_lines(self) -> None:
        lines, self._lines = self._lines, []
        self._lines_sent_at = self._clock.now()
        for start in range(0, len(lines), _MAX_LINES):
            part = tuple(lines[start : start + _MAX_LINES])
            self._client.send(JournalLines(generation=self._team.generation, lines=part))

    def _send_receipts(self) -> None:
        pending, self._receipts = self._receipts, []
        for one in pending:
            self._client.send(StepReceipt(**{**vars(one), "shard_hashes": tuple(one.shard_hashes)}))


def worth_keeping(messages: Sequence[ControlMessage]) -> Iterator[ControlMessage]:
    """Yield what the next start of the run has to know of messages that no supervisor has acknowledged."""
    for message in messages:
        if isinstance(message, JournalLines):
            # The end of the workers is not the end of the run, which continues from what they saved.
            lines = tuple(line for line in message.lines if json.loads(line)["type"] != events.RunEnded.type)
            if lines:
                yield replace(message, lines=lines)
        elif isinstance(message, StepReceipt):
            yield message
