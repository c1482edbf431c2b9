"""The queue and the thread between a run and one tracker.

The run puts work in and goes on; the thread does it. The queue has a bound: what finds it full is dropped,
counted and said once. Work that raises is counted and said once. At the end the run waits for the rest for a
limited time, from which the time that the thread has been stuck already is taken off: a tracker that has hung
for long is abandoned at once. Its thread is a daemon, so that it does not keep the process either.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import final

from paceline.core import log
from paceline.core.clock import Clock, MonotonicClock
from paceline.core.wording import counted, first_line

_log = logging.getLogger(__name__)

CAPACITY = 1024
_NICE = 10
_FLUSH_SECONDS = 1.0  # between two flushes while work comes in

Work = Callable[[], None]


@final
class TrackerQueue:
    """Work for one tracker, done in order by a thread; `name` is the tracker's, for messages.

    `flush` is called in the thread about once a second while there is something new, and before the end.
    """

    def __init__(
        self, name: str, flush: Work = lambda: None, *, capacity: int = CAPACITY, clock: Clock | None = None
    ) -> None:
        self._name, self._flush, self._capacity = name, flush, capacity
        self._clock: Clock = clock or MonotonicClock()
        self._changed = threading.Condition()
        self._waiting: deque[Work] = deque()
        self._busy_since: float | None = None
        self._closing = self._abandoned = False
        self.dropped = 0  # found the queue full, or came after it was abandoned
        self.failed = 0  # raised
        self._thread = threading.Thread(target=self._work, name=f"paceline-{name}", daemon=True)
        self._thread.start()

    def put(self, work: Work, *, however_full: bool = False) -> None:
        """Have the thread do `work`; drop it where the queue is full."""
        with self._changed:
            full = len(self._waiting) >= self._capacity and not however_full
            if not (full or self._closing):
                self._waiting.append(work)
                self._changed.notify()
                return
            self.dropped += 1
            first = self.dropped == 1
        if first:
            _log.warning(
                "%s is too slow: %s wait for it, and what comes now is dropped; training goes on",
                self._name,
                counted(self._capacity, "record"),
            )

    def close(self, seconds: float) -> bool:
        """Wait until all work is done, for at most `seconds` from when the thread was last known to proceed;
        return whether it was done. Otherwise the thread is abandoned. May be called twice."""
        with self._changed:
            self._closing = True
            stuck = 0.0 if self._busy_since is None else self._clock.now() - self._busy_since
            self._changed.notify()
        self._thread.join(max(0.0, seconds - stuck))
        with self._changed:
            done = not self._thread.is_alive()
            said, self._abandoned = self._abandoned, not done
            lost = len(self._waiting) + (self._busy_since is not None)
            self._waiting.clear()
            if not said:
                self.dropped += 0 if done else lost
        if not done and not said:
            _log.warning(
                "%s does not answer and is abandoned: %s of this run did not reach it",
                self._name,
                counted(self.dropped, "record"),
            )
        elif self.dropped and not said:
            _log.warning("%s: %s of this run did not reach it", self._name, counted(self.dropped, "record"))
        return done

    def _work(self) -> None:
        if log.position().rank is None:
            # In the process that called `fit` this thread competes with the workers for processors. In that
            # of a rank it would delay the rank: it may wait for a processor while it has Python's lock.
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        unflushed, flushed_at = False, self._clock.now()
        while True:
            with self._changed:
                self._busy_since = None
                if not self._waiting and not self._closing:
                    self._changed.wait(_FLUSH_SECONDS if unflushed else None)
                if self._abandoned or (self._closing and not self._waiting and not unflushed):
                    return
                work = self._waiting.popleft() if self._waiting else None
                now = self._busy_since = self._clock.now()
            if work is not None:
                self._do(work)
                unflushed = True
            if unflushed and not self._abandoned and (work is None or now - flushed_at >= _FLUSH_SECONDS):
                self._do(self._flush)
                unflushed, flushed_at = False, self._clock.now()

    def _do(self, work: Work) -> None:
        try:
            work()
        except Exception as error:
            self.failed += 1
            if self.failed == 1:
                _log.warning(
                    "%s failed: %s: %s; training goes on, and further failures are only counted",
                    self._name,
                    type(error).__name__,
                    first_line(error),
                )
