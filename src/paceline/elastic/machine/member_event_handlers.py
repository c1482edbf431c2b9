"""Handlers of members' messages: hello, dials, heartbeats, reports, failed collectives, exceptions, the end.

Each handler changes the copy of the state it is given, appends actions, and returns the reason. A message of
another generation, or of an unknown member, changes nothing.
"""

from __future__ import annotations

from dataclasses import replace

from paceline.control import messages
from paceline.control.field_types import Progress
from paceline.core.wording import counted
from paceline.elastic.machine import admission, hash_votes, link_probes, replica_divergence, view_change
from paceline.elastic.machine.actions import RecordFailure, RecordVerdict, Send, dismiss
from paceline.elastic.machine.hang_detection import phase_of
from paceline.elastic.machine.job_end import all_done, dismiss_idle, end, finish
from paceline.elastic.machine.liveness import probe_limit
from paceline.elastic.machine.slots import depart, expel, forget, lose, reassign_slot
from paceline.elastic.machine.state import (
    IN_VIEW,
    NOT_IN_VIEW,
    JobPhase,
    JobState,
    Worker,
    WorkerStatus,
    in_view,
)


def on_hello(job: JobState, member: int, hello: messages.MemberHello) -> str:
    """Admit a new worker, or take back a member whose connection was lost."""
    worker = job.workers.get(member)
    if worker is None:
        job.actions.append(dismiss(member, "no such worker is expected"))
        return f"member {member} is not expected: it may end"
    if job.stop_reason is not None and worker.status is WorkerStatus.STARTING:
        job.actions.append(dismiss(member, f"the job is stopping: {job.stop_reason}"))
        forget(job, worker)
        job.slots.pop(worker.slot, None)
        return f"rank {worker.slot} came when the job was stopping: it may end"
    if worker.status is not WorkerStatus.STARTING:
        return _on_reconnect(job, worker, hello)
    job.workers[member] = replace(worker, status=WorkerStatus.READY, since=job.now)
    job.last_message_at[member] = job.now
    job.tick_by(job.now + probe_limit(job))
    admission.dial(job)
    return view_change.try_change(job, f"rank {worker.slot} is ready")


def _on_reconnect(job: JobState, worker: Worker, hello: messages.MemberHello) -> str:
    """Bring a member whose connection was lost to where the job is: repeat what it may have missed.

    The hello names the view the member is in. The machine sends nothing that the member already has: a
    member that is asked twice to prepare answers twice, and the second answer is ignored.
    """
    job.last_message_at[worker.number] = job.now
    why = f"rank {worker.slot} is connected again"
    if job.phase is not JobPhase.RETURNING:
        # A dial request or its answer may have been lost with the connection.
        admission.ask_again(job, worker.number)
        admission.dial(job)
        worker = job.workers[worker.number]
    if job.phase is JobPhase.PREPARING:
        if worker.number not in job.pending:
            return why
        prepare = messages.Prepare(generation=job.generation, abort=job.abort, reason=job.reason)
        job.actions.append(Send((worker.number,), prepare))
        return f"{why} and is asked again"
    if worker.status not in IN_VIEW:
        return why
    if job.phase is JobPhase.RETURNING:
        job.workers[worker.number] = replace(worker, reconnected=True)
        job.tick_by(job.now + probe_limit(job))
        admission.dial(job)
        if job.view is None or hello.generation != job.view.generation:
            # The predecessor's snapshot and this member do not know the same view: nothing but a new view
            # brings them together, and nothing computed in between is lost, because all report first.
            job.abort = True
        # Never lower than what any member has seen: a generation means one view, for ever.
        job.generation = max(job.generation, hello.generation)
        return view_change.resume_after_restart(job, why)
    if hello.generation == 0 and worker.number not in job.pending:
        # Sent before the member was in the view, and overtaken by its installation.
        return f"{why}, an old hello"
    if hello.generation == job.generation:
        if job.phase is JobPhase.INSTALLING:
            # Its ViewInstalled was lost with the connection; the hello says the same.
            installed = messages.ViewInstalled(generation=hello.generation, progress=hello.progress)
            return on_installed(job, worker.number, installed)
        if job.phase is JobPhase.STOPPING and job.fatal_failure is None:
            job.actions.append(Send((worker.number,), messages.Stop(reason=job.stop_reason or "")))
        return why
    # The view was lost on its way: the member is still in the one before, and the others wait for it.
    return view_change.begin(job, True, f"{why} and is in generation {hello.generation}")


def on_dial_result(job: JobState, member: int, result: messages.DialResult) -> str:
    """Note that a worker has reached a peer; refuse the newcomer of a pair that has not."""
    worker, peer = job.workers.get(member), job.workers.get(result.peer)
    if worker is None or peer is None:
        return f"members {member} and {result.peer} met, and one of them is gone"
    why = f"rank {worker.slot} reached rank {peer.slot}"
    if link_probes.is_answer(job, member, result):
        return view_change.on_link_probe(job, result.trouble or why)
    if not result.trouble:
        job.workers[worker.number] = replace(worker, reached=worker.reached | {peer.number})
        return view_change.try_change(job, why)
    if peer.number in worker.reached:
        return f"{why} before, and not this time: {result.trouble}"
    newcomers = [one for one in (worker, peer) if one.status is WorkerStatus.READY]
    if not newcomers:
        return f"{result.trouble}, and both are in the view"
    late = max(newcomers, key=lambda one: one.slot)
    admission.refuse(job, late, result.trouble)
    return view_change.on_loss(job, [late], result.trouble)


def on_heartbeat(job: JobState, member: int, heartbeat: messages.Heartbeat) -> str:
    """Note a sign of life. The most frequent event: it looks at no other worker."""
    worker = job.workers.get(member)
    if worker is None or worker.status is WorkerStatus.STARTING or not worker.reconnected:
        return f"a heartbeat of member {member}, which is not expected"
    job.last_message_at[member] = job.now
    job.heartbeats[member] = heartbeat
    if heartbeat.step_seconds > 0 and not job.committed:
        job.committed = True
    if worker.status in IN_VIEW:
        _note_progress(job, heartbeat.progress)
    return "a member lives"


def _note_progress(job: JobState, progress: Progress | None) -> None:
    """Keep the largest progress of all members."""
    if progress is None or (job.max_progress is not None and progress <= job.max_progress):
        return
    if job.base_progress is not None and progress[0] > job.base_progress[0]:
        # Also with the first report of a view whose members were lost before their second heartbeat.
        job.committed = True
        job.hangs = 0
    if job.max_progress is not None and progress[0] > job.max_progress[0]:
        job.productive_seconds += job.now - job.productive_at
        job.productive_at = job.now
        job.failed_collectives = job.hangs = 0
        job.suspicions = {}
    job.max_progress = progress
    job.progressed_at = job.now


def on_report(job: JobState, member: int, report: messages.MemberReport) -> str:
    """Keep what a stopped member has; with the last report the next view is decided."""
    # Only a report of this very generation says where the member is *now*. One of an earlier request was
    # made before the member continued: the shards it names may since have been summed and thrown away.
    if job.phase is not JobPhase.PREPARING or report.generation != job.generation:
        return f"a report for generation {report.generation} is not wanted"
    if member not in job.pending:
        return f"a report of member {member}, which was not asked or has reported"
    job.last_message_at[member] = job.now
    job.reports[member] = report
    _note_progress(job, report.progress)
    job.pending = job.pending - {member}
    return view_change.proceed(job, f"rank {job.workers[member].slot} reported")


def on_installed(job: JobState, member: int, installed: messages.ViewInstalled) -> str:
    """Note that a member is in the new view; with the last one the job runs."""
    # A late installation of an earlier view says nothing: its sender has yet to be stopped and asked again.
    if job.phase is not JobPhase.INSTALLING or installed.generation != job.generation:
        return f"generation {installed.generation} is not being installed"
    if member not in job.pending:
        return f"member {member} has installed the view before, or is not in it"
    job.last_message_at[member] = job.progressed_at = job.now
    if installed.progress is not None:
        base = job.base_progress
        job.base_progress = installed.progress if base is None else min(base, installed.progress)
        if job.view is not None and job.view.restore:
            # All hold what one checkpoint holds, and it is of a step that all agreed on: a dissent later on
            # goes back to it and not before it, also where this job has compared no step yet.
            job.agreed_step = job.base_progress[0]
    job.pending = job.pending - {member}
    if job.pending:
        return (
            f"{counted(len(job.pending), 'member', 'has', 'have')} not installed generation {job.generation}"
        )
    return view_change.start_running(job)


def on_collective_failed(job: JobState, member: int, failure: messages.CollectiveFailed) -> str:
    """Find out what broke a collective: a lost member, damaged data, or a link.

    Checksums name the member at fault; the rest does not. A member that died breaks the collectives of all
    others, and its death is on its way to the supervisor: so the first failures only lead to a new view,
    without blame. Only when views keep failing with all their members alive the one that was named most has
    to go.
    """
    worker = job.workers.get(member)
    view = job.view
    if worker is None or worker.status not in IN_VIEW or view is None:
        return f"member {member} is in no view whose collective could fail"
    if failure.generation != view.generation:
        return f"generation {failure.generation}, whose collective failed, is over"
    job.last_message_at[member] = job.now
    why = f"a collective failed at rank {worker.slot}: {failure.reason}"
    if job.phase is JobPhase.RETURNING:
        job.abort = True
        return why
    if worker.failed_in == failure.generation:
        # A member whose connection was lost sends it again. It accuses its peers once.
        return f"{why}, as is known"
    job.workers[member] = worker = replace(worker, failed_in=failure.generation)
    # A checksum is proof: every member received the same bytes, so no second report is needed.
    corrupt = _find_corrupt(job, worker, failure)
    if corrupt:
        for bad in corrupt:
            what = f"data of rank {bad.slot} does not match its checksum"
            done = "it was killed and left out; the step is computed again"
            job.actions.append(
                RecordVerdict(
                    bad.number,
                    bad.slot,
                    "collective",
                    what,
                    failure.reason,
                    done,
                    sure=True,
                    kind="corrupt",
                )
            )
            lose(job, bad, "corrupt", what, kill=what, phase="collective")
        return view_change.on_loss(job, corrupt, why)
    # Without an address that was tried, the peers it waited for at last are all there is to suspect. They are
    # counted also where the view is being changed already: each member of a broken view tells its side.
    heartbeat = job.heartbeats.get(member)
    for named in failure.unreachable or (heartbeat.waits_for if heartbeat is not None else ()):
        # One that has reported for a pause left the group because it was asked to. Asked to abort, both ends
        # of a broken link may have reported: each names the other.
        if job.abort or named not in job.reports:
            job.suspicions[member, named] = job.suspicions.get((member, named), 0) + 1
    if job.phase is JobPhase.PREPARING and job.abort:
        return f"{why}; its members are being asked already"
    if job.phase is JobPhase.INSTALLING and job.stop_reason is not None:
        return view_change.cut_short(job, why)
    # In a row: a lost member resets the count (slots.lose), because its death explains the failures.
    job.failed_collectives += 1
    if job.failed_collectives >= link_probes.FAILURES_BEFORE_BLAME:
        found = link_probes.most_suspect(job, worker)
        expel(job, found)
        return view_change.on_loss(job, [found.worker], found.what)
    job.failed_at = job.now if job.failed_at is None else job.failed_at
    link_probes.probe_around(job, worker)
    return view_change.begin(job, True, why)


def _find_corrupt(job: JobState, accuser: Worker, failure: messages.CollectiveFailed) -> list[Worker]:
    accused = [
        job.workers[number]
        for number in sorted(set(failure.accused))
        if number in job.workers and job.workers[number].status in IN_VIEW
    ]
    peers = [worker for worker in accused if worker is not accuser]
    others = sum(worker.status in IN_VIEW for worker in job.workers.values()) - 1
    if len(peers) > 1 and len(peers) == others:
        # If every peer's data looks corrupt to one member, that member is the faulty one.
        return [accuser]
    return accused


def on_exception(job: JobState, member: int, exception: messages.WorkerException) -> str:
    """Replace a worker whose code raised; end the job for a user error, and for the same step twice. Before
    the job ends, the members that hold a good state save it."""
    worker = job.workers.get(member)
    if worker is None:
        if exception.holds:
            job.actions.append(dismiss(member, "it raised, and is not expected"))
        return f"member {member} raised, and was given up before"
    if job.fatal_failure is not None:
        return _save_without(job, worker, exception)
    why = f"rank {worker.slot} raised in step {exception.step}: {exception.summary}"
    final = ""
    if exception.fault == "user" or job.stop_reason is not None:
        # A user's error comes again; and while the job is stopping no worker is left to try again with.
        final = why
    elif exception.step in job.raised_steps:
        final = f"{why}; it is not the first time for this step, so trying again would not help"
    if final:
        return _fail(job, worker, final, exception)
    job.raised_steps = job.raised_steps | {exception.step}
    lose(job, worker, "raised", exception.summary)
    if exception.holds:
        job.actions.append(dismiss(worker.number, "its code raised; another worker takes its place"))
    return view_change.on_loss(job, [worker], why)


def _fail(job: JobState, worker: Worker, why: str, exception: messages.WorkerException) -> str:
    """End the job because of this worker; first the other members save, if there is a state to save."""
    far = exception.progress
    worth = job.committed or (far is not None and far[0] > 0)
    if not job.settings.saves_on_failure or not worth or job.restore:
        job.actions.append(_final_failure(job, worker, exception))
        return end(job, ok=False, reason=why, failed=worker.number)
    job.fatal_failure = worker.number, why
    if job.stop_reason is None:
        job.stop_reason, job.stop_requested_at = why, job.now
    job.tick_by(job.stop_requested_at + job.settings.stop_seconds)
    dismiss_idle(job, why)
    return _save_without(job, worker, exception)


def _save_without(job: JobState, worker: Worker, exception: messages.WorkerException) -> str:
    """Bring all members that hold a state together to save it; this worker only if it does."""
    why = f"rank {worker.slot} raised: {exception.summary}; the members that are left save what they have"
    if exception.holds and worker.status in IN_VIEW:
        job.actions.append(_final_failure(job, worker, exception))
        job.failed_at = job.now if job.failed_at is None else job.failed_at
    else:
        if worker.number in job.workers:
            lose(job, worker, "raised", exception.summary, final=True)
        else:
            # It was in no view and is dismissed already.
            job.actions.append(_final_failure(job, worker, exception))
        if not in_view(job):
            return end(job, ok=False, reason=why)
        if worker.status in IN_VIEW:
            return view_change.on_loss(job, [worker], why)
    # The view they are in, or are about to install, would train on: only another one ends the job.
    if job.phase is JobPhase.RETURNING:
        job.abort = True
        return view_change.resume_after_restart(job, why)
    if job.phase is JobPhase.PREPARING and job.abort:
        return view_change.proceed(job, why)
    return view_change.begin(job, True, why)


def _final_failure(job: JobState, worker: Worker, exception: messages.WorkerException) -> RecordFailure:
    return RecordFailure(
        worker.number, worker.slot, phase_of(job, worker), "raised", exception.summary, final=True
    )


def on_receipt(job: JobState, member: int, receipt: messages.StepReceipt) -> str:
    """Count the state hashes of a receipt as votes on their steps."""
    reasons = []
    for step, digest in receipt.hashes.items():
        reasons.append(_on_vote(job, member, int(step), digest, receipt))
        if job.phase is JobPhase.ENDED:
            break
    return "; ".join(reasons) or "a receipt without a hash"


def _on_vote(job: JobState, member: int, step: int, digest: str, receipt: messages.StepReceipt) -> str:
    """Count a vote on a step: an audited one, one after which members differed, or a disputed one."""
    worker = job.workers.get(member)
    if worker is None or worker.status not in IN_VIEW:
        return f"a hash of member {member}, which is in no view"
    differs = receipt.agreed >= 0
    # "kind:digest", or of an audited step the digest alone; hashes of one kind can be compared.
    hash_key = (step, digest.rpartition(":")[0])
    if _is_from_before_restore(job, hash_key, receipt):
        return "a hash from before all go back"
    if receipt.trail and job.dispute is not None and not job.restore:
        job.trails[member] = receipt.trail
    if not differs and (job.dispute is None or job.dispute.hash_key != hash_key):
        if step <= job.agreed_step and receipt.generation and job.view and job.view.restore:
            # All went back before this step: what was agreed on then says nothing about this time.
            job.agreed_step = step - 1
        if step <= job.agreed_step:
            return f"step {step} is agreed on already"
    job.votes = hash_votes.with_vote(job.votes, hash_key, member, digest)
    if differs:
        replica_divergence.members_differ(job, step, receipt.agreed)
    if job.phase in (JobPhase.PREPARING, JobPhase.RETURNING):
        return f"the hash of step {step} is kept until the view is whole"
    judged, expelled, all_go_back = replica_divergence.judge_open(job)
    if job.ended is not None:
        return judged
    if (all_go_back or differs) and not expelled:
        # The dissenter is gone already or not known yet, but its gradients are in the weights of all.
        why = judged if all_go_back else f"the members differ after step {step}"
        return view_change.begin(job, True, why)
    return view_change.on_loss(job, expelled, judged)


def _is_from_before_restore(
    job: JobState, hash_key: hash_votes.HashKey, receipt: messages.StepReceipt
) -> bool:
    """Return whether a vote is about weights that all members replace, or have replaced since."""
    if receipt.generation and job.view and receipt.generation != job.view.generation:
        return True
    # A vote on what another member has seen to differ, from one that was stopped before it saw it, counts.
    return job.restore and receipt.agreed < 0 and hash_key not in job.votes


def on_leave_request(job: JobState, member: int, request: messages.LeaveRequest) -> str:
    """Release a worker that was asked to leave (SIGTERM), a member of the view at the next boundary."""
    worker = job.workers.get(member)
    if worker is None or worker.leave_reason:
        return f"member {member} is gone, or leaves already"
    if worker.status in NOT_IN_VIEW:
        depart(job, replace(worker, leave_reason="preempted"))
        return view_change.on_loss(job, [worker], f"rank {worker.slot} leaves: {request.reason}")
    if job.stop_reason is not None:
        return f"rank {worker.slot} leaves, as all do: the job is stopping"
    reassign_slot(job, worker, "preempted")
    if worker.status is WorkerStatus.MEMBER:
        leaving = replace(job.workers[worker.number], status=WorkerStatus.LEAVING)
        job.workers[worker.number] = leaving
    change = view_change.admit_and_release(job)
    return f"rank {worker.slot} was asked to go: {request.reason}; {change or 'it leaves with the next view'}"


def on_finished(job: JobState, member: int, done: messages.MemberFinished) -> str:
    """Note that a member is at the end of the run; with the last one the job ends."""
    worker = job.workers.get(member)
    if worker is None or worker.status not in IN_VIEW:
        return f"member {member} is done, and in no view"
    if done.generation and job.view is not None and done.generation != job.view.generation:
        return f"the end of generation {done.generation} is not this view's"
    if worker.number not in job.pending and job.phase is JobPhase.PREPARING:
        return f"rank {worker.slot} reported after it was done"
    job.last_message_at[worker.number] = job.now
    job.workers[worker.number] = replace(
        worker, status=WorkerStatus.DONE, digest=done.hash, stop_reason=done.stopped, reconnected=True
    )
    why = f"rank {worker.slot} is done"
    if job.phase is JobPhase.RETURNING:
        return view_change.resume_after_restart(job, why)
    if all_done(job):
        return finish(job)
    if job.phase is JobPhase.PREPARING:
        return view_change.proceed(job, why)
    return why
