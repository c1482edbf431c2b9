"""Prove from a journal that each step was committed once and each sample applied once, or report violations.

    steps       1 to n, none missing, none twice; after a resume the last time counts
    positions   each epoch's are taken from 0 on, without a gap or an overlap; the order of an epoch is a
                bijection (data/permutation.py), so each sample is applied once in it; where samples are
                drawn by weight (data/orders.py), each draw is
    skipped     samples that a step took and did not apply are exactly those that were reported
    shards      in each step each shard was computed once: audit_receipts.py
    bits        steps and shards that were done again have the bits that they had

It does not prove that the numbers are right: a result that all ranks computed alike, or that only one rank
computed, is accepted. `paceline verify` computes it again.

Pure: reads events, not files, and imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, final

import numpy as np

from paceline.core import events
from paceline.core.events import Event
from paceline.core.wording import counted
from paceline.data.permutation import InOrder, Permutation
from paceline.monitor import audit_receipts, journal_index
from paceline.monitor.audit_receipts import ReceiptSummary, gaps, span_text, spans, steps_text
from paceline.monitor.journal_index import AuditRecord

# Beyond this many positions the order of the epochs is not enumerated: it is a bijection by construction.
ENUMERATED = 20_000_000
_SHOWN_EPOCHS = 20
_NO_FAILURES = ("preempted", "unattended", "restart")  # the worker left, and was not lost


@final
@dataclass(frozen=True)
class EpochCoverage:
    """Coverage of an epoch: positions 0 to `covered` - 1 of its order were taken."""

    epoch: int
    steps: int
    covered: int | None  # None: the journal is from before positions were kept
    applied: int
    skipped: tuple[int, ...]  # samples, by their number in the data


@final
@dataclass(frozen=True, kw_only=True)
class AuditResult:
    """The result of an audit. `wrong` is empty if the proof holds; `notes` are its limits. `wrong_by_check`
    has the same findings by what was checked: steps, samples, shards, bits."""

    wrong: tuple[str, ...]
    notes: tuple[str, ...]
    steps: int
    redone: int
    restarts: int
    epochs: tuple[EpochCoverage, ...]
    size: int | None
    samples: int
    skipped: int
    order: str
    enumerated: bool
    receipts: ReceiptSummary
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
    wrong_by_check: dict[str, tuple[str, ...]] = field(default_factory=dict)
    drawn: bool = False  # with replacement: a position is a draw, and a sample may be drawn several times

    @property
    def proved(self) -> bool:
        return not self.wrong


def audit(journal: Iterable[Event], *, backup: bool = False) -> AuditResult:
    """Audit a journal. `backup`: shards may have been computed by another member than their assigned one."""
    record = journal_index.read(journal)
    steps: list[str] = []
    samples: list[str] = []
    shards: list[str] = []
    bits: list[str] = []
    notes: list[str] = []
    _check_steps(record, steps, notes)
    epochs = _check_positions(record, samples, notes)
    enumerated = _check_order(record, epochs, samples)
    receipts = audit_receipts.check(record, backup=backup, wrong=shards, notes=notes)
    _check_bits(record, bits, notes)
    found = {"steps": steps, "samples": samples, "shards": shards, "bits": bits}
    return AuditResult(
        wrong=tuple(finding for findings in found.values() for finding in findings),
        wrong_by_check={name: tuple(findings) for name, findings in found.items()},
        notes=tuple(notes),
        steps=len(record.steps),
        redone=len(record.lost),
        restarts=max(0, len(record.restarts) - 1),
        epochs=tuple(epochs),
        size=record.size,
        samples=sum(commit.event.samples for commit in record.steps.values()),
        skipped=sum(len(epoch.skipped) for epoch in epochs),
        drawn=bool((_own_order(record) or {}).get("replacement")),
        order=_order_text(record),
        enumerated=enumerated,
        receipts=receipts,
        views=len(record.views),
        repairs=len(record.repairs),
        repair_seconds=tuple(repair.seconds for _, repair in record.repairs),
        lost_workers=sum(event.cause not in _NO_FAILURES for _, event, _ in record.failures),
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


def _check_steps(record: AuditRecord, wrong: list[str], notes: list[str]) -> None:
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
        wrong.append(f"{steps_text(first, last, 'is', 'are')} missing{more}")
    if record.ended is None:
        if record.failed is not None:
            notes.append(f"the run failed: {record.failed.reason}")
        elif record.steps:
            notes.append("the journal has no run_ended: the run was killed, or is still running")
    elif record.ended.step != record.last:
        wrong.append(
            f"the run ended after step {record.ended.step}, and the last step of the journal is {record.last}"
        )


def _check_positions(record: AuditRecord, wrong: list[str], notes: list[str]) -> list[EpochCoverage]:
    unreadable: dict[int, dict[int, int]] = {}  # step -> sample -> epoch
    for index, event in record.skipped:
        # A skipped sample is recorded while its step is computed, when the step before is the last committed.
        if not record.superseded(event.step + 1, index):
            unreadable.setdefault(event.step + 1, {})[event.index] = event.epoch
    coverage: list[EpochCoverage] = []
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
        wrong.append(f"{span_text('epoch', _SHOWN_EPOCHS, begins - 1, 'has', 'have')} no step")
    last = max(by_epoch, default=0)
    for epoch, steps in sorted(by_epoch.items()):
        skipped: set[int] = set()
        for step in steps:
            check_taken(record, step, wrong)
            skipped |= check_samples(record, step, unreadable.pop(step.step, {}), wrong)
        covered = None if any(step.offset < 0 for step in steps) else count_covered(steps, wrong)
        applied = sum(step.samples for step in steps)
        taken = covered if covered is not None else applied + len(skipped)
        check_end(record, epoch, taken, epoch < last, wrong)
        coverage.append(EpochCoverage(epoch, len(steps), covered, applied, tuple(sorted(skipped))))
    if any(epoch.covered is None for epoch in coverage):
        notes.append("some steps are from before positions were kept: samples of their epochs are counted")
    for number in sorted(number for number in unreadable if 1 <= number <= record.last):
        wrong.append(f"step {number} has skipped samples and is not in the journal")
    return coverage


def count_covered(steps: list[events.StepCommitted], wrong: list[str]) -> int:
    expected = 0
    for step in steps:
        if step.offset != expected:
            gap = step.offset > expected
            first, after = sorted((expected, step.offset))
            wrong.append(
                f"epoch {step.epoch}: step {step.step} takes positions from {step.offset} on, and {expected} "
                f"is next: {span_text('position', first, after - 1, 'is', 'are')} "
                f"{'in no step' if gap else 'taken twice'}"
            )
        expected = step.offset + step.taken
    return expected


def check_taken(record: AuditRecord, step: events.StepCommitted, wrong: list[str]) -> None:
    """Check that the step took a global batch, or what was left at the end of an epoch."""
    batch = record.definition.get("global_batch")
    if step.taken < 0 or record.definition.get("dynamic_batch") is not None or not isinstance(batch, int):
        return
    planned = batch if record.size is None else min(batch, record.size - step.offset)
    ragged = record.size is None and not record.definition.get("drop_last")
    if step.taken != planned and not (ragged and 0 < step.taken < batch):
        taken = counted(step.taken, "position")
        wrong.append(f"step {step.step} took {taken} from {step.offset} on, not {planned}")


def check_end(record: AuditRecord, epoch: int, taken: int, complete: bool, wrong: list[str]) -> None:
    size, definition = record.size, record.definition
    if size is None:
        return
    limit, fixed = definition.get("limit_batches"), definition.get("global_batch")
    if isinstance(limit, int) and isinstance(fixed, int):
        size = min(size, limit * fixed)
    dynamic = definition.get("dynamic_batch")
    batch = dynamic.get("max") if isinstance(dynamic, dict) else definition.get("global_batch")
    # Dropping the last batch leaves out less than one of them.
    dropped = definition.get("drop_last") and size - taken < (batch if isinstance(batch, int) else 1)
    if taken > size:
        wrong.append(
            f"epoch {epoch} took {counted(taken, 'position')}, and the data has {counted(size, 'sample')}"
        )
    elif complete and taken < size and not dropped:
        wrong.append(f"epoch {epoch} ended after {taken:,} of {counted(size, 'position')}")


def check_samples(
    record: AuditRecord, step: events.StepCommitted, skipped: dict[int, int], wrong: list[str]
) -> set[int]:
    """Check and return the samples that the step took and did not apply."""
    size, reported = record.size, set(skipped)
    own = _own_order(record)
    if step.offset >= 0 and size is not None and own is None:
        order = _order(record, size, step.epoch)
        for sample in sorted(reported):
            place = order.position_of(sample) if 0 <= sample < size else -1
            if not step.offset <= place < step.offset + step.taken:
                wrong.append(
                    f"step {step.step} reported sample {sample} as skipped, which is not one of its own"
                )
    if step.taken < 0:
        return reported
    left_out = step.taken - step.samples
    # After a repair another worker may have read a sample that the first could not.
    again = step.step in record.done_again
    # Of a step that is known from a checkpoint alone, the skipped samples may not be recorded either.
    unrecorded = step.generation == events.RECALLED and left_out > len(reported)
    # A sample that was drawn twice in a step is left out twice, and has one number.
    unrecorded |= own is not None and bool(own.get("replacement")) and left_out > len(reported) > 0
    if left_out != len(reported) and not unrecorded and not (again and 0 <= left_out < len(reported)):
        were = "was" if len(reported) == 1 else "were"
        wrong.append(
            f"step {step.step} took {counted(step.taken, 'position')} and applied "
            f"{counted(step.samples, 'sample')}, and {len(reported):,} {were} reported as skipped"
        )
    return reported


def _check_order(record: AuditRecord, epochs: list[EpochCoverage], wrong: list[str]) -> bool:
    """Check that no sample is at two positions of an epoch; return whether this was checked."""
    size = record.size
    if size is None or _own_order(record) is not None or any(epoch.covered is None for epoch in epochs):
        return False
    if sum(epoch.covered or 0 for epoch in epochs) > ENUMERATED:
        return False
    for epoch in epochs:
        ids = _order(record, size, epoch.epoch).take(0, min(epoch.covered or 0, size))
        # Costs as much as the positions that were taken: the size may be any number.
        if len(np.unique(ids)) != len(ids):
            wrong.append(f"the order of epoch {epoch.epoch} has a sample twice")
    return bool(epochs)


def _order(record: AuditRecord, size: int, epoch: int) -> Permutation | InOrder:
    if not record.definition.get("shuffle", True):
        return InOrder(size)
    return Permutation(size, int(record.definition.get("seed", 0)), epoch)


def _own_order(record: AuditRecord) -> dict[str, Any] | None:
    """Return the facts of an order that was laid over the data: its numbers are not in the journal, so that
    which sample is at a position cannot be told from it."""
    own = record.definition.get("order")
    return own if isinstance(own, dict) else None


def _order_text(record: AuditRecord) -> str:
    """Return, as an expression, which samples a step took."""
    if record.size is None:
        return "not known" if record.started is None else "as the stream gives them"
    own = _own_order(record)
    if own is not None:
        each = "drawn with replacement" if own.get("replacement") else "each once by construction"
        of = f"{own.get('positions')} positions of {own.get('samples')} samples"
        return f"{own.get('kind')}: {of}, {each}; its numbers have the digest {own.get('digest')}"
    if not record.definition.get("shuffle", True):
        return f"InOrder(size={record.size}).take(offset, offset + taken)"
    seed = record.definition.get("seed", 0)
    return f"Permutation(size={record.size}, seed={seed}, epoch).take(offset, offset + taken)"


def _check_bits(record: AuditRecord, wrong: list[str], notes: list[str]) -> None:
    """Check that steps done again have the same bits, unless a worker was found to compute other ones."""
    exact = record.started is not None and record.definition.get("mode", "exact") == "exact"
    explained: set[int] = set()
    for before in record.lost:
        now = record.steps.get(before.event.step)
        if now is None or not exact or _same_bits(before.event, now.event):
            continue
        # The journal has the reason: ranks had been found to differ, and their steps were disowned.
        if before.index in record.disowned or any(
            before.index < index < now.index for index in record.distrusted
        ):
            explained.add(now.event.step)
        else:
            wrong.append(f"step {now.event.step} was done again with other bits")
    for first, last in spans(explained):
        notes.append(
            f"{steps_text(first, last, 'was', 'were')} done again with other bits: "
            "ranks had been found to differ, and what they had computed since they last agreed was disowned"
        )
    seen: dict[tuple[int, int], events.ShardHashed] = {}
    for index, event in record.shard_hashes:
        if record.superseded(event.step, index):
            continue
        known = seen.setdefault((event.step, event.shard), event)
        if known.hash != event.hash:
            wrong.append(
                f"shard {event.shard} of step {event.step} has the hash {known.hash} on rank {known.rank} "
                f"and {event.hash} on rank {event.rank}"
            )
    ended = record.ended
    if ended is None:
        return
    final = record.commit(ended.step if ended.restored is None else ended.restored)
    if final is not None and final.hash not in (None, ended.hash):
        wrong.append(f"step {final.step} has the hash {final.hash}, and the run ended with {ended.hash}")


def _same_bits(one: events.StepCommitted, other: events.StepCommitted) -> bool:
    hashes = ((one.hash, other.hash), (one.sample, other.sample))
    differ = any(None not in pair and pair[0] != pair[1] for pair in hashes)
    return one.loss.hex() == other.loss.hex() and not differ
