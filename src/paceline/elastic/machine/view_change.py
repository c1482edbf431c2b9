"""View change: stop the members, gather their reports, decide the next view, install it.

    begin -> (all reported) -> decide -> propose -> (all installed) -> start_running
    on_loss: repeat whichever of these a loss has undone

Every attempt has its own generation. A member answers for one generation only, so that an answer to an
abandoned attempt cannot be mistaken for one to the attempt that replaced it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from math import inf

from paceline.control.messages import MemberReport, Prepare, Stop, ViewPlan
from paceline.core.wording import counted
from paceline.elastic.machine import admission, link_probes, replica_divergence, stragglers
from paceline.elastic.machine.actions import InstallView, RecordRepair, Send, dismiss
from paceline.elastic.machine.hang_detection import forming_since, hang_limit
from paceline.elastic.machine.job_end import all_done, end, end_if_hopeless, finish
from paceline.elastic.machine.slots import depart, forget
from paceline.elastic.machine.state import (
    IN_VIEW,
    NOT_IN_VIEW,
    JobPhase,
    JobState,
    Worker,
    WorkerStatus,
    in_view,
    rank_names,
    ready,
)


def on_loss(job: JobState, lost: list[Worker], why: str) -> str:
    """Make the next move after workers were lost; they are forgotten already."""
    if not lost:
        return why
    over = None if job.stop_reason is not None else end_if_hopeless(job, lost[-1], why)
    if over is not None:
        return over
    if all_done(job):
        return finish(job)
    broken = any(worker.status in IN_VIEW for worker in lost)
    if broken and job.phase is not JobPhase.RETURNING:
        # A vote that waited for a lost member is complete now.
        judged, expelled, _ = replica_divergence.judge_open(job)
        if job.ended is not None:
            return judged
        if expelled:
            return on_loss(job, [*lost, *expelled], f"{why}; {judged}")
    match job.phase:
        case JobPhase.STARTING:
            return try_start(job, why)
        case JobPhase.RETURNING:
            return resume_after_restart(job, why)
        case JobPhase.PREPARING if job.abort or not broken:
            # Members that reported stay stopped: what they reported is still true.
            return proceed(job, why)
        case _ if broken:
            # Also a pause becomes an abort: the members may wait for the lost one in a collective, and would
            # never come to the step boundary that the pause asks for.
            return begin(job, True, why)
    return why


def begin(job: JobState, abort: bool, why: str) -> str:
    """Ask all members, and the workers that can be admitted, to stop and report, in a new generation."""
    if all_done(job):
        return finish(job)
    if not in_view(job):
        return restart_from_checkpoint(job, why)
    newcomers = {worker.number for worker in admission.admitted(job)}
    asked = []
    for worker in job.workers.values():
        if worker.status in NOT_IN_VIEW and worker.number not in newcomers:
            continue
        asked.append(worker.number)
        if worker.status is WorkerStatus.DONE:
            # It has nothing more to do, but others may need its state.
            job.workers[worker.number] = _undone(worker)
    job.generation += 1
    job.phase = JobPhase.PREPARING
    job.abort = abort
    job.reason = why
    job.asked_at = job.now
    job.pending = frozenset(asked)
    job.reports = {}
    job.gather_until = inf
    job.tick_by(job.now + hang_limit(job))
    prepare = Prepare(generation=job.generation, abort=abort, reason=why)
    job.actions.append(Send(tuple(sorted(asked)), prepare))
    when = "at once" if abort else "after the next step"
    return f"{why}: {counted(len(asked), 'worker', 'stops', 'stop')} {when} for generation {job.generation}"


def _undone(worker: Worker) -> Worker:
    return replace(worker, status=WorkerStatus.LEAVING if worker.leave_reason else WorkerStatus.MEMBER)


def proceed(job: JobState, why: str) -> str:
    """Decide the next view if no report, and no answer to a link probe, is missing now."""
    if not in_view(job):
        return restart_from_checkpoint(job, why)
    if not job.pending and link_probes.is_open(job):
        return f"{why}; members of different hosts dial each other"
    if not job.pending:
        gone = link_probes.judge(job)
        return on_loss(job, gone, why) if gone else decide(job, why)
    if not job.abort and all(job.workers[n].status is WorkerStatus.DONE for n in job.pending):
        # A pause is for the next step boundary, and the rest is past the last one: only an abort brings a
        # finished member to report.
        return begin(job, True, f"{why}; some are at the end and some have stopped before it")
    return f"{why}; {counted(len(job.pending), 'report')} missing"


def on_link_probe(job: JobState, why: str) -> str:
    """Continue after an answer to a link probe, or after its deadline."""
    if job.phase is JobPhase.PREPARING:
        return proceed(job, why)
    return on_loss(job, link_probes.judge(job), why)


def decide(job: JobState, why: str) -> str:
    """Choose the members of the next view from the reports, all of which are here."""
    restored_before, disputes_before = job.restore, job.dispute_count
    # Replicas first: a state that differs from its peers must not be transferred to anyone.
    judged, expelled = replica_divergence.judge_reports(job, job.reports)
    if job.ended is not None:
        return judged
    if expelled:
        over = None if job.stop_reason is not None else end_if_hopeless(job, expelled[-1], judged)
        return over if over is not None else proceed(job, f"{why}; {judged}")
    reports = job.reports
    reporters = [job.workers[number] for number in reports]
    if job.saves_alone:
        return _save_alone(job, reporters, why)
    staying = [worker for worker in reporters if not worker.leave_reason]
    any_state = any(report.progress is not None for report in reports.values())
    if not staying or (any_state and all(reports[w.number].progress is None for w in staying)):
        # The members that leave have the only state there is: they stay for one view, to transfer it.
        staying = reporters
    # Where the reports were what sends all back; else the members know the reason since they were asked.
    news = job.restore and (job.dispute_count != disputes_before or not restored_before)
    reason = judged if news else job.reason
    if missing_private_state(job.settings.shards, [reports[worker.number] for worker in staying]):
        # The same for state that only the computing member has: a member that leaves stays for one view
        # without new shards, and goes when the others have taken over its private state.
        staying = reporters
        lost = missing_private_state(job.settings.shards, list(reports.values()))
        if lost and any_state:
            # Not even those that leave have it. No view could continue from here: a checkpoint has all of it.
            job.restore = True
            reason = f"{reason}; {name_residuals(lost)}, so all go back to a checkpoint"
            staying = [worker for worker in reporters if not worker.leave_reason] or reporters
    numbers = {worker.number for worker in staying}
    for worker in reporters:
        if worker.number not in numbers:
            depart(job, worker)
    return propose(job, staying, reports, reason)


def missing_private_state(shards: int, reports: Collection[MemberReport]) -> tuple[int, ...]:
    """Return the shards whose private state (compression residuals), as of the most advanced member, is lost.

    Private state is held by one member only. A view can continue from its most advanced member if some has
    the private state of each shard as of that step; members exchange it when the view opens. Else all go back
    to a checkpoint, which has all of it. Empty where the run has no private state, or no member any state.
    """
    known = [report.progress for report in reports if report.progress is not None]
    if not known or not any(report.has_private_state for report in reports):
        return ()
    moment = max(known)[0]
    there = {
        shard
        for report in reports
        for step, owned in report.private_shards
        if step == moment and report.progress is not None
        for shard in owned
    }
    return tuple(shard for shard in range(shards) if shard not in there)


def name_residuals(lost: Sequence[int]) -> str:
    """Say which residuals are lost; of many shards the first six are named."""
    if len(lost) == 1:
        return f"the compression residual of shard {lost[0]} is lost"
    names = ", ".join(map(str, lost[:6])) + (" and others" if len(lost) > 6 else "")
    return f"the compression residuals of shards {names} are lost"


def propose(job: JobState, staying: list[Worker], reports: Mapping[int, MemberReport], why: str) -> str:
    """Assign the shards, name the source of the state, and send the view.

    State comes from one member with the largest progress. No member commits a step without a contribution of
    every member, so that members of one view are at most one step apart, and the state that is ahead is the
    one that the others were about to come to. Without any state all restore.
    """
    # By slot, so that every supervisor makes the same view of the same members.
    order = sorted(staying, key=lambda worker: (worker.slot, worker.number))
    progress = [reports[w.number].progress if w.number in reports else None for w in order]
    known = [far for far in progress if far is not None]
    newest = max(known, default=None)
    # `job.restore` outranks any progress: what the members hold was found to be wrong, or lacks state.
    restore = job.restore or newest is None
    if job.fatal_failure is not None and restore:
        return end(job, ok=False, reason=f"{why}: no member has a state that could be saved")
    if restore and job.tainted_until >= 0:
        # Members may have saved while the dissent was on its way: no checkpoint up to where any of them is
        # can be trusted, until the run has come past it again.
        job.tainted_until = max([job.tainted_until, *(far[0] for far in known)])
    # A held gradient is of the state that it was computed from. It counts only where its holder is at the
    # newest step: a member that is behind receives another state. After a pause no member holds any, because
    # all of them have just committed.
    held = [
        reports[worker.number].held_shards if job.abort and not restore and far == newest else ()
        for worker, far in zip(order, progress, strict=True)
    ]
    stale = () if restore else tuple(index for index, far in enumerate(progress) if far != newest)
    plan = ViewPlan(
        generation=job.generation,
        members=tuple(worker.number for worker in order),
        slots=tuple(worker.slot for worker in order),
        shards=stragglers.assign(job, order, held),
        source=progress.index(newest) if stale else -1,
        stale_indexes=stale,
        restore=restore,
        restore_before=job.restore_before if restore else -1,
        disputed=-1 if job.dispute is None else job.dispute.step,
        ends=job.fatal_failure[1] if job.fatal_failure is not None else "",
    )
    replica_divergence.note_lineage(job, plan, reports)
    # From here on these are the members, before any of them has the view: one that is lost while it installs
    # must break the view, and a DONE one computes again with the others.
    for worker in order:
        if worker.status is WorkerStatus.READY:
            job.workers[worker.number] = replace(
                worker, status=WorkerStatus.MEMBER, since=job.now, productive_before=job.productive_seconds
            )
        elif worker.status is WorkerStatus.DONE:
            job.workers[worker.number] = _undone(worker)
    # A report says where a member was before this view, so that none of them may decide the next one.
    job.phase = JobPhase.INSTALLING
    job.view, job.base_progress = plan, None
    job.pending = frozenset(plan.members)
    job.reports = {}
    job.asked_at = job.assigned_at = job.now
    # Hashes of steps that are computed again say nothing about the second time.
    job.votes = {} if restore else job.votes
    job.tick_by(job.now + hang_limit(job))
    job.actions.append(InstallView(plan, why))
    start = "from the newest good checkpoint" if restore else "from the largest progress"
    return f"{why}: generation {job.generation} is {rank_names(order)}, {start}"


def start_running(job: JobState) -> str:
    """Let the job run once all members have installed the view, or stop it where that was asked for
    meanwhile."""
    job.phase = JobPhase.RUNNING
    job.progressed_at = job.productive_at = job.now
    job.max_progress = None
    job.restore = job.abort = False
    if job.tainted_until < 0:
        job.restore_before = -1
    if job.failed_at is not None:
        job.actions.append(
            RecordRepair(job.generation, job.now - job.failed_at, tuple(sorted(set(job.lost_slots))))
        )
    job.failed_at = None
    job.lost_slots = ()
    why = f"all members are in generation {job.generation}"
    if job.stop_reason is not None:
        request_stop(job)
        return f"{why}, and are asked to stop: {job.stop_reason}"
    admission.dial(job)
    return try_change(job, why)


def request_stop(job: JobState) -> None:
    """Ask the members to save and end. The view of a job that failed needs no request: it takes no step."""
    job.phase = JobPhase.STOPPING
    if job.fatal_failure is None:
        members = tuple(sorted(worker.number for worker in in_view(job)))
        job.actions.append(Send(members, Stop(reason=job.stop_reason or "")))


def try_change(job: JobState, why: str) -> str:
    """Start the job, or change the view, if what has just happened completes what that waits for."""
    if job.phase is JobPhase.STARTING:
        return try_start(job, why)
    change = admit_and_release(job)
    return f"{why}; {change}" if change else why


def admit_and_release(job: JobState) -> str | None:
    """Change the view of a running job at a step boundary, for workers that are ready and members that leave;
    None: there are none."""
    if job.phase is not JobPhase.RUNNING:
        return None
    members = in_view(job)
    if any(worker.status is WorkerStatus.DONE for worker in members):
        return None
    joiners = admission.admitted(job)
    leaving = [worker for worker in members if worker.status is WorkerStatus.LEAVING]
    if leaving and len(leaving) == len(members) and not joiners:
        starting = any(worker.status in NOT_IN_VIEW for worker in job.workers.values())
        if not starting and not any(slot.usable and slot.start_at is not None for slot in job.slots.values()):
            job.stop_reason = "all workers were asked to go"
            job.stop_requested_at = job.now
            request_stop(job)
            return job.stop_reason
        return f"{rank_names(leaving)} can leave when another worker has taken over"
    # A slow member stays until its replacement is here, unless it has handed its shards over already.
    urgent = [
        worker for worker in leaving if worker.leave_reason != "straggler" or not _computes(job, worker)
    ]
    if urgent or (leaving and joiners):
        return begin(job, False, rank_names(leaving, "leaves", "leave"))
    if joiners:
        if job.now < _gathered(job):
            job.tick_by(job.gather_until)
            return f"{rank_names(joiners, 'waits', 'wait')} for others that were started too"
        return begin(job, False, rank_names(joiners, "joins", "join"))
    return None


def _computes(job: JobState, worker: Worker) -> bool:
    """Return whether the member has shards in this view; after a restart the assignment may not be known."""
    view = job.view
    if view is None or not view.shards:
        return True
    return bool(view.shards[view.members.index(worker.number)])


def _gathered(job: JobState) -> float:
    """Return until when joiners wait: a moment, where others were started lately and have not come."""
    if job.gather_until == inf:
        come = {worker.number for worker in admission.admitted(job)}
        lately = any(
            worker.status in NOT_IN_VIEW
            and worker.number not in come
            and job.now - worker.since < 4 * job.settings.gather_seconds
            for worker in job.workers.values()
        )
        job.gather_until = job.now + job.settings.gather_seconds if lately else job.now
    return job.gather_until


def restart_from_checkpoint(job: JobState, why: str) -> str:
    """Wait for workers and then restore, because no member of the view is left."""
    if job.stop_reason is not None:
        return end(job, ok=False, reason=f"all workers were lost while the job was stopping: {why}")
    job.phase = JobPhase.STARTING
    job.view = None
    job.pending = frozenset()
    job.reports = {}
    job.max_progress = None
    job.abort = False
    job.gather_until = inf
    job.started_at = job.now
    job.tick_by(job.now + job.settings.start_seconds)
    return try_start(job, f"{why}; no member is left, so workers start from a checkpoint")


def try_start(job: JobState, why: str) -> str:
    """Send the first view when all workers are here, or when waiting longer cannot help."""
    here = admission.admitted(job)
    soon = job.now + job.settings.silence_least
    missing = sum(worker.status is WorkerStatus.STARTING for worker in job.workers.values()) + sum(
        slot.start_at is not None and slot.start_at <= soon and slot.usable for slot in job.slots.values()
    )
    missing += len(ready(job)) - len(here)
    # Agents that have not come; without a deadline of their own they would hold up those that have.
    missing += max(0, job.settings.workers - len(job.slots)) if job.settings.agent_workers else 0
    enough = len(here) >= max(1, job.settings.min_workers)
    if enough and (missing == 0 or job.now - job.started_at >= job.settings.start_seconds):
        job.generation += 1
        return propose(job, here, {}, why)
    return f"{why}; {counted(len(here), 'worker', 'is', 'are')} ready, {missing} missing"


def too_slow_to_form(job: JobState) -> str | None:
    """Return why a view that has not formed is given up: the job stops, or a member leaves, and both are
    killed from outside if they take too long. None: there is no hurry."""
    if job.phase is not JobPhase.INSTALLING or job.now - forming_since(job) < job.settings.cut_short_seconds:
        return None
    late = f"generation {job.generation} has not formed in {job.settings.cut_short_seconds:g} s"
    if job.stop_reason is not None:
        return f"{late}, and the job is stopping"
    view, members = job.view, in_view(job)
    source = view.members[view.source] if view is not None and view.source >= 0 else None
    leaving = [worker for worker in members if worker.leave_reason == "preempted"]
    if not leaving or len(leaving) == len(members) or any(worker.number == source for worker in leaving):
        return None  # a member with the only state transfers it first
    return f"{late}, and {rank_names(leaving, 'leaves', 'leave')}"


def cut_short(job: JobState, why: str) -> str:
    """Form another view instead: without the members that leave; or, while the job stops, of one member,
    which can save alone for all."""
    if job.stop_reason is None:
        return begin(job, True, why)
    if job.view is not None and job.view.restore:
        # No member has anything that is not in the checkpoint.
        reason = f"{why}; no member has taken a step since the checkpoint"
        return end(job, ok=True, reason=reason, stopped=job.stop_reason)
    job.saves_alone = True
    return begin(job, True, f"{why}: one member saves alone")


def _save_alone(job: JobState, reporters: list[Worker], why: str) -> str:
    reports = job.reports
    known = [worker for worker in reporters if reports[worker.number].progress is not None]
    best = max(known, key=lambda worker: (reports[worker.number].progress, -worker.slot), default=None)
    if best is None or missing_private_state(job.settings.shards, [reports[best.number]]) or job.restore:
        reason = f"{why}; no single member has a state that it could save"
        return end(job, ok=True, reason=reason, stopped=job.stop_reason)
    for worker in reporters:
        if worker is not best:
            job.actions.append(dismiss(worker.number, f"the job is stopping: rank {best.slot} saves for all"))
            forget(job, worker)
            job.slots.pop(worker.slot, None)
    return propose(job, [best], reports, job.reason)


def resume_after_restart(job: JobState, why: str) -> str:
    """Continue in the old view after a restart of the supervisor if all its members are back, else change
    it."""
    members = in_view(job)
    missing = [worker for worker in members if not worker.reconnected]
    if missing:
        return f"{why}; {counted(len(missing), 'member', 'has', 'have')} not come back"
    if all_done(job):
        return finish(job)
    if not members:
        return restart_from_checkpoint(job, why)
    view = job.view
    whole = view is not None and view.generation == job.generation
    whole = whole and view is not None and {worker.number for worker in members} == set(view.members)
    if job.abort or job.restore or not whole:
        return begin(job, True, f"{why}; the view is not whole after the supervisor's restart")
    return f"{why}; {start_running(job)}"
