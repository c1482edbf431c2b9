"""Threads that run what a group has in the background: actions of one key in order, those of different keys
side by side.

A key with actions has a thread, which takes another key when it has run them all, and ends after some time
without one. The order of a key can hold a `Place`: what is submitted to it later runs there, and what is
behind it waits until the place is closed. The threads are daemons: a process whose peers never answer can
still end.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import final

from paceline.core.errors import ResourceError

BackgroundAction = Callable[[], None]

_LINGER_SECONDS = 5.0
_of_this_thread = threading.local()  # `serves`: the threads and the key whose actions this thread runs


@final
class Place:
    """A place in the order of a key: its actions, and the places in it. Closed, it takes no more of them."""

    def __init__(self) -> None:
        self.queue: deque[BackgroundAction | Place] = deque()
        self.closed = False

    def front(self) -> Place:
        """Return the part that comes next: one whose queue begins with an action, or one that is open and
        empty."""
        while self.queue and isinstance(first := self.queue[0], Place):
            if not first.closed:
                return first.front()
            self.queue.popleft()
            self.queue.extendleft(reversed(first.queue))
        return self


@final
class _Line:
    """What a key has under way. `unfinished` counts actions that have not ended and places that are open."""

    def __init__(self) -> None:
        self.order = Place()
        self.unfinished = 0
        self.running = False  # by the thread that serves the key


@final
class BackgroundThreads:
    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._lines: dict[Hashable, _Line] = {}  # of each key with something under way
        self._idle = threading.Condition(self._lock)
        self._keys: queue.SimpleQueue[Hashable] = queue.SimpleQueue()  # for threads that wait for one
        self._spare = 0  # threads that wait for a key, less those for which one is in `_keys`

    def submit(self, key: Hashable, action: BackgroundAction, place: Place | None = None) -> None:
        """Run an action behind those of its key, or of a place in its order. It handles its own errors."""
        with self._lock:
            line = self._lines.get(key) or _Line()
            part = place or line.order
            front = line.order.front()
            if not line.running and (front is part or front.queue):
                self._find_thread(key)
                line.running = True
            part.queue.append(action)
            line.unfinished += 1
            self._lines[key] = line

    def run_here(self, key: Hashable, action: BackgroundAction, place: Place) -> bool:
        """Run an action in the caller's thread if it is the next one of its key, and return whether it
        was."""
        with self._lock:
            line = self._lines[key]
            if line.running or line.order.front() is not place or place.queue:
                return False
            line.running = True
        try:
            action()
        finally:
            with self._lock:
                line.running = False
                self._go_on(key, line)
        return True

    def open_place(self, key: Hashable, within: Place | None = None) -> Place:
        """Keep a place behind what the key, or a place in its order, has by now."""
        with self._lock:
            line = self._lines.setdefault(key, _Line())
            place = Place()
            (within or line.order).queue.append(place)
            line.unfinished += 1
            return place

    def close_place(self, key: Hashable, place: Place) -> None:
        """Let what is behind a place follow what was submitted to it."""
        with self._lock:
            if not place.closed:
                place.closed = True
                line = self._lines[key]
                self._one_less(key, line)
                self._go_on(key, line)

    def is_busy(self, key: Hashable) -> bool:
        return key in self._lines

    def wait_idle(self, seconds: float) -> bool:
        """Return whether all actions have ended, after waiting for them."""
        with self._idle:
            return self._idle.wait_for(lambda: not self._lines, seconds)

    def pause(self, key: Hashable) -> None:
        """Let another thread run what is next of a key that this thread serves."""
        with self._lock:
            line = self._lines[key]
            line.running = False
            try:
                self._go_on(key, line)
            except ResourceError:
                line.running = True  # by this thread, after what it does now
            else:
                _of_this_thread.serves = None

    def resume(self, key: Hashable) -> None:
        """Serve the key again, unless another thread does by now."""
        with self._lock:
            line = self._lines[key]
            if not line.running:
                line.running = True
                _of_this_thread.serves = (self, key)

    def _go_on(self, key: Hashable, line: _Line) -> None:
        """Find a thread for what is next of a key, if nothing of it runs. The caller has the lock."""
        if not line.running and line.order.front().queue:
            line.running = True
            try:
                self._find_thread(key)
            except ResourceError:
                line.running = False
                raise

    def _one_less(self, key: Hashable, line: _Line) -> None:
        line.unfinished -= 1
        if not line.unfinished:
            del self._lines[key]
            self._idle.notify_all()

    def _find_thread(self, key: Hashable) -> None:
        """Hand a key to a thread that waits for one, or to a new one. The caller has the lock."""
        if self._spare:
            self._spare -= 1
            self._keys.put(key)
            return
        thread = threading.Thread(target=self._run, args=(key,), name=self._name, daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            raise ResourceError(
                f"no thread could be started for what a process group does in the background: {error}",
                remedy="raise the limit on processes and threads (`ulimit -u`, the container's pids limit)",
            ) from error

    def _run(self, key: Hashable | None) -> None:
        while key is not None:
            _of_this_thread.serves = (self, key)
            action = self._next_action(key, after_one=False)
            while action is not None:
                action()
                del action  # it holds tensors
                action = self._next_action(key, after_one=True)
            key = self._next_key()

    def _next_action(self, key: Hashable, *, after_one: bool) -> BackgroundAction | None:
        """Return the next action of a key after one has ended; None if this thread has none left."""
        with self._lock:
            line = self._lines[key]
            if _of_this_thread.serves is not None:  # else another thread may serve the key by now
                front = line.order.front()
                if front.queue:
                    if after_one:
                        line.unfinished -= 1
                    action = front.queue.popleft()
                    assert not isinstance(action, Place)
                    return action
                line.running = False
                _of_this_thread.serves = None
            if after_one:
                self._one_less(key, line)
            self._spare += 1
            return None

    def _next_key(self) -> Hashable | None:
        """Return the next key for this thread; None when there was none for some time."""
        while True:
            try:
                return self._keys.get(timeout=_LINGER_SECONDS)
            except queue.Empty:
                with self._lock:
                    if self._spare:  # else a key for this thread has just come
                        self._spare -= 1
                        return None


@contextmanager
def key_left_to_others() -> Iterator[None]:
    """Let other threads run the actions of the key that this thread serves: what runs here may wait for
    them."""
    serves: tuple[BackgroundThreads, Hashable] | None = getattr(_of_this_thread, "serves", None)
    if serves is None:
        yield
        return
    threads, key = serves
    threads.pause(key)
    try:
        yield
    finally:
        threads.resume(key)


def in_background_thread() -> bool:
    """Return whether this thread runs an action, or a callback of one."""
    return hasattr(_of_this_thread, "serves")
