"""Checkpoints of the server, which never waits for them: one copy into memory, a thread writes it.

A version that is due while the last one is still being written is skipped; the next is due as usual. One that
cannot be written is reported, and training continues.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from typing import Any, final

from torch import Tensor

from paceline.checkpoint.manifest import CheckpointInfo
from paceline.checkpoint.retention import Retention
from paceline.checkpoint.store import CheckpointStore
from paceline.checkpoint.writer import BackgroundWriter, WriteResult
from paceline.core import events
from paceline.core.errors import PacelineError

Contents = Callable[[], tuple[Mapping[str, Tensor], dict[str, Any]]]
Emit = Callable[[events.Event], None]

_END_SECONDS = 300.0


@final
class AsyncCheckpointer:
    """Writer of checkpoints: `contents()` every `every` steps; `emit` takes the journal's events."""

    def __init__(
        self, store: CheckpointStore, contents: Contents, emit: Emit, *, every: int, keep_last: int = 3
    ) -> None:
        self._store, self._contents, self._emit = store, contents, emit
        self._every = every
        self._retention = Retention(keep_last=keep_last)
        self._writer = BackgroundWriter(store)
        self._run = secrets.token_hex(8)
        self._parent: int | None = None
        self._info: CheckpointInfo | None = None  # of the version in progress
        self._stall = 0.0
        self._seconds = 0.0
        self._newest_step = -1

    def resume_from(self, version: int, step: int, run: str) -> None:
        self._parent, self._newest_step = version, step
        self._run = run or self._run

    def after_step(self, info: CheckpointInfo) -> None:
        """Begin a version where one is due."""
        self.poll()
        if info.step % self._every == 0 and not self._writer.busy:
            self._begin(info)

    def poll(self) -> None:
        """Commit a version that is written; called regularly, also while no step is made."""
        self._advance(self._writer.poll())

    def finish(self, info: CheckpointInfo) -> None:
        """Save the last state, and wait for it."""
        self._drain()
        if self._newest_step != info.step:
            self._begin(info)
            self._drain()

    def close(self) -> None:
        self._writer.close(timeout=_END_SECONDS)

    def _drain(self) -> None:
        while self._writer.busy:
            self._advance(self._writer.wait(_END_SECONDS))

    def _begin(self, info: CheckpointInfo) -> None:
        try:
            tensors, state = self._contents()
            version = self._store.next_version(self._run)
            self._info = CheckpointInfo(**{**vars(info), "parent": self._parent, "run": self._run})
            self._writer.save(version, tensors, state)
        except PacelineError as error:
            self._fail(0, info.step, error)

    def _advance(self, done: WriteResult | None) -> None:
        if done is None or self._info is None:
            return
        info = self._info
        if done.manifest is None and done.error is not None:
            self._fail(done.version, info.step, done.error)
        elif done.manifest is None:
            self._stall, self._seconds = done.stall, done.seconds
            self._writer.commit(done.version, done.records, info, self._retention)
        else:
            self._newest_step, self._parent = info.step, done.version
            self._info = None
            self._emit(
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
        self._info = None
        reason = error.message.splitlines()[0]
        self._emit(events.CheckpointFailed(time=time.time(), version=version, step=step, reason=reason))
