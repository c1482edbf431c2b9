"""Act on the state hashes of a step: expel members that dissent, and restore a state from before the last
step that all agreed on, because a dissenter's gradients are in the weights of all.

    doubted          the only member left held another state than members that are gone: its state is not
                     handed on, all go back
    spoiled          a member that found its own memory changed is named and expelled
    a majority       members that differ from it are named and expelled
    no majority      no member is expelled yet: all go back and compute the step again, and the result says
                     which member was right
    computed again   members that had another hash are named and expelled; the others continue. Where all
                     had, because the wrong gradients had reached all: the member that was the first to
                     contribute something else to a step (hash_votes.py)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from paceline.control.messages import MemberReport, ViewPlan
from paceline.core.wording import counted, ranks
from paceline.elastic.machine import hash_votes
from paceline.elastic.machine.actions import RecordVerdict
from paceline.elastic.machine.hang_detection import phase_of
from paceline.elastic.machine.hash_votes import Dispute, VoteResult
from paceline.elastic.machine.job_end import end_with_verdict
from paceline.elastic.machine.shard_assignment import ShardAssignment
from paceline.elastic.machine.slots import lose
from paceline.elastic.machine.state import IN_VIEW, JobState, Worker, in_view, rank_names

DISPUTES_BEFORE_THE_END = 3
"""Disputes in a row that end the job: computing the steps again has not helped."""

REPORT = "report"
"""The kind of the digests in reports."""

WHOLE = ("", "saved", "end")
"""Kinds of hashes that are of the whole state: audited steps, checkpoints, the end."""


def require_restore(job: JobState, step: int) -> None:
    """Make the next view restore a checkpoint: nothing computed since the last agreed step can be trusted."""
    job.restore = True
    job.restore_before = job.agreed_step
    job.tainted_until = max(
        job.tainted_until, step, job.max_progress[0] if job.max_progress is not None else 0
    )


def members_differ(job: JobState, step: int, agreed: int) -> None:
    """Note that members saw a difference between themselves after a step. No state from after the last agreed
    step is handed on, even if no member can be named, or one is lost before it has voted."""
    job.agreed_step = max(job.agreed_step, agreed)
    require_restore(job, step)


def judge_open(job: JobState) -> tuple[str, list[Worker], bool]:
    """Judge the steps that all remaining members have voted on; return the finding, the expelled members, and
    whether all go back. The caller changes the view."""

    def complete(cast: Mapping[int, str]) -> bool:
        # Mostly one of the first has not voted, so that the others are not looked at.
        return all(number in cast for number, worker in job.workers.items() if worker.status in IN_VIEW)

    if not any(map(complete, job.votes.values())):
        return "not all have voted", [], False
    voters = [worker.number for worker in in_view(job)]
    found = hash_votes.judge(job.votes, voters, job.lineage)
    if found is None:
        return "not all have voted", [], False
    return _follow(job, found)


def judge_reports(job: JobState, reports: Mapping[int, MemberReport]) -> tuple[str, list[Worker]]:
    """Judge, before a view is made, what the reports say of the newest step: the source of the state must
    hold what independent members hold, or all go back."""
    said, expelled = _judge_reports(job, reports)
    if job.dispute is not None and job.restore and not job.dispute.trails:
        # Now, before the members go back: they forget what they put into the steps that they do again.
        job.dispute = replace(job.dispute, trails={number: one.trail for number, one in reports.items()})
        job.trails = {}
    return said, expelled


def assignment_of_dispute(job: JobState, order: list[Worker]) -> ShardAssignment | None:
    """Return the assignment of a disputed step, so that each member computes the same shards again:
    contributions are compared by shard. None: no dispute is open, or the members are others."""
    dispute = job.dispute
    if dispute is None or not job.restore or len(order) != len(dispute.assignment):
        return None
    return None if any(worker.leave_reason for worker in order) else dispute.assignment


def note_lineage(job: JobState, plan: ViewPlan, reports: Mapping[int, MemberReport]) -> None:
    """Count the source and the members that take its state over as one vote, until an independent member has
    confirmed that state: a copy says nothing that its original has not said."""
    if plan.restore:
        job.lineage = {}
    if plan.source < 0:
        return
    source = plan.members[plan.source]
    root, given = job.lineage.get(source, source), reports[source]
    same = [number for number, report in reports.items() if report.digest and report.digest == given.digest]
    if len({job.lineage.get(number, number) for number in same}) < 2:
        for index in plan.stale_indexes:
            job.lineage[plan.members[index]] = root


def _judge_reports(job: JobState, reports: Mapping[int, MemberReport]) -> tuple[str, list[Worker]]:
    # Members agree on steps by themselves, between audits. After a restore was decided, what they agreed on
    # before is what is in doubt.
    for report in reports.values():
        if report.agreed >= 0 and not job.restore:
            job.agreed_step = max(job.agreed_step, report.agreed)
    # Proof before votes: a member that saw its own memory change is at fault, whatever the others hold.
    if any(report.memory_changed for report in reports.values()):
        return _expel_spoiled(job, reports)
    # Then votes that were cast before the view ended: a report of the same difference says nothing new.
    before = job.dispute
    said, expelled, _ = judge_open(job)
    if job.ended is not None or expelled or job.dispute is not before:
        return said, expelled
    # Last the states as they are now. Only members at the newest step can be compared, and one of them is
    # going to be the source of the others' state.
    steps = [report.progress[0] for report in reports.values() if report.progress is not None]
    cast = {
        number: report.digest
        for number, report in reports.items()
        if report.digest and report.progress is not None and report.progress[0] == max(steps)
    }
    if len(cast) < 2:
        return (_doubt(job, cast, reports) or said), []
    found = hash_votes.judged((max(steps), REPORT), cast, job.lineage)
    if not found.tie and not found.dissenters:
        if found.witnesses > 1:
            # Two independent members hold it, so each of these counts as a witness of its own again.
            job.lineage = {number: root for number, root in job.lineage.items() if number not in cast}
        return said, []
    said, expelled, _ = _follow(job, found)
    return said, expelled


def _doubt(job: JobState, cast: Mapping[int, str], reports: Mapping[int, MemberReport]) -> str | None:
    """Doubt the only holder of the newest state if members that are gone had held another one: which is right
    is not known."""
    for number in cast:
        if reports[number].peers_differed and number in job.workers and not job.restore:
            step = (reports[number].progress or (0,))[0]
            require_restore(job, step)
            slot = job.workers[number].slot
            lost = f"members that were lost had other weights after step {step}"
            return f"only rank {slot} is left, and {lost}"
    return None


def _expel_spoiled(job: JobState, reports: Mapping[int, MemberReport]) -> tuple[str, list[Worker]]:
    """Expel members that found their own memory changed. That needs no other member's vote."""
    spoiled = {number: report for number, report in reports.items() if report.memory_changed}
    steps = [report.progress[0] for report in spoiled.values() if report.progress is not None]
    step = max(steps, default=job.agreed_step)
    require_restore(job, step)
    what = f"has other weights in its memory than its last update, that of step {step}, had left there"
    done = f"it was killed; the run goes back to at most step {job.agreed_step}, the last that all agreed on"
    expelled = _expel(job, spoiled, what, done)
    job.votes, job.dispute = {}, None
    return f"the memory of {rank_names(expelled)} has changed", expelled


def _follow(job: JobState, found: VoteResult) -> tuple[str, list[Worker], bool]:
    if found.tie:
        return _disputed(job, found)
    if not found.dissenters:
        return _agreed(job, found)
    require_restore(job, found.step)
    what = f"has other weights than the others after step {found.step}"
    done = f"it was killed; the others go back to at most step {job.agreed_step}, the last they agreed on"
    expelled = _expel(job, found.dissenters, what, done)
    job.votes, job.dispute = {}, None
    return f"{counted(len(found.dissenters), 'member')} dissented after step {found.step}", expelled, True


def _disputed(job: JobState, found: VoteResult) -> tuple[str, list[Worker], bool]:
    slots = [job.workers[number].slot for number in found.cast if number in job.workers]
    what = f"after step {found.step} {ranks(slots)} differ, and no majority says which rank is right"
    if job.dispute is not None and job.agreed_step > job.dispute.step:
        job.dispute, job.dispute_count = None, 0  # that step has been agreed on since
    # Votes and the reports that follow them show one difference, which counts once. Trails come with reports.
    if job.dispute is None or job.dispute.trails:
        job.dispute_count += 1
    if job.dispute_count >= DISPUTES_BEFORE_THE_END:
        one = job.workers[min(worker.number for worker in in_view(job))]
        again = f"{what}, not for the first time: computing it again does not help"
        return end_with_verdict(job, one, again), [], False
    require_restore(job, found.step)
    assignment = job.view.shards if job.view is not None else ()
    job.dispute = Dispute(found.hash_key, dict(found.cast), assignment=assignment)
    job.votes = {}
    return f"{what}: all go back to at most step {job.agreed_step} and compute it again", [], True


def _agreed(job: JobState, found: VoteResult) -> tuple[str, list[Worker], bool]:
    """Note a step that all members agree on. Of a disputed step, this is the right result."""
    if found.hash_key[1] in WHOLE:
        job.agreed_step = max(job.agreed_step, found.step)
    job.votes = {hash_key: cast for hash_key, cast in job.votes.items() if hash_key > found.hash_key}
    if found.witnesses > 1:
        job.lineage = {}
    said = f"all agree after step {found.step}"
    dispute = job.dispute
    if dispute is None or dispute.hash_key != found.hash_key:
        return said, [], False
    again, job.trails = job.trails, {}
    job.dispute, job.dispute_count = None, 0
    wrong = tuple(number for number, digest in dispute.cast.items() if digest != found.digest)
    what = f"had other weights after step {found.step} than came out when it was computed again"
    if found.digest not in dispute.cast.values():
        step, wrong = hash_votes.first_to_differ(dispute.trails, again.values(), dispute.cast)
        what = f"was the first to compute something else, in step {step}, than came out the second time"
        if not wrong:
            return f"{said}, and none of them had been right before", [], False
    expelled = _expel(job, wrong, what, "it was killed; the others continue from where they are")
    return f"{said}; the ranks that differed are known now", expelled, False


def _expel(job: JobState, numbers: Iterable[int], what: str, done: str) -> list[Worker]:
    expelled = []
    for number in sorted(numbers):
        worker = job.workers.get(number)
        if worker is None:
            continue
        text = f"rank {worker.slot} {what}"
        phase = phase_of(job, worker)
        job.actions.append(RecordVerdict(number, worker.slot, phase, text, "", done, kind="dissent"))
        lose(job, worker, "dissent", text, kill=text)
        expelled.append(worker)
    return expelled
