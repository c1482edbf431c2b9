"""When a run's checkpoints are written, and how its ranks agree that one is complete.

    begin     every rank copies its share and goes on; a thread writes it
    (steps)   with each step's exchange every rank says whether its part is written
    settle    when all have said so, the first rank commits the version, in its thread

At most one version is under way. When the next is due before, training waits for it: that is the
back-pressure. A version that cannot be written is reported and given up; training goes on, older versions
stay. Ranks of machines that do not see the place write nothing: the others write all, and the first of them
commits. Must not know what the state is made of.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, final

from torch import Tensor

from paceline.checkpoint import state_json
from paceline.checkpoint.digests import share_digests
from paceline.checkpoint.manifest import FileRecord, Info
from paceline.checkpoint.retention import Retention
from paceline.checkpoint.store import CheckpointStore
from paceline.checkpoint.writer import BackgroundWriter, Finished
from paceline.core import events
from paceline.core.errors import CommTimeoutError, ConfigError, PacelineError, UsageError
from paceline.data.plan import Position
from paceline.train.callbacks import SavedCheckpoint
from paceline.train.config import CheckpointConfig
from paceline.train.team import Team

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
        team: Team,
        *,
        run: str,
        patience: float | None,
        tell: Tell,
        on_saved: Callable[[SavedCheckpoint], None],
        writes: bool = True,
    ) -> None:
        self._config = config
        self._team = team
        self._writes = writes  # this process sees the place
        self.writers = tuple(range(team.world_size)) if writes else ()
        self._run = run  # the mark of the run in its versions
        self._patience = patience or _PATIENCE_SECONDS
        self._gave_up = False
        self._writer = BackgroundWriter(store, team.rank, team.world_size)
        self._left_behind: list[BackgroundWriter] = []  # still writing for a group that is over
        self.again = False  # the group changed in the middle of a save: another one is due
        self.newest: int | None = None  # the version that a run goes on from, and its step
        self.newest_step = 0
        self._tell = tell
        self._on_saved = on_saved
        self._version: int | None = None  # under way
        self._info = Info(step=0)
        self._mine: Finished | None = None  # this rank's part, written
        self._shares: list[str] = []  # what each writer's part must hash to
        self._committing: tuple[int, float, float] | None = None  # version, begun, stall; on the first rank
        self._begun = 0.0
        self._stall = 0.0
        self.saved_step = -1
        self.waits_for_storage = False
        self._failure: tuple[int, str] | None = None  # of the last save: its step, and why; on the first rank
        self._retention = Retention(
            keep_last=config.keep_last,
            keep_best=config.keep_best,
            keep_every=config.keep_every,
            metric=config.metric,
            mode=config.mode,
        )

    def begin_from(self, parent: int | None, step: int, run: str) -> None:
        """The run goes on from this version, or begins."""
        self.newest, self.newest_step, self._run = parent, step, run
        self.saved_step = -1 if parent is None else step
        # A save that was interrupted belongs to the time that all went back from. A member that has just come
        # knows nothing of it, and every member has to begin the same saves.
        self.again = False

    def due_after_step(self, step: int) -> bool:
        every = self._config.every_steps
        return self.again or (every is not None and step % every == 0)

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
        """Gets the memory for copies in advance, so that the first save stalls no longer than the others.
        What no version could ever hold is refused now, and not when the run is to be saved."""
        if self._commits:
            state_json.encode(contents.state)
        if self._version is not None or self._committing is not None or not self._writes:
            return  # a run that goes on from the end of an epoch begins with a save
        try:
            self._writer.prepare(contents.tensors, own=contents.own)
        except UsageError:
            raise  # something that no file can hold
        except PacelineError as error:
            # Its text alone: the error itself would keep what it has seen for as long as the line is kept.
            _log.warning("the memory for checkpoints could not be set aside: %s", str(error))

    def digests(self, contents: Contents) -> list[str]:
        """Of what each writer is to write, from this rank's own memory: equal on ranks that hold the same."""
        return share_digests(contents.tensors, max(1, len(self.writers)))

    def begin(
        self,
        position: Position,
        contents: Contents,
        metrics: dict[str, float],
        shares: list[str] | None = None,
    ) -> None:
        """Starts a version of the state as it is now; waits for the one before, if it is not complete.
        `shares`: the digests that all ranks agreed on; None: this rank's own."""
        started = time.perf_counter()
        self._check_metric(metrics)
        self.finish()
        self.again = False
        reserved: list[Any] = [None, f"no worker is left that sees {self._writer.store.url}"]
        if self._commits:
            reserved = self._reserve()
        version, trouble = self._team.context.broadcast(reserved, self._first)
        if version is None:
            self._failed(-1, position.step, trouble)
            return
        self._version, self._mine = version, None
        self._shares = self.digests(contents) if shares is None else shares
        self._info = Info(
            step=position.step,
            epoch=position.epoch,
            samples=position.samples,
            workers=self._team.world_size,
            parent=self.newest,
            metrics=metrics,
            run=self._run,
        )
        state = contents.state if self._commits else None
        own = self._with_others(contents.own)
        try:
            if self._writes:
                self._writer.save(version, contents.tensors, state, own=own)
            else:
                self._mine = Finished(version)
        except UsageError:
            # Something that no file can hold, in a later step than the first: no save would ever work.
            self._version = None
            if self._commits:
                self._writer.discard(version)
            raise
        except PacelineError as error:
            # No memory for the copy: this rank's part has failed.
            self._mine = Finished(version, error=error)
        self.saved_step = position.step
        self._begun, self._stall = started, time.perf_counter() - started

    def poll(self) -> None:
        """On the rank that commits: whether that is done. Never waits, and asks nobody."""
        self._poll_commit()

    def complete(self, saved: int, failed: int) -> bool:
        """Whether all ranks have written, or failed to, so that `settle` is due."""
        return self._version is not None and saved + failed >= self._team.world_size

    def settle(self, saved: int, failed: int) -> None:
        """After a step in which so many ranks said that they have written, or failed to."""
        self._poll_commit()
        if not self.complete(saved, failed):
            return
        version, mine = self._version, self._mine
        assert version is not None
        assert mine is not None
        told = self._team.context.gather(
            [
                [record.to_plain() for record in mine.records],
                None if mine.error is None else str(mine.error),
                mine.digest,
            ],
            self._first,
        )
        self._version, self._mine = None, None
        if told is None:
            return
        errors = [f"rank {rank}: {error}" for rank, (_, error, _) in enumerate(told) if error is not None]
        # Memory may have changed between the comparison of all ranks and the copy that was written.
        errors += [
            f"rank {rank}: what it wrote is not what all ranks hold"
            for rank, share in zip(self.writers, self._shares, strict=True)
            if told[rank][1] is None and told[rank][2] != share
        ]
        if errors:
            self._failed(version, self._info.step, "; ".join(errors))
            self._writer.discard(version)
            self._committing = None
            return
        records = [FileRecord.from_plain(plain) for plains, _, _ in told for plain in plains]
        self._writer.commit(version, records, self._info, self._retention)
        self._committing = (version, self._begun, self._stall)

    def finish(self) -> None:
        """Waits until nothing is under way on any rank."""
        self.waits_for_storage = True
        try:
            self._finish()
        finally:
            self.waits_for_storage = False

    def _finish(self) -> None:
        if self._version is not None:
            if self._mine is None:
                self._mine = self._waited()
            # Every rank comes here at the same step, so this is the last of them to have written.
            told = self._team.context.all_gather(list(self.wrote))
            self.settle(sum(done for done, _ in told), sum(bad for _, bad in told))
        self._poll_commit(wait=True)

    def rebind(self, look: Callable[[], tuple[int, int] | None]) -> None:
        """The team has another group: what was under way is given up and saved again at the next step.

        `look` tells what the store knows, version and step, to the rank that commits from now on. A commit
        that is under way needs nobody else and goes on.
        """
        if self._version is not None:
            self.again = True
            self.saved_step = -1
            if self._commits:
                _log.info("version %d is given up, because the group changed", self._version)
        self._version, self._mine = None, None
        told = self._team.context.all_gather(self._writes)
        self.writers = tuple(rank for rank, writes in enumerate(told) if writes)
        newest = look() if self._commits else None
        if newest is not None and (self.newest is None or newest[0] > self.newest):
            self.newest, self.newest_step = newest
        if self._writer.busy and self._committing is None:
            # A part that nobody will ask for: it ends by itself, beside the new writer.
            self._left_behind.append(self._writer)
            self._writer = BackgroundWriter(self._writer.store)
        if self._writes:
            self._writer.rank, self._writer.world = self.writers.index(self._team.rank), len(self.writers)
        for writer in [writer for writer in self._left_behind if writer.poll() is not None]:
            self._left_behind.remove(writer)
            writer.close()

    def state_dict(self) -> dict[str, Any]:
        """What a member that joins has to know to begin saves together with the others."""
        return {"again": self.again, "saved_step": self.saved_step, "run": self._run}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.again, self.saved_step, self._run = state["again"], state["saved_step"], state["run"]

    def forget_step(self) -> None:
        """The next save is wanted even if this step has one: the epoch has turned since."""
        self.saved_step = -1

    def unsaved(self, step: int) -> str | None:
        """Why the state after `step` is in no version although it was to be saved; on the first rank."""
        if self._failure is None or self._failure[0] != step or self.has(step):
            return None
        return self._failure[1]

    def close(self) -> None:
        """Waits for what is under way, unless that was waited for in vain already."""
        for writer in self._left_behind:
            writer.close(0.0)
        self._writer.close(0.0 if self._gave_up else self._patience)

    @property
    def _first(self) -> int:
        """The rank that commits, and speaks for all."""
        return self.writers[0] if self.writers else 0

    @property
    def _commits(self) -> bool:
        return self._writes and self._team.rank == self._first

    def _with_others(self, own: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """What only this rank has; on the first also what only ranks have that do not write."""
        if len(self.writers) == self._team.world_size:
            return own
        told = self._team.context.gather({} if self._writes else dict(own), self._first)
        if told is None:
            return own
        return {**own, **{name: tensor for theirs in told for name, tensor in theirs.items()}}

    def has(self, step: int) -> bool:
        """Whether the newest version that this rank knows is of this step."""
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
        if self._version is not None or not self._writer.busy:
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
                epoch=info.epoch,
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
        if self._team.rank != self._first:
            return
        _log.error(
            "checkpoint of step %d could not be written, training goes on; %s: %s",
            step,
            "there is no version yet"
            if self.newest is None
            else f"the newest version is {self.newest} of step {self.newest_step}",
            reason,
        )
        self._tell(events.CheckpointFailed(time=time.time(), version=version, step=step, reason=reason))
