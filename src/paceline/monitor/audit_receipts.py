"""Check that each shard of each step was computed once: views assign shards, receipts confirm them.

The rule, for a step that counts and the view that it was committed in:

- The view assigns every shard to exactly one member.
- **Confirmed by receipt**: that member's receipt names the step, the view and the shard.
- **Confirmed by commit**: there is no such receipt, and none can be expected, because the member was lost in
  this view (its last receipts with it), or the view ended in this very step, and in the next one the
  member was behind (it received the result by state transfer) or is not a member, or the supervisor ended
  in this view, without the end of the run. A member committed the step, and the sum of a step cannot
  complete without every shard of it.
- Anything else is wrong: a hole before a later receipt, a shard that is another member's, two receipts of one
  process for one step.

A step that only lost members had committed is done again in the next view, whose record begins before that
step; the members of that view confirm it. No process may have committed it in both.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import final

from paceline.core.events import RECALLED
from paceline.monitor.journal_index import AuditRecord, Member, RecordedReceipt, ViewKey, ViewMembers

_SHOWN = 20
_MOST_SHARDS = 1 << 20


@final
@dataclass(frozen=True)
class ReceiptSummary:
    """`by_receipt` and `by_commit` count results of shards; `steps` those of supervised steps."""

    count: int
    steps: int
    by_receipt: int
    by_commit: int
    superseded: int  # receipts for work that was lost and done again


def check(record: AuditRecord, *, backup: bool, wrong: list[str], notes: list[str]) -> ReceiptSummary:
    """Append contradictions to `wrong`, and count what is confirmed."""
    supervised = {step: commit.view for step, commit in record.steps.items() if commit.event.generation > 0}
    recalled = sorted(step for step in record.steps if record.steps[step].event.generation == RECALLED)
    for first, last in spans(recalled):
        what = steps_text(first, last, "is", "are")
        notes.append(f"{what} known from a checkpoint alone: all were killed before the journal had so much")
    if record.steps and len(supervised) + len(recalled) < len(record.steps):
        some = "some steps are" if supervised else "the run is"
        notes.append(f"{some} without receipts: there was no supervisor, or they are from before receipts")
    counting, superseded = _counting(record)
    final = _final_views(record, supervised, counting, wrong)
    _check_strays(record, supervised, final, counting, wrong)
    steps_of: dict[ViewKey, list[int]] = {}
    for step in sorted(final):
        steps_of.setdefault(final[step], []).append(step)
    receipts_of: dict[ViewKey, dict[Member, list[RecordedReceipt]]] = {}
    for receipt in counting:
        receipts_of.setdefault(receipt.view, {}).setdefault(receipt.member, []).append(receipt)
    by_receipt = by_commit = 0
    following: ViewKey | None = None
    course = _ViewSequence(record)
    for view in sorted(steps_of, reverse=True):
        same = following if following is not None and following[0] == view[0] else None
        mine = receipts_of.get(view, {})
        checked = _ViewCheck(record, course, view, same, steps_of[view], mine, backup, wrong)
        following = view
        checked.run()
        by_receipt += checked.by_receipt
        by_commit += checked.by_commit
    for view in sorted(set(supervised.values()) - set(steps_of) - set(record.views)):
        _report_unknown(view, sorted(step for step in supervised if supervised[step] == view), wrong)
    for view in sorted(record.views):
        _check_assignment(record, view, wrong)
    for view in record.view_doubled:
        wrong.append(f"generation {view[1]} has two views")
    return ReceiptSummary(len(record.receipts), len(supervised), by_receipt, by_commit, superseded)


def _counting(record: AuditRecord) -> tuple[list[RecordedReceipt], int]:
    """Return the receipts without work that was lost and done again."""
    counting: list[RecordedReceipt] = []
    superseded = 0
    for receipt in record.receipts:
        edge = record.superseded_after(receipt)
        last = receipt.last if edge is None else min(receipt.last, edge)
        if last < receipt.first:
            superseded += 1
        else:
            counting.append(receipt if last == receipt.last else replace(receipt, last=last))
    return counting, superseded


def _final_views(
    record: AuditRecord, supervised: dict[int, ViewKey], counting: list[RecordedReceipt], wrong: list[str]
) -> dict[int, ViewKey]:
    """Return the final view of each step: the last one in which a member committed it."""
    final = dict(supervised)
    ordered = sorted(supervised)
    unknown: list[tuple[int, int]] = []
    for receipt in counting:
        if receipt.last > record.last and receipt.view[0] in record.ended_sessions:
            # As a span: a journal from elsewhere may name any step.
            unknown.append((max(receipt.first, record.last + 1), receipt.last))
        for step in _outside(receipt, supervised, ordered):
            if step in final and receipt.view > final[step]:
                final[step] = receipt.view
    for first, last in joined(unknown):
        what = steps_text(first, last)
        wrong.append(f"workers have receipts of {what}, and the journal ends with step {record.last}")
    return final


def _outside(receipt: RecordedReceipt, supervised: dict[int, ViewKey], ordered: list[int]) -> list[int]:
    """Return the steps of a receipt that were committed in another view. Views are runs of steps, so a
    receipt whose two ends are in its view is wholly in it."""
    ends = supervised.get(receipt.first), supervised.get(receipt.last)
    if ends == (receipt.view, receipt.view):
        return []
    inside = ordered[bisect_left(ordered, receipt.first) : bisect_left(ordered, receipt.last + 1)]
    return [step for step in inside if supervised[step] != receipt.view]


def _check_strays(
    record: AuditRecord,
    supervised: dict[int, ViewKey],
    final: dict[int, ViewKey],
    counting: list[RecordedReceipt],
    wrong: list[str],
) -> None:
    """Check steps with evidence from two views: members that committed them in the first must be gone."""
    ordered = sorted(supervised)
    stayed: dict[int, set[tuple[ViewKey, Member | None]]] = {}
    for step, view in final.items():
        if view != supervised[step] and not _gone(record, supervised[step], view):
            stayed.setdefault(step, set()).add((supervised[step], None))
    moved = {step for step, view in final.items() if view != supervised[step]}
    for receipt in counting:
        steps = set(_outside(receipt, supervised, ordered))
        steps |= {step for step in moved if receipt.first <= step <= receipt.last}
        for step in steps & final.keys():
            members = record.views.get(final[step])
            if receipt.view < final[step] and members is not None and receipt.member in members.shards:
                stayed.setdefault(step, set()).add((receipt.view, receipt.member))
    for step, commits in sorted(stayed.items())[:_SHOWN]:
        for view, member in sorted(commits, key=str):
            who = "" if member is None else f" by rank {member[0]} (pid {member[1]}), which stayed,"
            wrong.append(
                f"step {step} was committed in generation {view[1]}{who} and again in generation "
                f"{final[step][1]}"
            )


def _gone(record: AuditRecord, before: ViewKey, after: ViewKey) -> bool:
    """Return whether some member of a view is not in a later one: it may have committed alone."""
    old, new = record.views.get(before), record.views.get(after)
    return old is None or new is None or bool(set(old.shards) - set(new.shards))


@final
class _ViewSequence:
    """Looks up what followed a view; indexed once for all views."""

    def __init__(self, record: AuditRecord) -> None:
        self._record = record
        self._views = sorted(record.views)
        # By session: another one may have a process of the same number.
        self.last_seen = {(view[0], one): view for view in self._views for one in record.views[view].shards}
        self.lost = {(session, member) for session, _, member in record.failures}

    def between(self, view: ViewKey, following: ViewKey | None) -> list[ViewMembers]:
        """Return the views of its session after this one, up to the next that has steps."""
        end = (view[0] + 1, 0) if following is None else (following[0], following[1] + 1)
        found = self._views[bisect_right(self._views, view) : bisect_left(self._views, end)]
        return [self._record.views[one] for one in found]


@final
@dataclass
class _ViewCheck:
    """Checks the steps of one view against the receipts of its members."""

    record: AuditRecord
    course: _ViewSequence
    view: ViewKey
    following: ViewKey | None  # the next view of its session that has steps
    steps: list[int]
    receipts: dict[Member, list[RecordedReceipt]]
    backup: bool
    wrong: list[str]
    by_receipt: int = 0
    by_commit: int = 0

    def __post_init__(self) -> None:
        session, self._generation = self.view
        self._where = f"in generation {self._generation}"
        self._open = session not in self.record.ended_sessions and self.following is None
        # Views that broke before their first step are between this one and the next that has steps.
        next_ones = self.course.between(self.view, self.following)
        self._next = next_ones[0] if next_ones else None
        self._given: set[Member] = set().union(*(members.given for members in next_ones))

    def run(self) -> None:
        members = self.record.views.get(self.view)
        if members is None:
            _report_unknown(self.view, self.steps, self.wrong)
            return
        for stranger in sorted(set(self.receipts) - set(members.shards)):
            first = self.receipts[stranger][0].first
            self.wrong.append(
                f"rank {stranger[0]} (pid {stranger[1]}) has a receipt for step {first} {self._where}, and "
                "is no member of it"
            )
        deviating = self.backup and any(
            receipt.shards != members.shards.get(member)
            for member, mine in self.receipts.items()
            for receipt in mine
        )
        for member, shards in members.shards.items():
            self._check_member(member, shards, compare=not self.backup, count=not deviating)
        if deviating:
            self._check_each_step(members.shards)

    def _check_member(self, member: Member, shards: tuple[int, ...], *, compare: bool, count: bool) -> None:
        who = f"rank {member[0]} (pid {member[1]})"
        expected = self.steps[0]
        last = self.steps[-1]
        for receipt in sorted(self.receipts.get(member, ()), key=lambda one: (one.first, one.index)):
            first, end = max(receipt.first, self.steps[0]), min(receipt.last, last)
            if end < first:
                continue
            if first > expected:
                self._report_missing(who, expected, first - 1, shards)
            elif first < expected:
                twice = f"step {first}" if min(end, expected - 1) == first else f"steps {first} and later"
                self.wrong.append(f"{who} has two receipts for {twice} {self._where}")
            covered = max(0, end - max(first, expected) + 1)
            if compare and receipt.shards != shards:
                self._report_other_shards(who, receipt, shards, first)
            elif count:
                self.by_receipt += covered * len(receipt.shards)
            expected = max(expected, end + 1)
        if expected <= last:
            process = self.view[0], member
            was_lost = process in self.course.lost and self.course.last_seen[process] == self.view
            if was_lost or self._open or (expected == last and self._had_no_result(member)):
                self.by_commit += (last - expected + 1) * len(shards) if count else 0
            else:
                self._report_missing(who, expected, last, shards)

    def _had_no_result(self, member: Member) -> bool:
        """Return whether a member may have ended this view without the result of its last step."""
        if self._next is None:
            return False
        only_lost_ones_had_it = self._next.step < self.steps[-1]
        return member in self._given or member not in self._next.shards or only_lost_ones_had_it

    def _report_missing(self, who: str, first: int, last: int, shards: tuple[int, ...]) -> None:
        what = "a receipt is"
        if shards:
            what = f"shard {shards[0]} is" if len(shards) == 1 else f"shards {_listed(shards)} are"
        steps = steps_text(first, last)
        self.wrong.append(f"{what} missing at {steps} {self._where}: {who} has no receipt")

    def _report_other_shards(
        self, who: str, receipt: RecordedReceipt, shards: tuple[int, ...], step: int
    ) -> None:
        claimed = f"{who}'s receipt has {_listed(receipt.shards) or 'none'}, and the view gave it "
        claimed += _listed(shards) or "none"
        for shard in sorted(set(shards) - set(receipt.shards)):
            self.wrong.append(f"shard {shard} is missing at step {step} {self._where}: {claimed}")
        for shard, count in sorted(Counter(receipt.shards).items()):
            if count > 1 or shard not in shards:
                self.wrong.append(f"shard {shard} is doubled at step {step} {self._where}: {claimed}")

    def _check_each_step(self, shards: dict[Member, tuple[int, ...]]) -> None:
        """Check each step where idle members compute shards of slow ones: every shard once, by any member."""
        every = sorted(shard for mine in shards.values() for shard in mine)
        for step in self.steps:
            claimed = {
                member: receipt.shards
                for member, mine in self.receipts.items()
                for receipt in mine
                if receipt.first <= step <= receipt.last
            }
            reported = [shard for mine in claimed.values() for shard in mine]
            self.by_receipt += len(set(reported))
            missing = set(every) - set(reported)
            # Of members without a receipt for this step some may have computed what is missing.
            if missing and set(shards) - set(claimed):
                self.by_commit += len(missing)
                reported += missing
            _report_shards(step, self._generation, reported, every, "in the receipts", self.wrong)


def _report_unknown(view: ViewKey, steps: list[int], wrong: list[str]) -> None:
    what = steps_text(steps[0], steps[-1], "was", "were")
    wrong.append(f"{what} committed in generation {view[1]}, which has no view_changed")


def _check_assignment(record: AuditRecord, view: ViewKey, wrong: list[str]) -> None:
    members = record.views[view]
    assigned = [shard for mine in members.shards.values() for shard in mine]
    shards = record.started.shards if record.started is not None else max(assigned, default=-1) + 1
    if record.definition.get("mode") == "fast":
        shards = len(members.shards)  # there each member is one slice of the batch
    if not 0 <= shards <= _MOST_SHARDS:
        wrong.append(f"the run is said to have {shards} shards, which none can have")
        return
    _report_shards(members.step + 1, view[1], assigned, range(shards), "in the view", wrong)


def _report_shards(
    step: int, generation: int, found: list[int], every: Sequence[int], where: str, wrong: list[str]
) -> None:
    counts = Counter(found)
    for shard in sorted({*counts, *every}):
        what = "missing" if counts[shard] == 0 else "doubled" if counts[shard] > 1 else ""
        if not what and shard not in every:
            what = "not one of the run's"
        if what:
            wrong.append(f"shard {shard} is {what} at step {step} in generation {generation}: {where}")


def gaps(numbers: Iterable[int], last: int) -> list[tuple[int, int]]:
    """Return what is missing of 1 to `last`, as runs; costs as much as what is there, for any `last`."""
    found: list[tuple[int, int]] = []
    expected = 1
    for number in sorted(numbers):
        if number > expected:
            found.append((expected, min(number - 1, last)))
        expected = max(expected, number + 1)
    return found + ([(expected, last)] if expected <= last else [])


def joined(runs: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Merge runs of numbers that overlap or touch."""
    found: list[tuple[int, int]] = []
    for first, last in sorted(runs):
        if found and first <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(found[-1][1], last))
        else:
            found.append((first, last))
    return found


def spans(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Return whole numbers as runs, each with its first and last."""
    return joined((number, number) for number in numbers)


def steps_text(first: int, last: int, one: str = "", many: str = "") -> str:
    """Format as "step 3" or "steps 3 to 5", with a verb for one and for many."""
    return span_text("step", first, last, one, many)


def span_text(noun: str, first: int, last: int, one: str = "", many: str = "") -> str:
    """Format as "step 3" or "steps 3 to 5" for a noun, with a verb for one and for many."""
    if first == last:
        return f"{noun} {first} {one}".rstrip()
    return f"{noun}s {first} to {last} {many}".rstrip()


def _listed(shards: Iterable[int]) -> str:
    return ", ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in spans(set(shards)))
