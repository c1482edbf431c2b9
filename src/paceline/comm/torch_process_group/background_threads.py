"""Threads that run what a group has in the background: actions of one key in order, those of different keys
side by side.

A key's thread begins with its first action and ends some time after its last one. The threads are daemons: a
process whose peers never answer can still end.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Hashable
from typing import final

BackgroundAction = Callable[[], None]

_LINGER_SECONDS = 5.0


@final
class BackgroundThreads:
    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._queues: dict[Hashable, queue.SimpleQueue[BackgroundAction]] = {}
        self._unfinished: dict[Hashable, int] = {}
        self._idle = threading.Condition(self._lock)

    def submit(self, key: Hashable, action: BackgroundAction) -> None:
        """Run an action behind those of its key. It handles its own errors."""
        with self._lock:
            actions = self._queues.get(key)
            begin = actions is None
            if actions is None:
                actions = self._queues[key] = queue.SimpleQueue()
            self._unfinished[key] = self._unfinished.get(key, 0) + 1
            actions.put(action)
        if begin:
            threading.Thread(target=self._run, args=(key, actions), name=self._name, daemon=True).start()

    def is_busy(self, key: Hashable) -> bool:
        return key in self._unfinished

    def wait_idle(self, seconds: float) -> bool:
        """Return whether all actions have ended, after waiting for them."""
        with self._idle:
            return self._idle.wait_for(lambda: not self._unfinished, seconds)

    def _run(self, key: Hashable, actions: queue.SimpleQueue[BackgroundAction]) -> None:
        while True:
            try:
                action = actions.get(timeout=_LINGER_SECONDS)
            except queue.Empty:
                with self._lock:
                    if actions.empty():  # `submit` puts under the lock
                        del self._queues[key]
                        return
                continue
            action()
            del action  # it holds tensors
            with self._lock:
                self._unfinished[key] -= 1
                if not self._unfinished[key]:
                    del self._unfinished[key]
                    self._idle.notify_all()
