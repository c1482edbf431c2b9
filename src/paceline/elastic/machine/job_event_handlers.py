"""Handlers of all other events: the beginning, lost workers, hosts, people, probes and the clock.

Each handler changes the copy of the state it is given, appends actions, and returns the reason.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

from paceline.control.field_types import MAX_WORKERS
from paceline.control.messages import ViewPlan
from paceline.core.wording import counted, ranks
from paceline.elastic.machine import (
    admission,
    hang_detection,
    job_end,
    link_probes,
    liveness,
    machine_events as events,
    shard_assignment,
    slots,
    stragglers,
    view_change,
)
from paceline.elastic.machine.actions import KillWorker, ProbeWorkers, RecordVerdict, RequestAgents, dismiss
from paceline.elastic.machine.settings import LOCAL_AGENT
from paceline.elastic.machine.state import (
    IN_VIEW,
    JobPhase,
    JobState,
    Slot,
    Worker,
    WorkerStatus,
    in_view,
    rank_names,
    usable_slots,
)


def on_began(job: JobState, event: events.SupervisorBegan) -> str:
    """Start workers, or wait for the workers of a predecessor, which train on without a supervisor."""
    if job.workers or job.slots:
        return "the job has begun already"
    job.started_at = job.asked_at = job.progressed_at = job.assigned_at = job.productive_at = job.now
    job.generation = event.generation
    job.next_member = max([event.next_member, 1, *(number + 1 for number in event.members)])
    job.preemptions = event.preemptions
    job.committed = event.committed
    job.shard_seconds = event.shard_seconds
    job.agreed_step = max(job.agreed_step, event.agreed_step)
    job.restore, job.restore_before = event.restore, event.restore_before
    job.tainted_until = event.tainted_until
    job.dispute, job.dispute_count, job.trails = event.dispute, event.dispute_count, dict(event.trails)
    job.lineage = dict(event.lineage)
    job.votes = {(step, kind): dict(cast) for step, kind, cast in event.votes}
    job.stop_reason, job.stop_requested_at = event.stop_reason, job.now
    job.fatal_failure = event.fatal_failure
    _restore_workers(job, event)
    if not event.slots:
        for number in range(job.settings.local_workers):
            job.slots.setdefault(number, Slot(number))
    for slot in list(job.slots.values()):
        if slot.usable and slot.worker is None and job.stop_reason is None:
            slots.start_worker(job, slot)
    if not in_view(job):
        if job.stop_reason is not None:
            return job_end.end(job, ok=False, reason=f"no worker is left to be stopped: {job.stop_reason}")
        if job_end.has_too_few(job) and not job_end.waits_for_agents(job):
            return job_end.end(job, ok=False, reason="too few workers are left: their budgets are spent")
        job.tick_by(job.now + job.settings.start_seconds)
        return view_change.try_start(job, f"{counted(len(job.actions), 'worker', 'is', 'are')} started")
    job.phase = JobPhase.RETURNING
    # The processes of those that do not come are probed several times before that is judged.
    job.tick_by(job.now + liveness.probe_limit(job))
    return f"{counted(len(in_view(job)), 'member', 'is', 'are')} expected back in generation {job.generation}"


def _restore_workers(job: JobState, event: events.SupervisorBegan) -> None:
    for number, (agent_id, failures, weight, given_up) in event.slots.items():
        job.slots[number] = Slot(number, agent_id, failures=failures, weight=weight, given_up=given_up)
    starting = set(event.starting)
    for number, (slot, agent_id) in sorted(event.members.items()):
        status = WorkerStatus.STARTING if number in starting else WorkerStatus.MEMBER
        worker = Worker(number, slot, agent_id, status, job.now, reconnected=number in starting)
        held = job.slots.get(slot, Slot(slot, agent_id, wanted=not event.slots))
        if held.worker is not None:
            # Two of one slot: the earlier was about to leave.
            earlier = job.workers[held.worker]
            job.workers[earlier.number] = replace(
                earlier, status=WorkerStatus.LEAVING, leave_reason="preempted"
            )
        if not held.usable:
            why = "preempted" if held.wanted else "scaled"
            worker = replace(worker, status=WorkerStatus.LEAVING, leave_reason=why)
        job.workers[number] = worker
        job.last_message_at[number] = job.now
        if not held.given_up:
            job.slots[slot] = replace(held, worker=number)
        if agent_id != LOCAL_AGENT:
            job.agents.setdefault(agent_id, f"host {agent_id}")
    members = sorted(in_view(job), key=lambda worker: (worker.slot, worker.number))
    if event.view is not None and members:
        job.view = event.view
    elif members:
        # The assignment is not known; it stays what the members know until the next view.
        job.view = ViewPlan(
            generation=event.generation,
            members=tuple(worker.number for worker in members),
            slots=tuple(worker.slot for worker in members),
            shards=(),
        )


def on_agent_joined(job: JobState, event: events.AgentJoined) -> str:
    """Make slots on the host that offers workers."""
    if job.stop_reason is not None or event.agent_id == LOCAL_AGENT or event.workers < 1:
        return f"{event.name} is not needed"
    job.agents[event.agent_id] = event.name
    if job.phase is JobPhase.STARTING and not job.slots:
        job.started_at = job.now  # agents that were asked for together come one after the other
    here = sum(slot.agent_id == event.agent_id for slot in job.slots.values())
    added = _new_slots(job, max(0, event.workers - here), event.agent_id)
    for number in added:
        slots.start_worker(job, job.slots[number])
    known = ranks(added) if added else "all are known"
    return f"{event.name} offers {counted(event.workers, 'worker')}: {known}"


def on_agent_lost(job: JobState, event: events.AgentLost) -> str:
    """Remove a host that left, with its slots and workers: each counts as a preemption, not as a failure."""
    name = job.agents.pop(event.agent_id, None)
    if name is None:
        return f"host {event.agent_id} is gone, and was not counted on"
    why = f"{name} is gone: {event.reason}"
    job.slots = {number: slot for number, slot in job.slots.items() if slot.agent_id != event.agent_id}
    gone = [worker for worker in job.workers.values() if worker.agent_id == event.agent_id]
    if not gone and job_end.has_too_few(job):
        job_end.waits_for_agents(job)  # no loss of a worker begins the wait: its slots waited for a start
    for worker in gone:
        job.preemptions += 1
        slots.lose(job, worker, "preempted", why)
    return view_change.on_loss(job, gone, why)


def size_refusal(job: JobState, workers: int) -> str | None:
    """Return why the job cannot have this number of workers; None: it can be asked to."""
    least, most = max(1, job.settings.min_workers), job.settings.most_workers
    size = counted(workers, "worker", "is", "are")
    if workers < least:
        return f"{size} fewer than the {least} that {'is' if least == 1 else 'are'} required"
    if most and workers > most:
        return f"{size} more than the {counted(most, 'shard')} of a step: some would have nothing to do"
    if workers > MAX_WORKERS:
        return f"{size} more than the {MAX_WORKERS} that one job may have"
    if job.stop_reason is not None:
        return "the job is stopping: its size stays"
    return None


def on_scale(job: JobState, event: events.ScaleRequested) -> str:
    """Grow or shrink the job to the number of workers that a tool asked for."""
    if (why := size_refusal(job, event.workers)) is not None:
        return why
    if job.settings.scales_by_agents:
        job.actions.append(RequestAgents(event.workers))
        return f"{counted(event.workers, 'worker', 'is', 'are')} wanted: agents are asked for or sent away"
    usable = usable_slots(job)
    if event.workers > len(usable):
        return _grow(job, event.workers - len(usable))
    # The highest at home go first, then the highest elsewhere.
    order = sorted(usable, key=lambda slot: (slot.agent_id != LOCAL_AGENT, -slot.number))
    return _shrink(job, order[: len(usable) - event.workers])


def _grow(job: JobState, more: int) -> str:
    grown: list[int] = []
    for slot in sorted(job.slots.values(), key=lambda slot: slot.number):
        if more == len(grown):
            break
        if not slot.wanted:
            # It was on its way out: it stays.
            job.slots[slot.number] = replace(slot, wanted=True, given_up=False)
            worker = job.workers.get(slot.worker) if slot.worker is not None else None
            if worker is not None and worker.leave_reason == "scaled":
                stays = WorkerStatus.MEMBER if worker.status is WorkerStatus.LEAVING else worker.status
                job.workers[worker.number] = replace(worker, leave_reason="", status=stays)
        elif slot.given_up:
            # A person asks: the budget begins anew.
            job.slots[slot.number] = replace(slot, given_up=False, failures=0)
        else:
            continue
        grown.append(slot.number)
    grown += _new_slots(job, more - len(grown), LOCAL_AGENT)
    for number in grown:
        if job.slots[number].worker is None:
            slots.start_worker(job, job.slots[number])
    return f"more workers are wanted: {ranks(grown, 'is', 'are')} added"


def _shrink(job: JobState, gone: list[Slot]) -> str:
    if not gone:
        return "there are as many workers as are wanted"
    reason = "fewer workers are wanted"
    for slot in gone:
        worker = job.workers.get(slot.worker) if slot.worker is not None else None
        if worker is not None and worker.status in IN_VIEW:
            job.slots[slot.number] = replace(slot, wanted=False)
            status = WorkerStatus.LEAVING if worker.status is WorkerStatus.MEMBER else worker.status
            job.workers[worker.number] = replace(worker, status=status, leave_reason="scaled")
            continue
        del job.slots[slot.number]
        if worker is None:
            continue
        starting = worker.status is WorkerStatus.STARTING
        job.actions.append(KillWorker(worker.number, reason) if starting else dismiss(worker.number, reason))
        slots.forget(job, worker)
    said = f"{reason}: {ranks([slot.number for slot in gone], 'leaves', 'leave')}"
    if job.phase is JobPhase.PREPARING:
        return view_change.proceed(job, said)
    return view_change.try_change(job, said)


def _new_slots(job: JobState, count: int, agent_id: int) -> list[int]:
    free = (number for number in itertools.count() if number not in job.slots)
    added = list(itertools.islice(free, count))
    job.slots.update((number, Slot(number, agent_id)) for number in added)
    return added


def on_stop(job: JobState, event: events.StopRequested) -> str:
    """Stop as the caller or a tool asked: save, and end."""
    if job.stop_reason is not None:
        return f"the job is stopping already: {job.stop_reason}"
    job.stop_reason = event.reason
    job.stop_requested_at = job.now
    job.tick_by(job.now + job.settings.stop_seconds)
    reason = f"the job is stopping: {event.reason}"
    job_end.dismiss_idle(job, reason)
    if not in_view(job):
        return job_end.end(job, ok=True, reason=f"{reason}; no worker had begun", stopped=event.reason)
    if job.phase is JobPhase.RUNNING:
        view_change.request_stop(job)
        return reason
    if job.phase is JobPhase.PREPARING:
        return view_change.proceed(job, reason)
    return f"{reason}, as soon as the view is whole"


def on_probed(job: JobState, event: events.ProcessProbed) -> str:
    """Note what the host of a silent worker found out about its process."""
    worker = job.workers.get(event.member)
    if worker is None or worker.status is WorkerStatus.STARTING:
        return f"member {event.member} was probed, and no heartbeat is expected of it"
    job.probes[event.member] = (job.now, event)
    woken = liveness.update_stopped_together(job)
    if event.stopped:
        said = f"rank {worker.slot} sends no heartbeat: its process is stopped"
        return f"{said}; {woken}" if woken else said
    if not liveness.interpreter_is_held(job, event.member):
        return f"rank {worker.slot} sends no heartbeat, though its interpreter runs: its connection is cut"
    liveness.apply_probed_phase(job, event)
    return f"rank {worker.slot} sends no heartbeat, but its process runs: its interpreter is held"


def on_tick(job: JobState, event: events.Tick) -> str:
    """Check deadlines and start what is due."""
    if event.stalled > 0:
        hang_detection.shift_clocks(job, event.stalled)
    if job.now < job.next_tick_at:
        return f"for {event.stalled:.1f} s no worker is blamed" if event.stalled > 0 else "nothing is due"
    reasons = _check_deadlines(job)
    job.next_tick_at = hang_detection.next_tick(job)
    return "; ".join(reasons) or "all are on time"


def _check_deadlines(job: JobState) -> list[str]:
    """Apply everything that time alone decides, in the order in which one explains another."""
    if job.stop_reason is not None and job.now - job.stop_requested_at >= job.settings.stop_seconds:
        late = [worker for worker in in_view(job) if worker.status is not WorkerStatus.DONE]
        what = f"{rank_names(late)} did not stop within {job.settings.stop_seconds:g} s"
        return [job_end.end_with_verdict(job, late[0], what)]
    # Times first: all limits below follow the measured steps.
    _measure(job)
    _forgive_taint(job)
    # Before silence is judged: members that are stopped together are exempt, and get their time back.
    woken = liveness.update_stopped_together(job)
    reasons = [woken] if woken else []
    if (over := job_end.end_if_no_agent_came(job)) is not None:
        return [over]
    for remove in (_expel_hung, _refuse_overdue):
        reasons += remove(job)
        if job.phase is JobPhase.ENDED:
            return reasons
    # After the losses: what a dial says of a member that has just gone does not count.
    if job.pending_dials and not link_probes.is_open(job):
        reasons.append(view_change.on_link_probe(job, "not all dials were answered"))
    if link_probes.probe_waiting_members(job):
        reasons.append("members that wait for each other dial each other")
    if (hurry := view_change.too_slow_to_form(job)) is not None:
        reasons.append(view_change.cut_short(job, hurry))
    if job.phase is JobPhase.RETURNING and job.now >= hang_detection.reconnect_deadline(job):
        reasons.append(_give_up_missing(job))
    if job.phase is JobPhase.ENDED:
        return reasons
    # Last: which workers to probe, start, dial and admit depends on which are left.
    quiet = liveness.to_probe(job)
    if quiet:
        job.actions.append(ProbeWorkers(quiet))
        reasons.append(f"{rank_names([job.workers[n] for n in quiet], 'is', 'are')} probed")
    started = slots.start_due(job)
    if started:
        reasons.append(f"{ranks(started, 'is', 'are')} started again")
    admission.dial(job)
    if job.phase is JobPhase.STARTING:
        reasons.append(view_change.try_start(job, "workers are awaited"))
    if job.phase is JobPhase.RUNNING:
        reasons += _improve(job)
    return reasons


def _measure(job: JobState) -> None:
    """Take the typical times of a step and of a shard from the heartbeats of the view."""
    view = job.view.members if job.view is not None else ()
    heartbeats = [job.heartbeats[number] for number in view if number in job.heartbeats]
    job.step_seconds = shard_assignment.median(
        [heartbeat.step_seconds for heartbeat in heartbeats if heartbeat.step_seconds > 0]
    )
    shard = shard_assignment.median(
        [heartbeat.shard_seconds for heartbeat in heartbeats if heartbeat.shard_seconds > 0]
    )
    if shard > 0 and not 0.8 < job.shard_seconds / shard < 1.25:
        job.shard_seconds = shard  # part of the snapshot on disk, so small changes are ignored


def _forgive_taint(job: JobState) -> None:
    """Trust checkpoints again once the restore, which removes the wrong ones, was carried out and the run is
    past their steps."""
    if (
        job.tainted_until >= 0
        and not job.restore
        and job.max_progress
        and job.max_progress[0] > job.tainted_until
    ):
        job.tainted_until = job.restore_before = -1


def _expel_hung(job: JobState) -> list[str]:
    """Expel the members that are silent or overdue, and continue without them."""
    # Silence explains a hang, and not the other way round: members wait for the silent one, and which of them
    # is at fault is only asked where all send heartbeats.
    found = hang_detection.find_silent(job) or hang_detection.find_overdue(job)
    for finding in found:
        slots.expel(job, finding)
    what = "; ".join(finding.what for finding in found)
    return [view_change.on_loss(job, [finding.worker for finding in found], what)] if found else []


def _refuse_overdue(job: JobState) -> list[str]:
    """Refuse the workers that were not reached in time, and continue without them."""
    overdue = admission.overdue(job)
    for worker, why in overdue:
        admission.refuse(job, worker, why)
    # One loss for all of them: the view that follows has none of those that are still to be refused.
    what = "; ".join(why for _, why in overdue)
    return [view_change.on_loss(job, [worker for worker, _ in overdue], what)] if overdue else []


def _improve(job: JobState) -> list[str]:
    """Admit and release workers, and rebalance or replace slow ones, while the view is whole."""
    for slow in stragglers.to_replace(job):
        heartbeat = job.heartbeats[slow.number]
        what = f"rank {slow.slot} takes {heartbeat.shard_seconds:.3g} s per shard, far more than the others"
        job.actions.append(
            RecordVerdict(
                slow.number,
                slow.slot,
                heartbeat.phase,
                what,
                "all wait for the slowest",
                "another one is started",
                kind="straggler",
            )
        )
        slots.reassign_slot(job, slow, "straggler")
        job.workers[slow.number] = replace(job.workers[slow.number], status=WorkerStatus.LEAVING)
        job.assigned_at = job.now
    change = view_change.admit_and_release(job)
    if change:
        return [change]
    if any(worker.status is WorkerStatus.DONE for worker in in_view(job)):
        return []
    better = stragglers.better_assignment(job)
    return [view_change.begin(job, False, better)] if better else []


def _give_up_missing(job: JobState) -> str:
    missing = [
        worker
        for worker in in_view(job)
        if not worker.reconnected and job.now >= hang_detection.reconnect_limit(job, worker)
    ]
    what = "it did not come back after the supervisor's restart"
    for worker in missing:
        slots.lose(job, worker, "silent", what, kill=what)
    if not missing:
        return view_change.resume_after_restart(job, "no member is past its limit")
    why = f"{rank_names(missing)} did not come back after the supervisor's restart"
    return view_change.on_loss(job, missing, why)


def on_lost(job: JobState, event: events.WorkerLost) -> str:
    """Handle the end of a worker's process or connection."""
    worker = job.workers.get(event.member)
    if worker is None:
        return f"member {event.member} is gone, and was given up before"
    why = f"rank {worker.slot} is lost: {event.reason}"
    slots.lose(job, worker, event.kind, event.reason)
    return view_change.on_loss(job, [worker], why)
