"""What follows from the hashes of audited steps: dissenters are expelled, and everybody goes back to a state
from before the last step that all agreed on, because a dissenter's gradients are in everybody's weights.

Must not know how views are made.
"""

from __future__ import annotations

from collections.abc import Mapping

from paceline.elastic import audit_votes
from paceline.elastic.deadlines import phase_of
from paceline.elastic.ending import end_with_verdict
from paceline.elastic.model import Action, NoteVerdict
from paceline.elastic.seats import lose
from paceline.elastic.state import IN_VIEW, State, Worker, in_view


def judge_open(job: State, now: float, out: list[Action]) -> tuple[str, list[Worker], bool]:
    """Judge what all who are left have voted on: what was found, who was expelled, and whether everybody goes
    back. The caller mends the view."""
    if not any(_all_are_in(job, cast) for cast in job.votes.values()):
        return "not all have voted", [], False
    voters = [worker.number for worker in in_view(job)]
    judged = audit_votes.judge(job.votes, voters)
    if judged is None:
        return "not all have voted", [], False
    if judged.tie:
        one = job.workers[min(voters)]
        what = f"after step {judged.step} the replicas differ, and no majority says who is right"
        return end_with_verdict(job, one, what, out), [], False
    if not judged.dissenters:
        job.agreed = max(job.agreed, judged.step)
        job.votes = {step: cast for step, cast in job.votes.items() if step > judged.step}
        return f"all agree after step {judged.step}", [], False
    expelled = []
    seen = max(judged.step, job.furthest[0] if job.furthest is not None else 0)
    for number in judged.dissenters:
        worker = job.workers.get(number)
        if worker is None:
            continue
        what = f"rank {worker.slot} has other weights than the others after step {judged.step}"
        done = f"it was killed; the others go back to at most step {job.agreed}, the last they agreed on"
        out.append(NoteVerdict(number, worker.slot, phase_of(job, worker), what, "nothing", done))
        lose(job, worker, "dissent", what, now, out, kill=what)
        expelled.append(worker)
    job.restore = True
    job.restore_before = job.agreed
    job.tainted = max(job.tainted, seen)
    job.votes = {}
    return f"{len(judged.dissenters)} dissented after step {judged.step}", expelled, True


def _all_are_in(job: State, cast: Mapping[int, str]) -> bool:
    """Whether everybody in the view has voted; mostly one of the first has not."""
    return all(number in cast for number, worker in job.workers.items() if worker.standing in IN_VIEW)
