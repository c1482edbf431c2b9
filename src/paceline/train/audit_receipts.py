"""Whether each shard of each step was computed once: the views say who had to, the receipts who did.

The rule, for a step that counts and the view that it was committed in:

- The view deals every shard to exactly one member.
- **Confirmed by receipt**: that member's receipt names the step, the view and the shard.
- **Confirmed by commit**: there is no such receipt, and none can be expected, because the member was lost in
  this view (its last receipts with it), or the view ended in this very step, and in the next one the
  member was behind (it was given the result by one that had it) or is no member any more, or the supervisor
  ended in this view, without the end of the run. Somebody committed the step, and the sum of a step cannot
  complete without every shard of it.
- Anything else is wrong: a hole before a later receipt, a shard that is another member's, two receipts of one
  process for one step.

A step that only lost members had committed is done again in the next view, which says that it begins before
it; the members of that one confirm it. No process may have committed it in both. Must not know positions or
samples.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import final

from paceline.core.events import RECALLED
from paceline.train.audit_record import Member, Members, Receipt, Record, View

_SHOWN = 20
_MOST_SHARDS = 1 << 20


@final
@dataclass(frozen=True)
class Receipts:
    """`by_receipt` and `by_commit` count results of shards; `steps` those of supervised steps."""

    count: int
    steps: int
    by_receipt: int
    by_commit: int
    superseded: int  # receipts for work that was lost and done again


def check(record: Record, *, backup: bool, wrong: list[str], notes: list[str]) -> Receipts:
    """Adds to `wrong` what is, and counts what is confirmed."""
    supervised = {step: commit.view for step, commit in record.steps.items() if commit.event.generation > 0}
    recalled = sorted(step for step in record.steps if record.steps[step].event.generation == RECALLED)
    for first, last in spans(recalled):
        what = f"step {first} is" if first == last else f"steps {first} to {last} are"
        notes.append(f"{what} known from a checkpoint alone: all were killed before the journal had so much")
    if record.steps and len(supervised) + len(recalled) < len(record.steps):
        some = "some steps are" if supervised else "the run is"
        notes.append(f"{some} without receipts: nobody supervised the workers, or it was before receipts")
    counting, superseded = _counting(record)
    final = _final_views(record, supervised, counting, wrong)
    _check_strays(record, supervised, final, counting, wrong)
    steps_of: dict[View, list[int]] = {}
    for step in sorted(final):
        steps_of.setdefault(final[step], []).append(step)
    receipts_of: dict[View, dict[Member, list[Receipt]]] = {}
    for receipt in counting:
        receipts_of.setdefault(receipt.view, {}).setdefault(receipt.member, []).append(receipt)
    by_receipt = by_commit = 0
    following: View | None = None
    course = _Course(record)
    for view in sorted(steps_of, reverse=True):
        same = following if following is not None and following[0] == view[0] else None
        checked = _ViewCheck(
            record, course, view, same, steps_of[view], receipts_of.get(view, {}), backup, wrong
        )
        following = view
        checked.run()
        by_receipt += checked.by_receipt
        by_commit += checked.by_commit
    for view in sorted(set(supervised.values()) - set(steps_of) - set(record.views)):
        _say_unknown(view, sorted(step for step in supervised if supervised[step] == view), wrong)
    for view in sorted(record.views):
        _check_deal(record, view, wrong)
    for view in record.view_doubled:
        wrong.append(f"generation {view[1]} has two views")
    return Receipts(len(record.receipts), len(supervised), by_receipt, by_commit, superseded)


def _counting(record: Record) -> tuple[list[Receipt], int]:
    """The receipts without what was lost and done again."""
    counting: list[Receipt] = []
    superseded = 0
    for receipt in record.receipts:
        edge = record.superseded_after(receipt)
        last = receipt.last if edge is None else min(receipt.last, edge)
        if last < receipt.first:
            superseded += 1
            continue
        counting.append(
            Receipt(receipt.member, receipt.view, receipt.first, last, receipt.shards, receipt.index)
        )
    return counting, superseded


def _final_views(
    record: Record, supervised: dict[int, View], counting: list[Receipt], wrong: list[str]
) -> dict[int, View]:
    """The view in which each step was committed for good: the last one that somebody committed it in."""
    final = dict(supervised)
    ordered = sorted(supervised)
    unknown: list[tuple[int, int]] = []
    for receipt in counting:
        if receipt.last > record.last and receipt.view[0] in record.ended_sessions:
            # As a span: a line of a journal from elsewhere may name any step.
            unknown.append((max(receipt.first, record.last + 1), receipt.last))
        for step in _outside(receipt, supervised, ordered):
            if step in final and receipt.view > final[step]:
                final[step] = receipt.view
    for first, last in joined(unknown):
        what = f"step {first}" if first == last else f"steps {first} to {last}"
        wrong.append(f"workers have receipts of {what}, and the journal ends with step {record.last}")
    return final


def _outside(receipt: Receipt, supervised: dict[int, View], ordered: list[int]) -> list[int]:
    """Steps of a receipt that were committed in another view than its own. Views are runs of steps, so a
    receipt whose two ends are in its view is wholly in it."""
    ends = supervised.get(receipt.first), supervised.get(receipt.last)
    if ends == (receipt.view, receipt.view):
        return []
    inside = ordered[bisect_left(ordered, receipt.first) : bisect_left(ordered, receipt.last + 1)]
    return [step for step in inside if supervised[step] != receipt.view]


def _check_strays(
    record: Record,
    supervised: dict[int, View],
    final: dict[int, View],
    counting: list[Receipt],
    wrong: list[str],
) -> None:
    """A step with evidence from two views: those that had committed it in the first must be gone."""
    ordered = sorted(supervised)
    stayed: dict[int, set[tuple[View, Member | None]]] = {}
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
    for step, found in sorted(stayed.items())[:_SHOWN]:
        for view, member in sorted(found, key=str):
            who = "" if member is None else f" by rank {member[0]} (pid {member[1]}), which stayed,"
            wrong.append(
                f"step {step} was committed in generation {view[1]}{who} and again in generation "
                f"{final[step][1]}"
            )


def _gone(record: Record, before: View, after: View) -> bool:
    """Whether some member of a view is not in a later one: it may have committed alone."""
    old, new = record.views.get(before), record.views.get(after)
    return old is None or new is None or bool(set(old.shards) - set(new.shards))


@final
class _Course:
    """What a view must know of those that came after it, looked up once for all of them."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._views = sorted(record.views)
        # By session: another one may have a process of the same number.
        self._last_seen = {(view[0], one): view for view in self._views for one in record.views[view].shards}
        self._lost: dict[int, set[Member]] = {}
        for session, event in record.failures:
            self._lost.setdefault(session, set()).add((event.rank, event.pid))

    def lost_in(self, session: int) -> set[Member]:
        return self._lost.get(session, set())

    def is_last_view_of(self, member: Member, view: View) -> bool:
        return self._last_seen[view[0], member] == view

    def between(self, view: View, following: View | None) -> list[Members]:
        """The views of its session after this one, up to the next that has steps."""
        end = (view[0] + 1, 0) if following is None else (following[0], following[1] + 1)
        found = self._views[bisect_right(self._views, view) : bisect_left(self._views, end)]
        return [self._record.views[one] for one in found]


@final
class _ViewCheck:
    """The steps of one view, and what its members say about them."""

    def __init__(
        self,
        record: Record,
        course: _Course,
        view: View,
        following: View | None,
        steps: list[int],
        receipts: dict[Member, list[Receipt]],
        backup: bool,
        wrong: list[str],
    ) -> None:
        self._record, self._view, self._steps, self._receipts = record, view, steps, receipts
        self._backup, self._wrong = backup, wrong
        session, self._generation = view
        self._where = f"in generation {self._generation}"
        self._lost, self._course = course.lost_in(session), course
        self._open = session not in record.ended_sessions and following is None
        # Views that broke before their first step are between this one and the next that has steps.
        next_ones = course.between(view, following)
        self._next = next_ones[0] if next_ones else None
        self._given: set[Member] = set().union(*(members.given for members in next_ones))
        self.by_receipt = self.by_commit = 0

    def run(self) -> None:
        members = self._record.views.get(self._view)
        if members is None:
            _say_unknown(self._view, self._steps, self._wrong)
            return
        for stranger in sorted(set(self._receipts) - set(members.shards)):
            first = self._receipts[stranger][0].first
            self._wrong.append(
                f"rank {stranger[0]} (pid {stranger[1]}) has a receipt for step {first} {self._where}, and "
                "is no member of it"
            )
        deviating = self._backup and any(
            receipt.shards != members.shards.get(member)
            for member, mine in self._receipts.items()
            for receipt in mine
        )
        for member, shards in members.shards.items():
            self._check_member(member, shards, compare=not self._backup, count=not deviating)
        if deviating:
            self._check_each_step(members.shards)

    def _check_member(self, member: Member, shards: tuple[int, ...], *, compare: bool, count: bool) -> None:
        who = f"rank {member[0]} (pid {member[1]})"
        expected = self._steps[0]
        last = self._steps[-1]
        for receipt in sorted(self._receipts.get(member, ()), key=lambda one: (one.first, one.index)):
            first, end = max(receipt.first, self._steps[0]), min(receipt.last, last)
            if end < first:
                continue
            if first > expected:
                self._say_missing(who, expected, first - 1, shards)
            elif first < expected:
                twice = f"step {first}" if min(end, expected - 1) == first else f"steps {first} and on"
                self._wrong.append(f"{who} has two receipts for {twice} {self._where}")
            covered = max(0, end - max(first, expected) + 1)
            if compare and receipt.shards != shards:
                self._say_other_shards(who, receipt, shards, first)
            elif count:
                self.by_receipt += covered * len(receipt.shards)
            expected = max(expected, end + 1)
        if expected <= last:
            was_lost = member in self._lost and self._course.is_last_view_of(member, self._view)
            if was_lost or self._open or (expected == last and self._had_no_result(member)):
                self.by_commit += (last - expected + 1) * len(shards) if count else 0
            else:
                self._say_missing(who, expected, last, shards)

    def _had_no_result(self, member: Member) -> bool:
        """Whether a member may have ended this view without the result of its last step."""
        if self._next is None:
            return False
        only_lost_ones_had_it = self._next.step < self._steps[-1]
        return member in self._given or member not in self._next.shards or only_lost_ones_had_it

    def _say_missing(self, who: str, first: int, last: int, shards: tuple[int, ...]) -> None:
        steps = f"step {first}" if first == last else f"steps {first} to {last}"
        what = (
            f"shard {_listed(shards)} is missing"
            if len(shards) == 1
            else f"shards {_listed(shards)} are missing"
        )
        if not shards:
            what = "a receipt is missing"
        self._wrong.append(f"{what} at {steps} {self._where}: {who} has no receipt")

    def _say_other_shards(self, who: str, receipt: Receipt, shards: tuple[int, ...], step: int) -> None:
        claimed = f"{who}'s receipt has {_listed(receipt.shards) or 'none'}, and the view gave it "
        claimed += _listed(shards) or "none"
        for shard in sorted(set(shards) - set(receipt.shards)):
            self._wrong.append(f"shard {shard} is missing at step {step} {self._where}: {claimed}")
        for shard in sorted({shard for shard in receipt.shards if shard not in shards}):
            self._wrong.append(f"shard {shard} is doubled at step {step} {self._where}: {claimed}")
        for shard in sorted({shard for shard in receipt.shards if receipt.shards.count(shard) > 1}):
            self._wrong.append(f"shard {shard} is doubled at step {step} {self._where}: {claimed}")

    def _check_each_step(self, shards: dict[Member, tuple[int, ...]]) -> None:
        """Where idle members help the slow ones: whoever did it, every shard once."""
        every = sorted(shard for mine in shards.values() for shard in mine)
        for step in self._steps:
            told = {
                member: receipt.shards
                for member, mine in self._receipts.items()
                for receipt in mine
                if receipt.first <= step <= receipt.last
            }
            found = [shard for mine in told.values() for shard in mine]
            self.by_receipt += len(set(found))
            missing = set(every) - set(found)
            # Of members without a receipt for this step some may have computed what is missing.
            if missing and set(shards) - set(told):
                self.by_commit += len(missing)
                found += missing
            _say_shards(step, self._generation, found, every, "in the receipts", self._wrong)


def _say_unknown(view: View, steps: list[int], wrong: list[str]) -> None:
    first, last = steps[0], steps[-1]
    what = f"step {first} was" if first == last else f"steps {first} to {last} were"
    wrong.append(f"{what} committed in generation {view[1]}, which has no view_changed")


def _check_deal(record: Record, view: View, wrong: list[str]) -> None:
    members = record.views[view]
    dealt = [shard for mine in members.shards.values() for shard in mine]
    shards = record.started.shards if record.started is not None else max(dealt, default=-1) + 1
    if record.started is not None and record.started.definition.get("mode") == "fast":
        shards = len(members.shards)  # there each member is one slice of the batch
    if not 0 <= shards <= _MOST_SHARDS:
        wrong.append(f"the run is said to have {shards} shards, which none can have")
        return
    _say_shards(members.step + 1, view[1], dealt, range(shards), "in the view", wrong)


def _say_shards(
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
    """What is missing of 1 to `last`, as runs, at the cost of what is there: `last` may be any number."""
    found: list[tuple[int, int]] = []
    expected = 1
    for number in sorted(numbers):
        if number > expected:
            found.append((expected, min(number - 1, last)))
        expected = max(expected, number + 1)
    return found + ([(expected, last)] if expected <= last else [])


def joined(runs: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Runs of numbers that overlap or touch, as one."""
    found: list[tuple[int, int]] = []
    for first, last in sorted(runs):
        if found and first <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(found[-1][1], last))
        else:
            found.append((first, last))
    return found


def spans(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Whole numbers as runs, each with its first and last."""
    found: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if found and number == found[-1][1] + 1:
            found[-1] = (found[-1][0], number)
        else:
            found.append((number, number))
    return found


def _listed(shards: Iterable[int]) -> str:
    return ", ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in spans(set(shards)))
