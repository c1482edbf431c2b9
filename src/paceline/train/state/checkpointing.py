"""Checkpoints of a run: when they are written, and how its ranks agree that one is complete, by a two-phase
commit that rides on the exchange of the steps.

    begin     every rank copies its part and continues training; a thread writes the copy
    written   with each step's exchange every rank reports whether its part is on storage, or failed
    commit    in the step in which all have reported, the first writer collects the checksums of all parts and
              has its thread write the manifest, which makes the version valid
    drain     wait until nothing is under way; before the next `begin`, and at the end of the run

At most one version is under way. When the next is due before it is committed, training waits: that is the
back-pressure. A version that cannot be written is reported and given up; training continues, older versions
stay. Ranks on machines that do not see the storage write nothing: the others write all, and the first of them
commits.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, final

from torch import Tensor

from paceline.checkpoint import state_json
from paceline.checkpoint.digests import share_digests
from paceline.checkpoint.manifest import CheckpointInfo, FileRecord
from paceline.checkpoint.retention import Retention
from paceline.checkpoint.store import CheckpointStore
from paceline.checkpoint.writer import BackgroundWriter, WriteResult
from paceline.core import events
from paceline.core.errors import CommTimeoutError, ConfigError, PacelineError, UsageError
from paceline.data.batch_plan import DataPosition
from paceline.train.callbacks import SavedCheckpoint
from paceline.train.history import Evaluation
from paceline.train.settings.train_config import CheckpointConfig
from paceline.train.state.recorder import Tell
from paceline.train.team import Team

_log = logging.getLogger(__name__)

TRAIN_LOSS = "train_loss"  # the only metric of a version that was not evaluated
# Where the settings have no timeout.
_PATIENCE_SECONDS = 1800.0


@dataclass(frozen=True)
class RunContents:
    """Contents of a version: tensors that are equal on all ranks, those of this rank alone, plain data."""

    tensors: Mapping[str, Tensor]
    own: Mapping[str, Tensor]
    state: dict[str, Any]


@final
class Checkpointer:
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
        self._config, self._team, self._tell, self._on_saved = config, team, tell, on_saved
        self._writes = writes  # this process sees the place
        self.writers = tuple(range(team.world_size)) if writes else ()
        self._run = run  # the mark of the run in its versions
        self._patience = patience or _PATIENCE_SECONDS
        self._gave_up = False
        self._writer = BackgroundWriter(store, team.rank, team.world_size)
        self._left_behind: list[BackgroundWriter] = []  # still writing for a group that is over
        self.again = False  # the group changed in the middle of a save: another one is due
        self.newest: int | None = None  # the version that a run would resume from, and its step
        self.newest_step = 0
        self._version: int | None = None  # under way
        self._info = CheckpointInfo(step=0)
        self._mine: WriteResult | None = None  # this rank's part, written
        self._shares: list[str] = []  # what each writer's part must hash to
        self._committing: tuple[int, float, float] | None = None  # version, begun, stall; on the first rank
        self._begun = self._stall = 0.0
        self._since = time.perf_counter()  # of the last version, or of the beginning
        self.begun_step = -1  # the last that a save was begun of
        self.waits_for_storage = False
        self._failure: tuple[int, str] | None = None  # of the last save: its step, and why; on the first rank
        self._retention = Retention(**{one.name: getattr(config, one.name) for one in fields(Retention)})

    def begin_from(self, parent: int | None, step: int, run: str) -> None:
        """Start from this version, or from the beginning."""
        self.newest, self.newest_step, self._run = parent, step, run
        self.begun_step = -1 if parent is None else step
        # A save that was interrupted belongs to steps that no longer count. A member that has just joined
        # does not know of it, and all members have to begin the same saves.
        self.again = False

    def save_again(self) -> None:
        """Let a save of this step begin although one was: its version lacks something, or is given up."""
        self.begun_step = -1

    def due_after_step(self, step: int) -> bool:
        every = self._config.every_steps
        return self.again or (every is not None and step % every == 0)

    def due_after_epoch(self, epochs: int) -> bool:
        every = self._config.epochs_between
        return every is not None and epochs % every == 0

    def is_recent(self) -> bool:
        """Return whether the version before was begun so lately, by this rank's clock, that one after an
        epoch may be left out."""
        return time.perf_counter() - self._since < self._config.least_seconds

    def is_best(self, evaluations: Sequence[Evaluation]) -> bool:
        """Return whether the last of these is the best so far, so that its version is one to keep."""
        values = [one.metrics.get(self._config.metric, math.nan) for one in evaluations]
        if not self._config.keep_best or not values or math.isnan(values[-1]):
            return False
        sign = 1.0 if self._config.mode == "min" else -1.0
        return not any(sign * value <= sign * values[-1] for value in values[:-1])

    @property
    def written(self) -> tuple[bool, bool]:
        """Whether this rank's part of the version under way is on storage, and whether that failed."""
        if self._version is not None and self._mine is None:
            self._mine = self._writer.poll()
        if self._version is None or self._mine is None:
            return False, False
        return self._mine.error is None, self._mine.error is not None

    def prepare(self, contents: RunContents) -> None:
        """Get the memory for copies in advance, so that the first save stalls no longer than the others, and
        refuse state that no version could ever hold."""
        if self._commits:
            state_json.encode(contents.state)
        if self._version is not None or self._committing is not None or not self._writes:
            return  # a run that resumes at the end of an epoch begins with a save
        try:
            self._writer.prepare(contents.tensors, own=contents.own)
        except UsageError:
            raise  # something that no file can hold
        except PacelineError as error:
            # Its text alone: the error itself would keep what it has seen for as long as the line is kept.
            _log.warning("the memory for checkpoints could not be set aside: %s", str(error))

    def digests(self, contents: RunContents) -> list[str]:
        """Return the digest of each writer's part, from this rank's own memory: equal where states are."""
        return share_digests(contents.tensors, max(1, len(self.writers)))

    def begin(
        self,
        position: DataPosition,
        contents: RunContents,
        metrics: dict[str, float],
        shares: list[str] | None = None,
    ) -> None:
        """Start a version of the state as it is now, on all ranks in the same step; drain the one before.

        `shares`: the digests of the parts that all ranks agreed on; None: this rank's own.
        """
        started = self._since = time.perf_counter()
        self.drain()
        self.again = False
        # One rank chooses the number: two ranks that read the store at different moments might not agree. All
        # wait for it, so that either all begin the version or none does.
        reserved: list[Any] = [None, f"no worker is left that sees {self._writer.store.url}"]
        if self._commits:
            try:
                reserved = [self._writer.store.next_version(self._run), ""]
            except Exception as error:  # training continues without this version
                reserved = [None, f"{type(error).__name__}: {error}"]
        version, trouble = self._team.context.broadcast(reserved, self._first)
        if version is None:
            self._failed(-1, position.step, trouble)
            return
        self._version, self._mine = version, None
        self._shares = self.digests(contents) if shares is None else shares
        self._info = CheckpointInfo(
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
                self._mine = WriteResult(version)
        except UsageError:
            # State that no file can hold, in a later step than the first: no save would ever work.
            self._version = None
            if self._commits:
                self._writer.discard(version)
            raise
        except PacelineError as error:
            # No memory for the copy: this rank's part has failed. The others have begun theirs, so it is
            # reported with the next step's exchange, like a part that could not be written.
            self._mine = WriteResult(version, error=error)
        self.begun_step = position.step
        self._begun, self._stall = started, time.perf_counter() - started

    def poll(self, *, wait: bool = False) -> None:
        """Note a commit that has ended. Needs no other rank, and waits only if `wait`."""
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
        event = events.CheckpointSaved(
            time=time.time(),
            version=version,
            step=info.step,
            bytes=done.manifest.nbytes,
            stall=stall,
            seconds=seconds,
            epoch=info.epoch,
        )
        self._tell(event)
        self._on_saved(SavedCheckpoint.of(event, url=self._writer.store.url))

    def all_written(self, written: int, failed: int) -> bool:
        """Return whether all ranks have reported on their part, so that `commit` is due."""
        return self._version is not None and written + failed >= self._team.world_size

    def commit(self, written: int, failed: int) -> None:
        """Commit the version whose parts are written; `written` and `failed` are the ranks that reported so.

        A collective call, the second phase. The numbers come from the step's exchange, so all ranks come here
        in the same step, and no rank waits for storage: every part is there.
        """
        self.poll()
        if not self.all_written(written, failed):
            return
        version, mine = self._version, self._mine
        assert version is not None
        assert mine is not None
        parts = self._team.context.gather(
            [
                [record.to_plain() for record in mine.records],
                None if mine.error is None else str(mine.error),
                mine.digest,
            ],
            self._first,
        )
        # Only after the gather: where a rank is lost in it, `rebind` sees by this that the version has to be
        # given up and saved again.
        self._version, self._mine = None, None
        if parts is None:
            return
        # One failed part ends the version, before a manifest exists: no reader can ever find half of it.
        labels = self._team.context.labels
        errors = [
            f"rank {label}: {error}"
            for label, (_, error, _) in zip(labels, parts, strict=True)
            if error is not None
        ]
        # Memory may have changed between the comparison of all ranks and the copy that was written.
        errors += [
            f"rank {labels[rank]}: what it wrote is not what all ranks hold"
            for rank, share in zip(self.writers, self._shares, strict=True)
            if parts[rank][1] is None and parts[rank][2] != share
        ]
        if errors:
            self._failed(version, self._info.step, "; ".join(errors))
            self._writer.discard(version)
            self._committing = None
            return
        records = [FileRecord.from_plain(plain) for plains, _, _ in parts for plain in plains]
        # Only the manifest makes a version valid, and one rank's thread writes it: from here on no other rank
        # is needed, and a crash before it leaves parts that no reader looks at.
        self._writer.commit(version, records, self._info, self._retention)
        self._committing = (version, self._begun, self._stall)

    def drain(self) -> None:
        """Wait until nothing is under way on any rank; a collective call."""
        self.waits_for_storage = True
        try:
            if self._version is not None:
                if self._mine is None:
                    self._mine = self._waited()
                # Every rank comes here in the same step and has waited for its own part: all have written.
                reports = self._team.context.all_gather(list(self.written))
                self.commit(sum(done for done, _ in reports), sum(bad for _, bad in reports))
            self.poll(wait=True)
        finally:
            self.waits_for_storage = False

    def rebind(self) -> None:
        """Adapt to the team's new group."""
        if self._version is not None:
            # The parts were cut for the old group, and a lost rank's part will never come: it is given up,
            # and saved again after the next step. `again` is part of a state transfer, so that members that
            # have just joined begin the same save.
            self.again = True
            self.save_again()
            if self._commits:
                _log.info("version %d is given up, because the group changed", self._version)
        self._version, self._mine = None, None
        sees = self._team.context.all_gather(self._writes)
        self.writers = tuple(rank for rank, writes in enumerate(sees) if writes)
        # A commit under way in the old group needed one rank's thread and the store alone: it may have ended
        # since, unseen by this rank. What the store has counts, not what the rank that commits now knew.
        newest = self._newest_stored() if self._commits else None
        if newest is not None and (self.newest is None or newest[0] > self.newest):
            self.newest, self.newest_step = newest
        if self._writer.busy and self._committing is None:
            # Its part is of a version that was given up: it ends by itself, beside the new writer. A writer
            # that is committing stays: its version is complete, and this group waits for it like any other.
            self._left_behind.append(self._writer)
            self._writer = BackgroundWriter(self._writer.store)
        if self._writes:
            self._writer.part, self._writer.parts = self.writers.index(self._team.rank), len(self.writers)
            self._writer.label = self._team.context.labels[self._team.rank]
        for writer in [writer for writer in self._left_behind if writer.poll() is not None]:
            self._left_behind.remove(writer)
            writer.close()

    def _newest_stored(self) -> tuple[int, int] | None:
        """Return the newest version in the store and its step; another rank may have saved it."""
        try:
            manifests = self._writer.store.manifests()
        except PacelineError as error:
            _log.warning("the newest version is not known: %s", error.message)
            return None
        return (manifests[-1].version, manifests[-1].info.step) if manifests else None

    def state_dict(self) -> dict[str, Any]:
        """Return what a member that joins has to know to begin the same saves as the others."""
        return {"again": self.again, "begun_step": self.begun_step, "run": self._run}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.again, self.begun_step, self._run = state["again"], state["begun_step"], state["run"]

    def unsaved(self, step: int) -> str | None:
        """Return why the state after `step` is in no version although a save was begun; the first writer
        knows."""
        if self._failure is None or self._failure[0] != step or self.has(step):
            return None
        return self._failure[1]

    def discard_after(self, step: int) -> None:
        """Remove the versions of later steps, which may hold what a faulty worker has spoiled: no run may
        resume from them. Done by the first writer."""
        for manifest in self._writer.store.manifests() if self._commits else ():
            if manifest.info.step > step:
                _log.warning("version %d of step %d is removed", manifest.version, manifest.info.step)
                self._writer.store.discard(manifest.version)

    def close(self) -> None:
        """Wait for what is under way, unless a wait has failed already."""
        for writer in self._left_behind:
            writer.close(0.0)
        self._writer.close(0.0 if self._gave_up else self._patience)

    @property
    def _first(self) -> int:
        """The view index of the rank that commits."""
        return self.writers[0] if self.writers else 0

    @property
    def _commits(self) -> bool:
        return self._writes and self._team.rank == self._first

    def _with_others(self, own: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the tensors of this rank alone; on the first writer also those of ranks that write none."""
        if len(self.writers) == self._team.world_size:
            return own
        gathered = self._team.context.gather({} if self._writes else dict(own), self._first)
        if gathered is None:
            return own
        return {**own, **{name: tensor for theirs in gathered for name, tensor in theirs.items()}}

    def has(self, step: int) -> bool:
        """Return whether the newest version that this rank knows is of this step."""
        return self.newest is not None and self.newest_step == step

    def check_metric(self, metrics: Mapping[str, float]) -> None:
        """Refuse a metric that an evaluation does not have: `keep_best` would silently keep nothing."""
        config = self._config
        if not config.keep_best or config.metric in (TRAIN_LOSS, *metrics):
            return
        raise ConfigError(
            f"checkpoint.metric={config.metric!r} chooses the best versions to keep, and evaluations "
            f"give {', '.join(sorted(metrics))}",
            remedy="set checkpoint.metric to one of them, or keep_best=0",
            key="checkpoint.metric",
        )

    def _waited(self) -> WriteResult | None:
        try:
            return self._writer.wait(self._patience)
        except CommTimeoutError:
            self._gave_up = True
            raise

    def _failed(self, version: int, step: int, reason: str) -> None:
        self._failure = (step, reason)
        if self._team.rank != self._first:
            return
        _log.error(
            "checkpoint of step %d could not be written, training continues; %s: %s",
            step,
            "there is no version yet"
            if self.newest is None
            else f"the newest version is {self.newest} of step {self.newest_step}",
            reason,
        )
        self._tell(events.CheckpointFailed(time=time.time(), version=version, step=step, reason=reason))
