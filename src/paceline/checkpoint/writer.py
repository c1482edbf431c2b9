"""Save while training runs: the caller waits for one copy into memory, a thread does the rest.

    save(...)    copies this rank's share into a buffer that is kept, then writes it    caller waits: the copy
    commit(...)  on one rank, when all have written: manifest, latest, retention        caller waits: nothing
    poll()       what the thread has finished, or None

At most one of these is under way in a writer: a second one while `busy` is refused, so the caller decides
whether to wait (back-pressure) or to skip a save. Memory: one copy of this rank's share, kept from the first
save to `close`. The thread has low priority and spends its time in calls that leave Python's lock and the
processor to others.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Self, final

from torch import Tensor

from paceline.checkpoint import state_json
from paceline.checkpoint.digests import image_digest, share_of
from paceline.checkpoint.manifest import MODEL, CheckpointInfo, CheckpointManifest, FileRecord
from paceline.checkpoint.retention import Retention
from paceline.checkpoint.staging_buffer import ImageBuffer
from paceline.checkpoint.store import CheckpointStore
from paceline.checkpoint.tensor_file import TensorFileLayout
from paceline.core.errors import CommTimeoutError, InternalError, PacelineError, UsageError

# Of two busy threads on one core, one of this niceness gets a tenth.
_NICENESS: Final = 10


@dataclass(frozen=True)
class WriteResult:
    """Result of the thread: a save has `records`, a commit has a `manifest`; `error` when it failed.

    A commit with both a manifest and an error is committed; only deleting older checkpoints failed.

    `stall` is how long the caller waited in `save`, `seconds` how long the thread worked; `digest` is of the
    tensors of all ranks that were written, as digests.py computes it.
    """

    version: int
    records: tuple[FileRecord, ...] = ()
    manifest: CheckpointManifest | None = None
    removed: tuple[int, ...] = ()
    stall: float = 0.0
    seconds: float = 0.0
    error: PacelineError | None = None
    digest: str = ""

    @property
    def nbytes(self) -> int:
        return sum(record.nbytes for record in self.records)


@final
class BackgroundWriter:
    """One rank's writer into a store. Use it from one thread; close it, or use it with `with`.

    It writes part `part` of `parts`, one for each writer. `label` is the rank by which messages name this
    writer: in a supervised job the slot, whichever members write.
    """

    def __init__(self, store: CheckpointStore, part: int = 0, parts: int = 1) -> None:
        if not 0 <= part < parts:
            raise UsageError(f"part {part} of {parts}", remedy="give 0 <= part < parts")
        self.store = store
        self.part = self.label = part
        self.parts = parts
        self._buffer = ImageBuffer()
        self._change = threading.Condition()
        self._job: Callable[[], WriteResult] | None = None
        self._done: WriteResult | None = None
        self._busy = False
        self._closed = False
        self._thread: threading.Thread | None = None

    @property
    def busy(self) -> bool:
        """Return whether something is under way, or finished and not polled yet."""
        return self._busy

    @property
    def buffer_bytes(self) -> int:
        """Return how much memory is held for the copy of the tensors."""
        return self._buffer.nbytes

    def prepare(self, tensors: Mapping[str, Tensor], *, own: Mapping[str, Tensor] | None = None) -> None:
        """Get the memory for the copy now, so that the first save stalls no longer than the others."""
        self._require_idle("prepare")
        self._copy(tensors, own or {})
        self._buffer.wait()

    def save(
        self,
        version: int,
        tensors: Mapping[str, Tensor],
        state: dict[str, Any] | None = None,
        *,
        own: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Write this rank's share of `tensors`, all of `own`, and the state if given, as files of `version`.

        Every rank passes the same `tensors`; `own` are those that no other rank has, under names that no
        other rank uses; one rank passes the state. All may be changed as soon as this returns.
        """
        self._require_idle("save")
        started = time.perf_counter()
        encoded = None if state is None else state_json.encode(state)
        layout = self._copy(tensors, own or {})
        private = tuple(sorted(own or {}))
        stall = time.perf_counter() - started

        def write() -> WriteResult:
            self._buffer.wait()
            image = self._buffer.image(layout)
            file = self.store.write_image(version, self.part, self.parts, image, len(layout.entries))
            records = [replace(file, own=private, finite=self._buffer.finite(layout, MODEL))]
            if encoded is not None:
                records.append(self.store.write_state_bytes(version, encoded))
            digest = image_digest(layout, image, private)
            return WriteResult(version, tuple(records), stall=stall, digest=digest)

        self._start(version, write)

    def commit(
        self,
        version: int,
        records: Iterable[FileRecord],
        info: CheckpointInfo,
        retention: Retention | None = None,
    ) -> None:
        """Commit `version`, whose files all ranks have written, then delete what `retention` lets go."""
        self._require_idle("commit")
        files = tuple(records)

        def write() -> WriteResult:
            manifest = self.store.commit(version, files, info)
            try:
                removed = [] if retention is None else self.store.prune(retention, run=info.run)
            except PacelineError as error:
                # The checkpoint is safe: that older ones could not be deleted is logged, and undoes nothing.
                return WriteResult(version, files, manifest, error=error)
            return WriteResult(version, files, manifest, tuple(removed))

        self._start(version, write)

    def discard(self, version: int) -> None:
        """Delete what was written of a version that will not be committed."""
        self._require_idle("discard")

        def remove() -> WriteResult:
            self.store.discard(version)
            return WriteResult(version)

        self._start(version, remove)

    def poll(self) -> WriteResult | None:
        """Return what has finished since the last time; never waits."""
        with self._change:
            return self._take()

    def wait(self, timeout: float | None = None) -> WriteResult | None:
        """Return what is under way, when it has finished; None when nothing is."""
        with self._change:
            if not self._busy:
                return None
            if not self._change.wait_for(lambda: self._done is not None, timeout):
                raise CommTimeoutError(
                    f"rank {self.label} has been writing a checkpoint to {self.store.url} for {timeout} s",
                    remedy="see whether the storage answers, or give it more time",
                )
            return self._take()

    def close(self, timeout: float | None = None) -> None:
        """Finish what is under way, end the thread and give the memory back.

        A thread that is still inside the storage after `timeout` seconds is left to itself, with its memory:
        it ends with the process.
        """
        with self._change:
            self._closed = True
            self._change.notify_all()
        if self._thread is not None:
            self._thread.join(timeout)
            if self._thread.is_alive():
                return
            self._thread = None
        self._busy = False
        self._buffer.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _copy(self, tensors: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> TensorFileLayout:
        both = tensors.keys() & own.keys()
        if both:
            raise UsageError(
                f"{min(both)!r} is among the tensors of all ranks and among rank {self.label}'s own",
                remedy="give what a rank has for itself a name that has its rank or shard in it",
            )
        shared = share_of(tensors, self.part, self.parts)
        return self._buffer.fill({**tensors, **own}, [*shared, *own])

    def _require_idle(self, what: str) -> None:
        if self._closed:
            raise UsageError(f"{what} on a writer that is closed", remedy="close it after the last save")
        if self._busy:
            raise UsageError(
                f"{what} while the last one is still under way or was not polled",
                remedy="look at `busy`, and call `poll` or `wait` before",
            )

    def _take(self) -> WriteResult | None:
        done, self._done = self._done, None
        if done is not None:
            self._busy = False
        return done

    def _start(self, version: int, job: Callable[[], WriteResult]) -> None:
        with self._change:
            self._busy = True
            self._job = lambda: _guarded(version, job)
            self._change.notify_all()
            if self._thread is None:
                name = f"paceline-checkpoint-{self.label}"
                self._thread = threading.Thread(target=self._work, name=name, daemon=True)
                self._thread.start()

    def _work(self) -> None:
        # Linux gives each thread its own niceness; where that is not allowed, the writer is less polite.
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        while True:
            with self._change:
                self._change.wait_for(lambda: self._job is not None or self._closed)
                job, self._job = self._job, None
            if job is None:
                return
            done = job()
            with self._change:
                self._done = done
                self._change.notify_all()


def _guarded(version: int, job: Callable[[], WriteResult]) -> WriteResult:
    started = time.perf_counter()
    try:
        done = job()
    except PacelineError as error:
        done = WriteResult(version, error=error)
    except Exception as error:
        failure = InternalError(f"checkpoint {version}: the writer failed: {type(error).__name__}: {error}")
        failure.__cause__ = error
        done = WriteResult(version, error=failure)
    return replace(done, seconds=time.perf_counter() - started)
