"""Bugs planted by hand: those that a review named because neither the tests nor 2,000 simulated schedules had
noticed them, and their likes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from bench.mutants.operators import Mutant

_MACHINE = "src/paceline/elastic/machine"
_MEMBER = "src/paceline/control/member_machine.py"


@dataclass(frozen=True)
class Planted:
    """In `path` the text `old`, which is there once, becomes `new`."""

    name: str
    path: str
    old: str
    new: str


PLANTED = (
    Planted(
        "a report of an old generation is accepted",
        f"{_MACHINE}/member_event_handlers.py",
        "job.phase is not JobPhase.PREPARING or report.generation != job.generation",
        "job.phase is not JobPhase.PREPARING or report.generation > job.generation",
    ),
    Planted(
        "a report of any generation is accepted",
        f"{_MACHINE}/member_event_handlers.py",
        "job.phase is not JobPhase.PREPARING or report.generation != job.generation",
        "job.phase is not JobPhase.PREPARING",
    ),
    Planted(
        "an installation of an old generation is accepted",
        f"{_MACHINE}/member_event_handlers.py",
        "job.phase is not JobPhase.INSTALLING or installed.generation != job.generation",
        "job.phase is not JobPhase.INSTALLING or installed.generation > job.generation",
    ),
    Planted(
        "a failed collective of an old view counts",
        f"{_MACHINE}/member_event_handlers.py",
        "failure.generation != view.generation",
        "failure.generation > view.generation",
    ),
    Planted(
        "the end of an old view counts",
        f"{_MACHINE}/member_event_handlers.py",
        "done.generation and job.view is not None and done.generation != job.view.generation",
        "done.generation and job.view is not None and done.generation > job.view.generation",
    ),
    Planted(
        "half of the votes are a majority",
        f"{_MACHINE}/hash_votes.py",
        "2 * most <= all_votes",
        "2 * most < all_votes",
    ),
    Planted(
        "a copy of a state has a vote",
        f"{_MACHINE}/hash_votes.py",
        "lineage.get(member, member)",
        "member",
    ),
    Planted(
        "a held shard is assigned twice",
        f"{_MACHINE}/shard_assignment.py",
        "if 0 <= shard < shards} - taken)",
        "if 0 <= shard < shards})",
    ),
    Planted(
        "private state is forgotten",
        f"{_MACHINE}/view_change.py",
        "return tuple(shard for shard in range(shards) if shard not in there)",
        "return ()",
    ),
    Planted(
        "private state of another step counts",
        f"{_MACHINE}/view_change.py",
        "if step == moment and report.progress is not None",
        "if report.progress is not None",
    ),
    Planted(
        "a restart forgets a member",
        f"{_MACHINE}/machine.py",
        "members={worker.number: (worker.slot, worker.agent_id) for worker in state.workers.values()},",
        "members={w.number: (w.slot, w.agent_id) for w in state.workers.values() if not w.leave_reason},",
    ),
    Planted(
        "a restart forgets who was starting",
        f"{_MACHINE}/machine.py",
        "starting=tuple(w.number for w in state.workers.values() if w.status in NOT_IN_VIEW),",
        "starting=(),",
    ),
    Planted(
        "a restart gives a member's number again",
        f"{_MACHINE}/machine.py",
        "next_member=state.next_member,",
        "next_member=1,",
    ),
    Planted(
        "a restart forgets that all are to restore",
        f"{_MACHINE}/machine.py",
        "restore=state.restore,",
        "restore=False,",
    ),
    Planted(
        "the state comes from a member that is behind",
        f"{_MACHINE}/view_change.py",
        "newest = max(known, default=None)",
        "newest = min(known, default=None)",
    ),
    Planted(
        "held shards of a member that is behind are kept",
        f"{_MACHINE}/view_change.py",
        "job.abort and not restore and far == newest",
        "job.abort and not restore",
    ),
    Planted(
        "a member takes a view of an old generation",
        _MEMBER,
        "if not outside or view.generation <= _invited(state) or state.member not in view.members:",
        "if not outside or state.member not in view.members:",
    ),
    Planted(
        "a member that pauses does not hear that it is to abort",
        _MEMBER,
        "if known and prepare.generation == known.generation and not prepare.abort:",
        "if known and prepare.generation == known.generation:",
    ),
    Planted(
        "a member does not tell a new supervisor that it is finished",
        _MEMBER,
        "if state.unanswered is not None:",
        "if state.unanswered is not None and not isinstance(state.unanswered, MemberFinished):",
    ),
    Planted(
        "a member reports a state that a broken restore has left half loaded",
        _MEMBER,
        "return replace(state, has_state=False, fresh=False), (restore,)",
        "return replace(state, fresh=False), (restore,)",
    ),
    Planted(
        "the sum of the last shards has another order",
        "src/paceline/train/step/partial_sums.py",
        "return self._whole(Node(node.index >> 1, node.level + 1))",
        "return Node(node.index >> 1, node.level + 1)",
    ),
)


def planted(root: Path) -> list[Mutant]:
    """All of them as mutants; an error where the source no longer has such a line."""
    found = []
    for one in PLANTED:
        text = (root / one.path).read_text(encoding="utf-8")
        if text.count(one.old) != 1:
            raise LookupError(f"{one.path} has {text.count(one.old)} times: {one.old}")
        start = text.index(one.old)
        line = text.count("\n", 0, start) + 1
        source = text.splitlines()[line - 1].strip()
        stop = start + len(one.old)
        found.append(Mutant(one.path, line, start, stop, one.old, one.new, "planted", source, one.name))
    return found
