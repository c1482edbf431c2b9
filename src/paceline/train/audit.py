"""Proves from a journal that each step was committed once and each sample applied once, or says what is not.

    steps       1 to n, none missing, none twice; after a resume the last time counts
    positions   each epoch's are taken from 0 on, without a gap or an overlap; the order of an epoch is a
                bijection (data/permutation.py), so each sample is applied once in it
    skipped     samples that a step took and did not apply are exactly those that were reported
    shards      in each step each shard was computed once: audit_receipts.py
    bits        steps and shards that were done again have the bits that they had

It does not prove that the numbers are right: what all ranks computed alike, or a single one alone, is
believed. `paceline verify` computes it again.

Pure: reads events, not files, and imports no torch. Must not know how training works.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, final

import numpy as np

from paceline.core import events
from paceline.core.events import Event
from paceline.data.permutation import InOrder, Permutation
from paceline.train import audit_receipts, audit_record
from paceline.train.audit_receipts import Receipts, gaps, spans
from paceline.train.audit_record import Record

# Beyond so many positions the order of the epochs is not looked at one by one: it is a bijection anyway.
ENUMERATED = 20_000_000
_SHOWN_EPOCHS = 20
_NO_FAILURES = ("preempted", "unattended", "restart")  # the worker left, and was not lost


@final
@dataclass(frozen=True)
class Epoch:
    """How much of an epoch was applied: positions 0 to `covered` - 1 of its order, `size` where known."""

    epoch: int
    steps: int
    covered: int | None  # None: the journal is from before positions were kept
    applied: int
    skipped: tuple[int, ...]  # samples, by their number in the data


@final
@dataclass(frozen=True, kw_only=True)
class Audit:
    """What the journal shows. `wrong` is empty where the proof holds; `notes` is what it cannot show."""

    wrong: tuple[str, ...]
    notes: tuple[str, ...]
    steps: int
    redone: int
    restarts: int
    epochs: tuple[Epoch, ...]
    size: int | None
    samples: int
    skipped: int
    order: str
    enumerated: bool
    receipts: Receipts
    views: int
    repairs: int
    repair_seconds: tuple[float, ...]
    lost_workers: int
    supervisors: int
    hashes: dict[int, str] = field(default_factory=dict)
    shard_hashes: int = 0
    samples_agreed: int = 0  # steps in which all ranks held the same sampled weights
    final_hash: str | None = None
    ended: str | None = None

    @property
    def proved(self) -> bool:
        return not self.wrong


def audit(journal: Iterable[Event], *, backup: bool = False) -> Audit:
    """Looks at all of a journal. `backup`: shards may have been computed by another member than the one they
    were dealt to."""
    record = audit_record.read(journal)
    wrong: list[str] = []
    notes: list[str] = []
    _check_steps(record, wrong, notes)
    epochs = _check_positions(record, wrong, notes)
    enumerated = _check_order(record, epochs, wrong)
    receipts = audit_receipts.check(record, backup=backup, wrong=wrong, notes=notes)
    _check_bits(record, wrong, notes)
    return Audit(
        wrong=tuple(wrong),
        notes=tuple(notes),
        steps=len(record.steps),
        redone=len(record.lost),
        restarts=max(0, len(record.restarts) - 1),
        epochs=tuple(epochs),
        size=None if record.started is None else record.started.samples,
        samples=sum(commit.event.samples for commit in record.steps.values()),
        skipped=sum(len(epoch.skipped) for epoch in epochs),
        order=_order_text(record),
        enumerated=enumerated,
        receipts=receipts,
        views=len(record.views),
        repairs=len(record.repairs),
        repair_seconds=tuple(repair.seconds for _, repair in record.repairs),
        lost_workers=sum(event.cause not in _NO_FAILURES for _, event in record.failures),
        supervisors=record.supervisors,
        hashes={
            step: commit.event.hash
            for step, commit in sorted(record.steps.items())
            if commit.event.hash is not None
        },
        shard_hashes=len({(event.step, event.shard) for _, event in record.shard_hashes}),
        samples_agreed=sum(commit.event.sample is not None for commit in record.steps.values()),
        final_hash=None if record.ended is None else record.ended.hash,
        ended=None if record.ended is None else record.ended.reason,
    )


def _check_steps(record: Record, wrong: list[str], notes: list[str]) -> None:
    if record.started is None:
        wrong.append("the journal has no run_started: nothing says what its steps are steps of")
    for before, again in record.doubled:
        wrong.append(
            f"step {before.event.step} was committed twice, in generation {before.event.generation} and "
            f"{'again' if again.view == before.view else f'in generation {again.event.generation}'}, "
            "without a resume in between"
        )
    known = {step for receipt in record.receipts for step in (receipt.first, receipt.last)}
    for first, last in gaps(record.steps, record.last):
        more = "; workers have receipts of it" if any(first <= step <= last for step in known) else ""
        wrong.append(f"{_steps_text(first, last)} {'is' if first == last else 'are'} missing{more}")
    if record.ended is None:
        if record.failed is not None:
            notes.append(f"the run failed: {record.failed.reason}")
        elif record.steps:
            notes.append("the journal has no run_ended: the run was killed, or is still running")
    elif record.ended.step != record.last:
        wrong.append(
            f"the run ended after step {record.ended.step}, and the last step of the journal is {record.last}"
        )


def _check_positions(record: Record, wrong: list[str], notes: list[str]) -> list[Epoch]:
    size = None if record.started is None else record.started.samples
    unreadable: dict[int, dict[int, int]] = {}  # step -> sample -> epoch
    for index, event in record.skipped:
        # A skipped sample is told while its step is computed, when one step less is committed.
        if not record.superseded(event.step + 1, index):
            unreadable.setdefault(event.step + 1, {})[event.index] = event.epoch
    found: list[Epoch] = []
    commits = [record.steps[step].event for step in sorted(record.steps)]
    by_epoch: dict[int, list[events.StepCommitted]] = {}
    for before, commit in zip([None, *commits], commits, strict=False):
        if before is not None and commit.epoch not in (before.epoch, before.epoch + 1):
            wrong.append(
                f"step {commit.step} is of epoch {commit.epoch}, and the one before of {before.epoch}"
            )
        by_epoch.setdefault(commit.epoch, []).append(commit)
    begins = min(by_epoch, default=0)
    for epoch in range(min(begins, _SHOWN_EPOCHS)):
        wrong.append(f"epoch {epoch} has no step")
    if begins > _SHOWN_EPOCHS:
        wrong.append(f"epochs {_SHOWN_EPOCHS} to {begins - 1} have no step")
    last = max(by_epoch, default=0)
    for epoch, steps in sorted(by_epoch.items()):
        skipped: set[int] = set()
        for step in steps:
            _check_taken(record, step, wrong)
            skipped |= _check_samples(record, step, unreadable.pop(step.step, {}), wrong)
        covered = None if any(step.offset < 0 for step in steps) else _covered(steps, wrong)
        applied = sum(step.samples for step in steps)
        taken = covered if covered is not None else applied + len(skipped)
        if size is not None:
            _check_end(record, epoch, taken, size, epoch < last, wrong)
        found.append(Epoch(epoch, len(steps), covered, applied, tuple(sorted(skipped))))
    if any(epoch.covered is None for epoch in found):
        notes.append("some steps are from before positions were kept: samples of their epochs are counted")
    for number in sorted(number for number in unreadable if 1 <= number <= record.last):
        wrong.append(f"step {number} has skipped samples and is not in the journal")
    return found


def _covered(steps: list[events.StepCommitted], wrong: list[str]) -> int:
    expected = 0
    for step in steps:
        if step.offset != expected:
            gap = step.offset > expected
            first, after = sorted((expected, step.offset))
            wrong.append(
                f"epoch {step.epoch}: step {step.step} takes positions from {step.offset} on, and {expected} "
                f"is next: positions {first} to {after - 1} are {'in no step' if gap else 'taken twice'}"
            )
        expected = step.offset + step.taken
    return expected


def _check_taken(record: Record, step: events.StepCommitted, wrong: list[str]) -> None:
    """A step takes a global batch, and what is left at the end of an epoch."""
    started = record.started
    if step.taken < 0 or started is None or started.definition.get("dynamic_batch") is not None:
        return
    batch = started.definition.get("global_batch")
    if not isinstance(batch, int):
        return
    left = batch if started.samples is None else started.samples - step.offset
    planned = min(batch, left)
    ragged = started.samples is None and not started.definition.get("drop_last")
    if step.taken != planned and not (ragged and 0 < step.taken < batch):
        wrong.append(f"step {step.step} took {step.taken} positions from {step.offset} on, not {planned}")


def _check_end(record: Record, epoch: int, taken: int, size: int, complete: bool, wrong: list[str]) -> None:
    definition = {} if record.started is None else record.started.definition
    if taken > size:
        wrong.append(f"epoch {epoch} took {taken:,} positions, and the data has {size:,} samples")
    # Dropping the last batch leaves out less than one of them.
    elif (
        complete and taken < size and not (definition.get("drop_last") and size - taken < _batch(definition))
    ):
        wrong.append(f"epoch {epoch} ended after {taken:,} of {size:,} positions")


def _batch(definition: dict[str, Any]) -> int:
    dynamic = definition.get("dynamic_batch")
    largest = dynamic.get("max") if isinstance(dynamic, dict) else definition.get("global_batch")
    return largest if isinstance(largest, int) else 1


def _check_samples(
    record: Record, step: events.StepCommitted, skipped: dict[int, int], wrong: list[str]
) -> set[int]:
    """Samples that the step took and did not apply."""
    size = None if record.started is None else record.started.samples
    reported = set(skipped)
    if step.offset >= 0 and size is not None:
        order = _order(record, step.epoch)
        for sample in sorted(reported):
            place = order.position_of(sample) if 0 <= sample < size else -1
            if not step.offset <= place < step.offset + step.taken:
                wrong.append(
                    f"step {step.step} reported sample {sample} as skipped, which is not one of its own"
                )
    if step.taken < 0:
        return reported
    left_out = step.taken - step.samples
    # After a repair another worker may have read what the first could not.
    again = step.step in record.done_again
    # What was skipped in a step that nobody told may not have been told either.
    untold = step.generation == events.RECALLED and left_out > len(reported)
    if left_out != len(reported) and not untold and not (again and 0 <= left_out < len(reported)):
        wrong.append(
            f"step {step.step} took {step.taken} positions and applied {step.samples} samples, and "
            f"{len(reported)} were reported as skipped"
        )
    return reported


def _check_order(record: Record, epochs: list[Epoch], wrong: list[str]) -> bool:
    """Looks at every position of every epoch: no sample stands at two of them."""
    size = None if record.started is None else record.started.samples
    if size is None or any(epoch.covered is None for epoch in epochs):
        return False
    if sum(epoch.covered or 0 for epoch in epochs) > ENUMERATED:
        return False
    for epoch in epochs:
        ids = _order(record, epoch.epoch).take(0, min(epoch.covered or 0, size))
        # At the cost of the positions that were taken: the size may be any number.
        if len(np.unique(ids)) != len(ids):
            wrong.append(f"the order of epoch {epoch.epoch} has a sample twice")
    return bool(epochs)


def _order(record: Record, epoch: int) -> Permutation | InOrder:
    assert record.started is not None
    assert record.started.samples is not None
    if not record.started.definition.get("shuffle", True):
        return InOrder(record.started.samples)
    return Permutation(record.started.samples, int(record.started.definition.get("seed", 0)), epoch)


def _order_text(record: Record) -> str:
    """Which samples a step took, as an expression."""
    if record.started is None:
        return "not known"
    if record.started.samples is None:
        return "as the stream gives them"
    if not record.started.definition.get("shuffle", True):
        return f"InOrder(size={record.started.samples}).take(offset, offset + taken)"
    seed = record.started.definition.get("seed", 0)
    return f"Permutation(size={record.started.samples}, seed={seed}, epoch).take(offset, offset + taken)"


def _check_bits(record: Record, wrong: list[str], notes: list[str]) -> None:
    """What was done again has the bits it had, unless a worker was found to compute other ones."""
    exact = record.started is not None and record.started.definition.get("mode", "exact") == "exact"
    explained: set[int] = set()
    for before in record.lost:
        now = record.steps.get(before.event.step)
        if now is None or not exact or _same_bits(before.event, now.event):
            continue
        # The journal itself says why: ranks had been found to differ, and what they did was disowned.
        if before.index in record.disowned or any(
            before.index < index < now.index for index in record.distrusted
        ):
            explained.add(now.event.step)
        else:
            wrong.append(f"step {now.event.step} was done again with other bits")
    for begin, end in spans(explained):
        notes.append(
            f"{_steps_text(begin, end)} {'was' if begin == end else 'were'} done again with other bits: "
            "ranks had been found to differ, and what they had computed since they last agreed was disowned"
        )
    seen: dict[tuple[int, int], events.ShardHashed] = {}
    for index, event in record.shard_hashes:
        if record.superseded(event.step, index):
            continue
        first = seen.setdefault((event.step, event.shard), event)
        if first.hash != event.hash:
            wrong.append(
                f"shard {event.shard} of step {event.step} has the hash {first.hash} on rank {first.rank} "
                f"and {event.hash} on rank {event.rank}"
            )
    ended = record.ended
    final = None if ended is None else record.steps.get(ended.step)
    if (
        ended is not None
        and final is not None
        and final.event.hash is not None
        and final.event.hash != ended.hash
    ):
        wrong.append(
            f"step {ended.step} has the hash {final.event.hash}, and the run ended with {ended.hash}"
        )


def _same_bits(one: events.StepCommitted, other: events.StepCommitted) -> bool:
    hashes = ((one.hash, other.hash), (one.sample, other.sample))
    differ = any(None not in pair and pair[0] != pair[1] for pair in hashes)
    return one.loss.hex() == other.loss.hex() and not differ


def _steps_text(first: int, last: int) -> str:
    return f"step {first}" if first == last else f"steps {first} to {last}"
