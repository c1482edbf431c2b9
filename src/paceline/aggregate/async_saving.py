"""Checkpoints of a server that never waits for them: one copy into memory, a thread does the rest.

A version that is due while the last one is still being written is left out; the next is due as usual. One
that cannot be written is reported, and training goes on. Must not know what the state is made of.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from typing import Any, final

from torch import Tensor

from paceline.checkpoint.manifest import Info
from paceline.checkpoint.retention import Retention
from paceline.checkpoint.store import CheckpointStore
from paceline.checkpoint.writer import BackgroundWriter, Finished
from paceline.core import events
from paceline.core.errors import PacelineError

Contents = Callable[[], tuple[Mapping[str, Tensor], dict[str, Any]]]
Tell = Callable[[events.Event], None]

_END_SECONDS = 300.0


@final
class Keeper:
    """Saves `contents()` every so many steps."""

    def __init__(
        self, store: CheckpointStore, contents: Contents, tell: Tell, *, every: int, keep_last: int = 3
    ) -> None:
        self._store, self._contents, self._tell = store, contents, tell
        self._every = every
        self._retention = Retention(keep_last=keep_last)
        self._writer = BackgroundWriter(store)
        self._run = secrets.token_hex(8)
        self._parent: int | None = None
        self._info: Info | None = None  # of the version under way
        self._stall = 0.0
        self._seconds = 0.0
        self.newest: int | None = None
        self.newest_step = -1
        self.failed: PacelineError | None = None

    def goes_on_from(self, version: int, step: int, run: str) -> None:
        self._parent, self.newest, self.newest_step = version, version, step
        self._run = run or self._run

    def look(self, info: Info) -> None:
        """After a step: begins a version where one is due."""
        self.settle()
        if info.step % self._every == 0 and not self._writer.busy:
            self._begin(info)

    def settle(self) -> None:
        """Commits a version that is written. To be called now and then, also while no step is made."""
        self._settle(self._writer.poll())

    def finish(self, info: Info) -> None:
        """Saves the last state, and waits for it."""
        self._drain()
        if self.newest_step != info.step:
            self._begin(info)
            self._drain()

    def close(self) -> None:
        self._writer.close(timeout=_END_SECONDS)

    def _drain(self) -> None:
        while self._writer.busy:
            self._settle(self._writer.wait(_END_SECONDS))

    def _begin(self, info: Info) -> None:
        try:
            tensors, state = self._contents()
            version = self._store.next_version(self._run)
            self._info = Info(**{**vars(info), "parent": self._parent, "run": self._run})
            self._writer.save(version, tensors, state)
        except PacelineError as error:
            self._fail(0, info.step, error)

    def _settle(self, done: Finished | None) -> None:
        if done is None or self._info is None:
            return
        info = self._info
        if done.manifest is None and done.error is not None:
            self._fail(done.version, info.step, done.error)
        elif done.manifest is None:
            self._stall, self._seconds = done.stall, done.seconds
            self._writer.commit(done.version, done.records, info, self._retention)
        else:
            self.newest, self.newest_step, self._parent = done.version, info.step, done.version
            self._info, self.failed = None, None
            self._tell(
                events.CheckpointSaved(
                    time=time.time(),
                    version=done.version,
                    step=info.step,
                    bytes=done.nbytes,
                    stall=self._stall,
                    seconds=self._seconds + done.seconds,
                )
            )

    def _fail(self, version: int, step: int, error: PacelineError) -> None:
        self._info, self.failed = None, error
        reason = error.message.splitlines()[0]
        self._tell(events.CheckpointFailed(time=time.time(), version=version, step=step, reason=reason))
