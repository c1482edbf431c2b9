"""When a run's checkpoints are written, and how its ranks agree that one is complete.

    begin     every rank copies its share and goes on; a thread writes it
    (steps)   with each step's exchange every rank says whether its part is written
    settle    when all have said so, the first rank commits the version, in its thread

At most one version is under way. When the next is due before, training waits for it: that is the
back-pressure. A version that cannot be written is reported and given up; training goes on, older versions
stay. Must not know what the state is made of.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, final

from torch import Tensor

from paceline.checkpoint.manifest import FileRecord, Info
from paceline.checkpoint.retention import Retention
from paceline.checkpoint.store import CheckpointStore
from paceline.checkpoint.writer import BackgroundWriter, Finished
from paceline.comm.context import DistributedContext
from paceline.core import events
from paceline.core.errors import CommTimeoutError, ConfigError, PacelineError
from paceline.data.plan import Position
from paceline.train.callbacks import SavedCheckpoint
from paceline.train.config import CheckpointConfig

_log = logging.getLogger(__name__)

Tell = Callable[[events.Event], None]

TRAIN_LOSS = "train_loss"  # the only metric of a version that was not evaluated
# Where the settings do not say how long ranks wait for each other.
_PATIENCE_SECONDS = 1800.0


@dataclass(frozen=True)
class Contents:
    """What goes into a version: tensors that every rank holds alike, those of this rank alone, plain data."""

    tensors: Mapping[str, Tensor]
    own: Mapping[str, Tensor]
    state: dict[str, Any]


@final
class Saver:
    """One rank's part in the checkpoints of a run."""

    def __init__(
        self,
        config: CheckpointConfig,
        store: CheckpointStore,
        context: DistributedContext,
        *,
        parent: int | None,
        step: int,
        run: str,
        patience: float | None,
        tell: Tell,
        on_saved: Callable[[SavedCheckpoint], None],
    ) -> None:
        self._config = config
        self._context = context
        self._run = run  # the mark of the run in its versions
        self._patience = patience or _PATIENCE_SECONDS
        self._gave_up = False
        self._writer = BackgroundWriter(store, context.rank, context.world_size)
        self.newest = parent  # the version that a run goes on from, and its step
        self.newest_step = step
        self._tell = tell
        self._on_saved = on_saved
        self._version: int | None = None  # under way
        self._info = Info(step=0)
        self._mine: Finished | None = None  # this rank's part, written
        self._committing: tuple[int, float, float] | None = None  # version, begun, stall; on the first rank
        self._begun = 0.0
        self._stall = 0.0
        self.saved_step = -1 if parent is None else step
        self._failure: tuple[int, str] | None = None  # of the last save: its step, and why; on the first rank
        self._retention = Retention(
            keep_last=config.keep_last,
            keep_best=config.keep_best,
            keep_every=config.keep_every,
            metric=config.metric,
            mode=config.mode,
        )

    def due_after_step(self, step: int) -> bool:
        every = self._config.every_steps
        return every is not None and step % every == 0

    def due_after_epoch(self, epochs: int) -> bool:
        every = self._config.every_epochs
        return every is not None and epochs % every == 0

    @property
    def wrote(self) -> tuple[bool, bool]:
        """Whether this rank's part of the version under way is written, and whether it failed."""
        if self._version is not None and self._mine is None:
            self._mine = self._writer.poll()
        if self._version is None or self._mine is None:
            return False, False
        return self._mine.error is None, self._mine.error is not None

    def prepare(self, contents: Contents) -> None:
        """Gets the memory for copies in advance, so that the first save stalls no longer than the others."""
        if self._version is not None or self._committing is not None:
            return  # a run that goes on from the end of an epoch begins with a save
        try:
            self._writer.prepare(contents.tensors, own=contents.own)
        except PacelineError as error:
            # Its text alone: the error itself would keep what it has seen for as long as the line is kept.
            _log.warning("the memory for checkpoints could not be set aside: %s", str(error))

    def begin(self, position: Position, contents: Contents, metrics: dict[str, float]) -> None:
        """Starts a version of the state as it is now; waits for the one before, if it is not complete."""
        started = time.perf_counter()
        self._check_metric(metrics)
        self.finish()
        reserved: list[Any] = [None, ""]
        if self._context.is_master:
            reserved = self._reserve()
        version, trouble = self._context.broadcast(reserved)
        if version is None:
            self._failed(-1, position.step, trouble)
            return
        self._version, self._mine = version, None
        self._info = Info(
            step=position.step,
            epoch=position.epoch,
            samples=position.samples,
            workers=self._context.world_size,
            parent=self.newest,
            metrics=metrics,
            run=self._run,
        )
        state = contents.state if self._context.is_master else None
        try:
            self._writer.save(version, contents.tensors, state, own=contents.own)
        except PacelineError as error:
            # No memory for the copy, or something that no file can hold: this rank's part has failed.
            self._mine = Finished(version, error=error)
        self.saved_step = position.step
        self._begun, self._stall = started, time.perf_counter() - started

    def settle(self, saved: int, failed: int) -> None:
        """After a step in which so many ranks said that they have written, or failed to."""
        self._poll_commit()
        if self._version is None or saved + failed < self._context.world_size:
            return
        version, mine = self._version, self._mine
        assert mine is not None
        self._version, self._mine = None, None
        told = self._context.gather(
            [[record.to_plain() for record in mine.records], None if mine.error is None else str(mine.error)]
        )
        if told is None:
            return
        errors = [f"rank {rank}: {error}" for rank, (_, error) in enumerate(told) if error is not None]
        if errors:
            self._failed(version, self._info.step, "; ".join(errors))
            self._writer.discard(version)
            self._committing = None
            return
        records = [FileRecord.from_plain(plain) for plains, _ in told for plain in plains]
        self._writer.commit(version, records, self._info, self._retention)
        self._committing = (version, self._begun, self._stall)

    def finish(self) -> None:
        """Waits until nothing is under way on any rank."""
        if self._version is not None:
            if self._mine is None:
                self._mine = self._waited()
            # Every rank comes here at the same step, so this is the last of them to have written.
            told = self._context.all_gather(list(self.wrote))
            self.settle(sum(done for done, _ in told), sum(bad for _, bad in told))
        self._poll_commit(wait=True)

    def forget_step(self) -> None:
        """The next save is wanted even if this step has one: the epoch has turned since."""
        self.saved_step = -1

    def unsaved(self, step: int) -> str | None:
        """Why the state after `step` is in no version although it was to be saved; on the first rank."""
        if self._failure is None or self._failure[0] != step or self._has(step):
            return None
        return self._failure[1]

    def close(self) -> None:
        """Waits for what is under way, unless that was waited for in vain already."""
        self._writer.close(0.0 if self._gave_up else self._patience)

    def _has(self, step: int) -> bool:
        return self.newest is not None and self.newest_step == step

    def _check_metric(self, metrics: Mapping[str, float]) -> None:
        """A metric that no evaluation gives would let the best versions be deleted, without a word."""
        config = self._config
        if not config.keep_best or not metrics or set(metrics) == {TRAIN_LOSS} or config.metric in metrics:
            return
        raise ConfigError(
            f"checkpoint.metric={config.metric!r} is to choose the best versions to keep, and evaluations "
            f"give {', '.join(sorted(metrics))}",
            remedy="set checkpoint.metric to one of them, or keep_best=0",
            key="checkpoint.metric",
        )

    def _waited(self) -> Finished | None:
        try:
            return self._writer.wait(self._patience)
        except CommTimeoutError:
            self._gave_up = True
            raise

    def _reserve(self) -> list[Any]:
        try:
            return [self._writer.store.next_version(self._run), ""]
        except Exception as error:  # training goes on without this version
            return [None, f"{type(error).__name__}: {error}"]

    def _poll_commit(self, *, wait: bool = False) -> None:
        if not self._context.is_master or self._version is not None:
            return
        done = self._waited() if wait else self._writer.poll()
        if done is None or self._committing is None:
            return
        (version, begun, stall), self._committing = self._committing, None
        if done.manifest is None:
            self._failed(version, self._info.step, str(done.error))
            return
        if done.error is not None:
            _log.warning("version %d is saved, and older ones could not be deleted: %s", version, done.error)
        self.newest, self.newest_step = version, self._info.step
        info, seconds = done.manifest.info, time.perf_counter() - begun
        self._tell(
            events.CheckpointSaved(
                time=time.time(),
                version=version,
                step=info.step,
                bytes=done.manifest.nbytes,
                stall=stall,
                seconds=seconds,
            )
        )
        self._on_saved(
            SavedCheckpoint(
                version=version,
                step=info.step,
                epoch=info.epoch,
                bytes=done.manifest.nbytes,
                seconds=seconds,
                url=self._writer.store.url,
            )
        )

    def _failed(self, version: int, step: int, reason: str) -> None:
        self._failure = (step, reason)
        if not self._context.is_master:
            return
        _log.error(
            "checkpoint of step %d could not be written, training goes on with the older ones: %s",
            step,
            reason,
        )
        self._tell(events.CheckpointFailed(time=time.time(), version=version, step=step, reason=reason))
