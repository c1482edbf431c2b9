"""Threads that run what a group has in the background: actions of one key in order, those of different keys
side by side.

A key with actions has a thread, which takes another key when it has run them all, and ends after some time
without one. The threads are daemons: a process whose peers never answer can still end.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Hashable
from typing import final

from paceline.core.errors import ResourceError

BackgroundAction = Callable[[], None]

_LINGER_SECONDS = 5.0


@final
class BackgroundThreads:
    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._actions: dict[Hashable, deque[BackgroundAction]] = {}  # of each key that has a thread
        self._unfinished: dict[Hashable, int] = {}
        self._idle = threading.Condition(self._lock)
        self._keys: queue.SimpleQueue[Hashable] = queue.SimpleQueue()  # for threads that wait for one
        self._spare = 0  # threads that wait for a key, less those for which one is in `_keys`
        self._of_this_thread = threading.local()

    def submit(self, key: Hashable, action: BackgroundAction) -> None:
        """Run an action behind those of its key. It handles its own errors."""
        with self._lock:
            actions, from_action = self._actions.get(key), self.serves(key)
            if actions is None or from_action:
                self._find_thread(key)
            if from_action:
                # The action that asks for another one of its key may wait for it, as the callback of a future
                # does: the other thread runs it, and what is behind it.
                self._of_this_thread.key = None
            if actions is None:
                actions = self._actions[key] = deque()
            self._unfinished[key] = self._unfinished.get(key, 0) + 1
            actions.append(action)

    def is_busy(self, key: Hashable) -> bool:
        return key in self._unfinished

    def serves(self, key: Hashable) -> bool:
        """Return whether the caller is an action of this key, or a callback of one."""
        return getattr(self._of_this_thread, "key", None) == key

    def wait_idle(self, seconds: float) -> bool:
        """Return whether all actions have ended, after waiting for them."""
        with self._idle:
            return self._idle.wait_for(lambda: not self._unfinished, seconds)

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
            self._of_this_thread.key = key
            action = self._next_action(key, after_one=False)
            while action is not None:
                action()
                del action  # it holds tensors
                action = self._next_action(key, after_one=True)
            key = self._next_key()

    def _next_action(self, key: Hashable, *, after_one: bool) -> BackgroundAction | None:
        """Return the next action of a key after one has ended; None if this thread has none left."""
        with self._lock:
            if after_one:
                self._unfinished[key] -= 1
                if not self._unfinished[key]:
                    del self._unfinished[key]
                    self._idle.notify_all()
            if self._of_this_thread.key is not None:  # else another thread has the key by now
                if actions := self._actions[key]:
                    return actions.popleft()
                del self._actions[key]
                self._of_this_thread.key = None
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
