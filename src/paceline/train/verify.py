"""Computes steps of a run again, in this process, and compares what comes out with what the run recorded.

    loss         of every step, bit for bit
    sample       of the weights that the step began with: agreement.py
    hash         of the whole state, where the run was audited
    checkpoint   every kept version that the walk comes to: all of its tensors
    end          the hash that the run ended with

All steps from the beginning, or some from the beginning and from each kept version. What is computed from a
version takes that version for right; only a walk from the beginning to the end proves the result. Nothing is
written to the run's folder. Must not know how the user's parts were found.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import final

from paceline.checkpoint.digests import digest_of
from paceline.checkpoint.store import CheckpointStore
from paceline.core import journal
from paceline.train import agreement, audit_record
from paceline.train.assembly import Assembled
from paceline.train.audit_record import Record
from paceline.train.precision import autocast
from paceline.train.replay import alone, check_recomputable
from paceline.train.run import Run
from paceline.train.run_folder import RunFolder
from paceline.train.state import state_hash
from paceline.train.worker import Built, TrainJob


@final
@dataclass(frozen=True)
class Interval:
    """Steps that were computed again in a row, from a version (None: the beginning) of the step before."""

    version: int | None
    first: int
    last: int


@final
@dataclass(frozen=True)
class Difference:
    """The first thing that came out otherwise: after, or in, `step`, within `interval`."""

    step: int
    what: str
    recorded: str
    computed: str
    interval: Interval


@final
@dataclass(frozen=True)
class Verified:
    """What was computed again. `compared`: how often each kind of evidence was the same; `complete`: every
    step of the run from its beginning was."""

    steps: int
    complete: bool
    intervals: tuple[Interval, ...]
    compared: Mapping[str, int] = field(default_factory=dict)
    different: Difference | None = None

    @property
    def same(self) -> bool:
        return self.different is None


def verify_run(job: TrainJob, run: str | os.PathLike[str], steps: int | None = None) -> Verified:
    """`job` is the run's own, its config resolved; `run` its folder. `steps`: this number, spread over the
    beginning and the kept versions; None: all, from the beginning."""
    folder = RunFolder.open(run)
    record = audit_record.read(journal.iterate(folder.journal_file))
    check_recomputable(record, job.config, job.train)
    store = CheckpointStore(folder.checkpoint_url(job.config)) if job.config.checkpoint.enabled else None
    versions = {} if store is None else {one.info.step: one.version for one in store.manifests()}
    plan = _planned(record.last, versions, steps)
    with alone(job, record, record.last) as (built, assembled, walked):
        walk = _Walk(record, built, assembled, walked, store, versions)
        for interval in plan:
            walk.go(interval)
            if walk.different is not None:
                break
    done = [one for one in plan if one in walk.walked]
    return Verified(
        steps=walk.steps,
        complete=steps is None and walk.different is None,
        intervals=tuple(done),
        compared=dict(walk.compared),
        different=walk.different,
    )


def _planned(last: int, versions: Mapping[int, int], steps: int | None) -> list[Interval]:
    """Which steps are computed from where."""
    if steps is None or steps >= last:
        return [Interval(None, 1, last)]
    starts: list[tuple[int, int | None]] = [(0, None)]
    starts += [(step, version) for step, version in sorted(versions.items()) if 0 < step < last]
    if steps < len(starts):
        # Spread over the run: the first, the last, and what lies evenly between.
        gaps = max(1, steps - 1)
        starts = [starts[number * (len(starts) - 1) // gaps] for number in range(steps)]
    share, more = divmod(steps, len(starts))
    return [
        Interval(version, step + 1, min(last, step + share + (number < more)))
        for number, (step, version) in enumerate(starts)
    ]


@final
class _Walk:
    """One process that walks through intervals, and looks at what it has after each step."""

    def __init__(
        self,
        record: Record,
        built: Built,
        assembled: Assembled,
        run: Run,
        store: CheckpointStore | None,
        versions: Mapping[int, int],
    ) -> None:
        self._record, self._built, self._assembled, self._run = record, built, assembled, run
        self._store, self._versions = store, versions
        self._sample = agreement.WeightSample(built.module.parameters())
        self._interval = Interval(None, 1, 0)
        self.compared: Counter[str] = Counter()
        self.walked: list[Interval] = []
        self.steps = 0
        self.different: Difference | None = None

    def go(self, interval: Interval) -> None:
        """From the interval's state to its end, or to the first difference."""
        self._interval = interval
        self.walked.append(interval)
        run, assembled = self._run, self._assembled
        if interval.version is not None:
            assembled.store = self._store
            assembled.take_up(run, interval.version)
        run.ended = None
        after = before = interval.first - 1  # steps whose results, and whose weights, were looked at
        steps = run.microbatches()
        for micro in steps:
            if micro.step > after:
                after = micro.step
                self._look_after(after)
            if after < interval.last and before <= micro.step:
                before = micro.step + 1
                self._look_before(before)
            if after >= interval.last or self.different is not None:
                break
            with autocast(assembled.config.precision, self._built.device):
                data = assembled.callbacks.change_batch(micro.data)
                scored = self._built.objective.score(self._built.call, data)
            run.backward(scored.loss, scored.metrics)
        steps.close()
        if self.different is None and run.position.step > after:
            self._look_after(run.position.step)  # the run's last step: none follows it

    def _look_before(self, step: int) -> None:
        """The weights that this step is computed with."""
        commit = self._record.steps.get(step)
        if commit is not None and commit.event.sample is not None:
            self._same(step, "sample", commit.event.sample, agreement.text(self._sample.of(step - 1)))

    def _look_after(self, step: int) -> None:
        """What this step has left behind."""
        self.steps += 1
        commit = self._record.steps.get(step)
        newest = self._assembled.recorder.flush()
        if commit is not None and newest is not None and newest.step == step:
            self._same(step, "loss", commit.event.loss.hex(), newest.loss.hex())
        if commit is not None and commit.event.hash is not None:
            self._same(step, "hash", commit.event.hash, state_hash(self._built.module))
        version = self._versions.get(step)
        if version is not None and self._store is not None:
            saved = self._store.open(version)
            mine = self._assembled.contents(self._run).tensors
            self._same(step, "checkpoint", digest_of(dict(saved.tensors())), digest_of(mine))
        ended = self._record.ended
        if ended is not None and ended.step == step:
            self._same(step, "end", ended.hash, state_hash(self._built.module))

    def _same(self, step: int, what: str, recorded: str, computed: str) -> None:
        if recorded == computed:
            self.compared[what] += 1
        elif self.different is None:
            self.different = Difference(step, what, recorded, computed, self._interval)
