"""What follows from the hashes of a step: dissenters are expelled, and all go back to a state from before the
last step that all agreed on, because a dissenter's gradients are in the weights of all.

    doubted          who is the only one left and had something else than those who are gone hands nothing on:
                     all go back
    spoiled          who found that its own memory has changed is named and expelled
    a majority       who differs from it is named and expelled
    no majority      none is expelled yet: all go back and compute the step again, and what comes out says
                     who was right
    computed again   who had said something else is named and expelled; the others go on from where they are.
                     Where all had, because the wrong gradients had reached all of them: who was the first to
                     put something else into a step (trails.py)

Must not know how views are made.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from paceline.elastic import audit_votes, trails
from paceline.elastic.audit_votes import Judgement
from paceline.elastic.deadlines import phase_of
from paceline.elastic.dealing import Deal
from paceline.elastic.ending import end_with_verdict
from paceline.elastic.model import Action, Hashed, NoteVerdict, Reported
from paceline.elastic.seats import lose
from paceline.elastic.state import IN_VIEW, State, Worker, in_view, ranks
from paceline.elastic.trails import Dispute

DISPUTES_BEFORE_THE_END = 3
"""So often in a row members may differ without a majority; computing again does not help then."""

REPORT = "report"
"""The kind of the digests in reports."""

WHOLE = ("", "saved", "end")
"""Kinds of hashes that are of the whole state: audited steps, checkpoints, the end."""


def go_back(job: State, step: int) -> None:
    """What was computed since the last agreed step is not to be trusted: the next view restores."""
    job.restore = True
    job.restore_before = job.agreed
    job.tainted = max(job.tainted, step, job.furthest[0] if job.furthest is not None else 0)


def doubted(job: State, event: Hashed) -> None:
    """The members saw by themselves that they differ. Whether any of them can be named or not, and whichever
    is lost before it has voted: no state from after the last agreed step may be handed on."""
    job.agreed = max(job.agreed, event.agreed)
    go_back(job, event.step)


def judge_open(job: State, now: float, out: list[Action]) -> tuple[str, list[Worker], bool]:
    """Judge what all who are left have voted on: what was found, who was expelled, and whether all go back.
    The caller mends the view."""
    if not any(_all_are_in(job, cast) for cast in job.votes.values()):
        return "not all have voted", [], False
    voters = [worker.number for worker in in_view(job)]
    found = audit_votes.judge(job.votes, voters, job.lineage)
    if found is None:
        return "not all have voted", [], False
    return _follow(job, found, now, out)


def judge_reports(
    job: State, told: Mapping[int, Reported], now: float, out: list[Action]
) -> tuple[str, list[Worker]]:
    """Judge, before a view is made, what the members' reports say of the step that the furthest have come to:
    a member that hands its state on holds what independent members hold, or all go back."""
    said, expelled = _judge_reports(job, told, now, out)
    if job.dispute is not None and job.restore and not job.dispute.trails:
        # Now, before the members go back: they forget what they put into the steps that they do again.
        job.dispute = replace(job.dispute, trails={number: one.trail for number, one in told.items()})
        job.trails = {}
    return said, expelled


def deal_of_dispute(job: State, order: list[Worker]) -> Deal | None:
    """Who goes back to compute a disputed step again computes the same shards as before: what a member puts
    into a step is compared by shards. None: there is no dispute, or the members are others."""
    dispute = job.dispute
    if dispute is None or not job.restore or len(order) != len(dispute.deal):
        return None
    return None if any(worker.leaves for worker in order) else dispute.deal


def _judge_reports(
    job: State, told: Mapping[int, Reported], now: float, out: list[Action]
) -> tuple[str, list[Worker]]:
    for report in told.values():
        if report.agreed >= 0 and not job.restore:
            job.agreed = max(job.agreed, report.agreed)
    if any(report.spoiled for report in told.values()):
        return _expel_spoiled(job, told, now, out)
    before = job.dispute
    said, expelled, _ = judge_open(job, now, out)
    if job.ended is not None or expelled or job.dispute is not before:
        return said, expelled
    steps = [report.progress[0] for report in told.values() if report.progress is not None]
    cast = {
        number: report.digest
        for number, report in told.items()
        if report.digest and report.progress is not None and report.progress[0] == max(steps)
    }
    if len(cast) < 2:
        return (_doubt(job, cast, told) or said), []
    found = audit_votes.judged((max(steps), REPORT), cast, job.lineage)
    if not found.tie and not found.dissenters:
        if found.witnesses > 1:
            job.lineage = {number: root for number, root in job.lineage.items() if number not in cast}
        return said, []
    said, expelled, _ = _follow(job, found, now, out)
    return said, expelled


def _doubt(job: State, cast: Mapping[int, str], told: Mapping[int, Reported]) -> str | None:
    """Only one has the newest state. Others who had it are gone, and some of them had another one: which is
    right is not known."""
    for number in cast:
        if told[number].doubted and number in job.workers and not job.restore:
            step = (told[number].progress or (0,))[0]
            go_back(job, step)
            slot = job.workers[number].slot
            return f"only rank {slot} is left, and who is gone had other weights after step {step}"
    return None


def _expel_spoiled(
    job: State, told: Mapping[int, Reported], now: float, out: list[Action]
) -> tuple[str, list[Worker]]:
    """Members that found that their own memory has changed. None of the others needs to be there to tell."""
    spoiled = {number: report for number, report in told.items() if report.spoiled}
    step = max(report.progress[0] for report in spoiled.values() if report.progress is not None)
    go_back(job, step)
    what = f"has other weights in its memory than its last update, that of step {step}, had left there"
    done = f"it was killed; the run goes back to at most step {job.agreed}, the last that all agreed on"
    expelled = _expel(job, spoiled, what, done, now, out)
    job.votes, job.dispute = {}, None
    return f"the memory of {ranks([worker.slot for worker in expelled])} has changed", expelled


def _follow(job: State, found: Judgement, now: float, out: list[Action]) -> tuple[str, list[Worker], bool]:
    if found.tie:
        return _disputed(job, found, out)
    if not found.dissenters:
        return _agreed(job, found, now, out)
    go_back(job, found.step)
    what = f"has other weights than the others after step {found.step}"
    done = f"it was killed; the others go back to at most step {job.agreed}, the last they agreed on"
    expelled = _expel(job, found.dissenters, what, done, now, out)
    job.votes, job.dispute = {}, None
    return f"{len(found.dissenters)} dissented after step {found.step}", expelled, True


def _disputed(job: State, found: Judgement, out: list[Action]) -> tuple[str, list[Worker], bool]:
    slots = [job.workers[number].slot for number in found.cast if number in job.workers]
    what = f"after step {found.step} {ranks(slots)} differ, and no majority says who is right"
    if job.dispute is not None and job.agreed > job.dispute.step:
        job.disputes = 0  # what was disputed then is long agreed on
    job.disputes += 1
    if job.disputes >= DISPUTES_BEFORE_THE_END:
        one = job.workers[min(worker.number for worker in in_view(job))]
        again = f"{what}, not for the first time: computing it again does not help"
        return end_with_verdict(job, one, again, out), [], False
    go_back(job, found.step)
    deal = job.view.shards if job.view is not None else ()
    job.dispute = Dispute(found.ballot, dict(found.cast), deal=deal)
    job.votes = {}
    return f"{what}: all go back to at most step {job.agreed} and compute it again", [], True


def _agreed(job: State, found: Judgement, now: float, out: list[Action]) -> tuple[str, list[Worker], bool]:
    """All said the same. Where it is a step that was disputed, this is what is right."""
    if found.ballot[1] in WHOLE:
        job.agreed = max(job.agreed, found.step)
    job.votes = {ballot: cast for ballot, cast in job.votes.items() if ballot > found.ballot}
    if found.witnesses > 1:
        job.lineage = {}
    said = f"all agree after step {found.step}"
    dispute = job.dispute
    if dispute is None or dispute.ballot != found.ballot:
        return said, [], False
    again, job.trails = job.trails, {}
    job.dispute, job.disputes = None, 0
    wrong = tuple(number for number, digest in dispute.cast.items() if digest != found.digest)
    what = f"had other weights after step {found.step} than came out when it was computed again"
    if found.digest not in dispute.cast.values():
        step, wrong = trails.first_to_differ(dispute.trails, again.values(), dispute.cast)
        what = f"was the first to compute something else, in step {step}, than came out the second time"
        if not wrong:
            return f"{said}, and none of them had been right before", [], False
    expelled = _expel(job, wrong, what, "it was killed; the others go on from where they are", now, out)
    return f"{said}; who differed is known now", expelled, False


def _expel(
    job: State, numbers: Iterable[int], what: str, done: str, now: float, out: list[Action]
) -> list[Worker]:
    expelled = []
    for number in sorted(numbers):
        worker = job.workers.get(number)
        if worker is None:
            continue
        text = f"rank {worker.slot} {what}"
        out.append(NoteVerdict(number, worker.slot, phase_of(job, worker), text, "nothing", done))
        lose(job, worker, "dissent", text, now, out, kill=text)
        expelled.append(worker)
    return expelled


def _all_are_in(job: State, cast: Mapping[int, str]) -> bool:
    """Whether all in the view have voted; mostly one of the first has not."""
    return all(number in cast for number, worker in job.workers.items() if worker.standing in IN_VIEW)
