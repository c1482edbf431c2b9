"""Find workers that have been silent or stuck for too long, and which of them is at fault.

A worker without messages is *silent*, unless its process runs and cannot send (liveness.py): then the limit
of its phase applies. A member that makes no progress, while no step is committed, is *hung* if the others
wait for it and it waits for none: a member that waits is never blamed for waiting. Limits follow the measured
time per step. Changes nothing but clocks; the caller decides what is done about a finding.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, fields, replace
from math import inf
from typing import Literal, final

from paceline.core.backoff import doubled
from paceline.core.wording import ranks
from paceline.elastic.machine.link_faults import broken_link
from paceline.elastic.machine.liveness import interpreter_is_held, probe_limit, silence_limit
from paceline.elastic.machine.state import JobPhase, JobState, Worker, WorkerStatus, in_view

SLOW_PHASES = frozenset({"start", "checkpoint", "evaluation"})
_passive = frozenset({"wait", "collective"})
_least_gap = 0.01  # between two ticks
_clocks = ("gather_until", *(each.name for each in fields(JobState) if each.name.endswith("_at")))
_all_busy = 4.0  # times the limit, where all are busy and none waits: slow is likelier than hung


@final
@dataclass(frozen=True)
class FaultFinding:
    """A worker found at fault: kind, phase, a sentence about it, and which ranks wait for it."""

    worker: Worker
    kind: Literal["silent", "hung", "unreachable"]
    phase: str
    what: str
    waiting: str


def expected_step_seconds(job: JobState) -> float:
    """Return the expected time of a step: as measured, or longer where fewer members have more shards each
    than then."""
    most = job.view.max_shards if job.view is not None else 0
    return max(job.step_seconds, most * job.shard_seconds)


def hang_limit(job: JobState) -> float:
    return max(_hang_least(job), job.settings.hang_steps * expected_step_seconds(job))


def _hang_least(job: JobState) -> float:
    """Return the shortest hang limit, doubled for each member that was expelled as hung since the last
    commit: a sample that takes long each time it is read would otherwise cost one worker after the other, and
    then the job."""
    least = job.settings.hang_least
    return doubled(least, job.hangs, max(least, job.settings.slow_phase_seconds))


def phase_limit(job: JobState, worker: Worker) -> float:
    """Return how long this member may be in one phase. A first step may compile; saving and evaluating take
    as long as before, and the first time of either is unknown."""
    heartbeat = job.heartbeats.get(worker.number)
    if (
        heartbeat is None
        or heartbeat.step_seconds <= 0
        or (heartbeat.phase in SLOW_PHASES and heartbeat.longest <= 0)
    ):
        return max(job.settings.slow_phase_seconds, hang_limit(job))
    if heartbeat.phase in SLOW_PHASES:
        return max(hang_limit(job), job.settings.hang_steps * heartbeat.longest)
    return hang_limit(job)


def abort_limit(job: JobState, worker: Worker) -> float:
    """Return how long a member may take to report when it is asked to abort: it finishes at most a shard."""
    at_once = max(_hang_least(job), job.settings.silence_steps * job.step_seconds)
    return at_once if phase_limit(job, worker) <= hang_limit(job) else phase_limit(job, worker)


def save_alone_limit(job: JobState) -> float:
    """Return how long a member may take to report when one of them has to save alone: longer than the view
    had, because it may be in the middle of a shard, and only a member that reports can save."""
    return 1.5 * job.settings.cut_short_seconds


def install_limit(job: JobState) -> float:
    restores = job.view is not None and job.view.restore
    return job.settings.slow_phase_seconds if restores else max(job.settings.install_seconds, hang_limit(job))


def forming_since(job: JobState) -> float:
    """Return since when a view forms although the job was asked to stop or a member to leave."""
    return max(job.asked_at, job.stop_requested_at) if job.stop_reason is not None else job.asked_at


def reconnect_deadline(job: JobState) -> float:
    """Return until when members may reconnect after a restart of the supervisor."""
    return job.asked_at + 4 * job.settings.silence_least


def reconnect_limit(job: JobState, worker: Worker) -> float:
    """Return until when this member may reconnect. A member whose interpreter is held cannot connect either,
    and gets the limit of its phase; its own pace is unknown before its first heartbeat, that of the job is
    known where a step was committed. Members that are stopped together get the limit of a slow phase."""
    slow_limit = max(job.settings.slow_phase_seconds, hang_limit(job))
    if worker.number in job.stopped_together:
        return job.asked_at + slow_limit
    if not interpreter_is_held(job, worker.number):
        return reconnect_deadline(job)
    heartbeat = job.heartbeats.get(worker.number)
    slow = heartbeat is None or heartbeat.phase in SLOW_PHASES or not job.committed
    return job.asked_at + (slow_limit if slow else hang_limit(job))


def phase_of(job: JobState, worker: Worker) -> str:
    """Return the phase of the worker's last heartbeat."""
    heartbeat = job.heartbeats.get(worker.number)
    return heartbeat.phase if heartbeat is not None else "start"


def find_silent(job: JobState) -> list[FaultFinding]:
    """Return workers that should send heartbeats and do not, and those that never sent a hello."""
    limit = silence_limit(job)
    found = []
    for worker in job.workers.values():
        if worker.status is WorkerStatus.STARTING:
            if job.now - worker.since >= job.settings.start_seconds:
                what = f"rank {worker.slot} has not connected within {job.settings.start_seconds:g} s"
                found.append(FaultFinding(worker, "silent", "start", what, "no other rank waits for it"))
        elif worker.reconnected and job.now >= job.last_message_at[worker.number] + limit:
            quiet = job.now - job.last_message_at[worker.number]
            if interpreter_is_held(job, worker.number):
                continue
            if worker.number in job.stopped_together and quiet < max(job.settings.slow_phase_seconds, limit):
                continue
            what = f"rank {worker.slot} has sent no heartbeat for {quiet:.1f} s"
            waiting = _waiting_ranks(job, worker.number)
            found.append(FaultFinding(worker, "silent", phase_of(job, worker), what, waiting))
    return found


def find_overdue(job: JobState) -> list[FaultFinding]:
    """Return the members that block the others, by what the job waits for. A member that is stopped together
    with all others of its host blocks them and is not at fault; neither is a member that waits for it."""
    if job.stopped_together:
        return []
    match job.phase:
        case JobPhase.RUNNING | JobPhase.STOPPING:
            return _find_hung(job)
        case JobPhase.PREPARING if job.abort:
            return _late_reports(job)
        case JobPhase.PREPARING:
            return _find_hung(job) or _late_reports(job)
        case JobPhase.INSTALLING:
            # Where one was held up, all were: the last ones have a moment to follow it.
            late = job.now - job.asked_at >= install_limit(
                job
            ) and job.now - job.progressed_at >= silence_limit(job)
            return [
                _finding(job, job.workers[number], "has not installed the new view")
                for number in (_blocking_installation(job) if late else ())
            ]
    return []


def _late_reports(job: JobState) -> list[FaultFinding]:
    """Return the members that did not report in time."""
    found = []
    awaited = {} if job.abort else waiting_for(job)
    for number in sorted(job.pending):
        worker = job.workers[number]
        if worker.status is WorkerStatus.READY:
            # It computes nothing that could keep it from answering.
            limit = hang_limit(job)
        elif job.saves_alone:
            limit = save_alone_limit(job)
        elif job.abort:
            limit = abort_limit(job, worker)
        else:
            limit = max(job.settings.slow_phase_seconds, hang_limit(job))
        late = job.now - job.asked_at
        if not job.abort:
            # Towards a boundary members still compute: one that goes from shard to shard is not late, nor is
            # one that waits for a member that has not reported. Asked to abort, none of this excuses it.
            late = min(late, job.now - job.progressed_at)
            if worker.status is not WorkerStatus.READY:
                explained = any(peer in job.pending for peer in awaited.get(number, ()))
                late = 0.0 if explained else min(late, _phase_seconds(job, number))
        if late >= limit:
            found.append(_finding(job, worker, f"has not reported after {late:.1f} s"))
    return found


def _find_hung(job: JobState) -> list[FaultFinding]:
    """Return the members that keep the others from progress. All of them stand still when one does, so being
    late is no evidence: only which members they wait for, and which of them waits for none, tells."""
    still = job.now - job.progressed_at
    if still < job.settings.hang_least:
        return []
    members = [
        worker
        for worker in in_view(job)
        if worker.status is not WorkerStatus.DONE
        and (job.phase is not JobPhase.PREPARING or worker.number in job.pending)
    ]
    lasted = {worker.number: _phase_seconds(job, worker.number) for worker in members}
    # The smaller of both: a long phase is no hang while the others commit, and a member that has just
    # entered its phase does not hang, however long all have stood still.
    late = [worker for worker in members if min(still, lasted[worker.number]) >= phase_limit(job, worker)]
    awaited = waiting_for(job)
    waited_for = Counter(peer for peers in awaited.values() for peer in peers)
    # The end of the chain of waiting: it is waited for, and waits for none.
    idle = [worker for worker in late if worker.number not in awaited]
    culprits = [worker for worker in idle if waited_for[worker.number]]
    if not culprits:
        # No idle member is named: blame the one that has been busy for longest. A member in a passive phase
        # waits, even where it does not say for which member.
        # One that waits lets go of the interpreter: where that is held, the member does not wait.
        busy = [
            worker
            for worker in idle
            if phase_of(job, worker) not in _passive or interpreter_is_held(job, worker.number)
        ]
        if len(busy) == len(members):
            # No member waits: the step may simply be long, on a busy host or for a large sample.
            busy = [
                worker
                for worker in busy
                if min(still, lasted[worker.number]) >= _all_busy * phase_limit(job, worker)
            ]
        culprits = sorted(busy, key=lambda worker: -lasted[worker.number])[:1]
    if not culprits and late and len(late) == len(members) and all(w.number in awaited for w in late):
        # They wait for each other: a link that does not carry everything, a lost message, or a deadlock.
        link = broken_link(job, awaited, [worker.number for worker in late])
        if link is not None:
            return [_finding(job, link.end, "makes no progress", because=link.says)]
        # The member that most wait for has to go.
        culprits = [max(late, key=lambda w: (waited_for[w.number], lasted[w.number], w.slot))]
    return [_finding(job, worker, "makes no progress") for worker in culprits]


def _blocking_installation(job: JobState) -> list[int]:
    """Return the members that block an installation: of those that have not installed, those that are waited
    for and wait for none, else those that wait for none, else one end of a broken link, else the one that
    most wait for."""
    awaited = waiting_for(job)
    waited_for = Counter(peer for peers in awaited.values() for peer in peers)
    idle = [number for number in sorted(job.pending) if number not in awaited]
    named = [number for number in idle if waited_for[number]]
    if named or idle:
        return named or idle
    link = broken_link(job, awaited, job.pending)
    if link is not None:
        return [link.end.number]
    return [max(job.pending, key=lambda n: (waited_for[n], _phase_seconds(job, n), job.workers[n].slot))]


def waiting_for(job: JobState) -> dict[int, tuple[int, ...]]:
    """Return which live members each worker waits for. A worker that cannot send reported this before its
    interpreter was held."""
    found = {}
    for number, heartbeat in job.heartbeats.items():
        if heartbeat.waits_for and number in job.workers and not interpreter_is_held(job, number):
            peers = tuple(peer for peer in heartbeat.waits_for if peer in job.workers and peer != number)
            if peers:
                found[number] = peers
    return found


def _phase_seconds(job: JobState, number: int) -> float:
    """Return how long it has been in its phase."""
    heartbeat = job.heartbeats.get(number)
    return heartbeat.seconds + job.now - job.last_message_at[number] if heartbeat is not None else 0.0


def _finding(job: JobState, worker: Worker, says: str, because: str = "") -> FaultFinding:
    phase = phase_of(job, worker)
    lasted = _phase_seconds(job, worker.number)
    takes = f"; a step takes {job.step_seconds:.3g} s" if job.step_seconds > 0 else ""
    if interpreter_is_held(job, worker.number):
        takes += "; it sends no heartbeat although its process runs: a call holds the interpreter's lock"
    what = f"rank {worker.slot} {says}: it has been in {phase} for {lasted:.1f} s{takes}"
    if because:
        what += f"; {because}"
    return FaultFinding(worker, "hung", phase, what, _waiting_ranks(job, worker.number))


def _waiting_ranks(job: JobState, number: int) -> str:
    slots = [job.workers[other].slot for other, peers in waiting_for(job).items() if number in peers]
    return f"{ranks(slots, 'waits', 'wait')} for it" if slots else "no other rank reports waiting for it"


def next_tick(job: JobState) -> float:
    """Return when time alone can change something. Early is harmless: the tick finds nothing and asks
    again."""
    if job.phase is JobPhase.ENDED:
        return inf
    settings = job.settings
    times = [job.now + max(settings.silence_least, settings.heartbeat), job.gather_until]
    limit, probe = silence_limit(job), probe_limit(job)
    for worker in job.workers.values():
        if worker.status is WorkerStatus.STARTING:
            times.append(worker.since + settings.start_seconds)
        elif worker.reconnected or job.phase is JobPhase.RETURNING:
            if worker.status is WorkerStatus.READY and worker.dialing:
                times.append(worker.dialed_at + settings.dial_seconds)
            last_at = job.last_message_at[worker.number]
            # Silence is looked into once in a heartbeat until it is judged.
            if job.now < last_at + probe:
                times.append(last_at + probe)
            else:
                times.append(min(job.now + settings.heartbeat, last_at + limit))
    if job.stop_reason is not None:
        # No slot gets another worker then.
        times.append(job.stop_requested_at + settings.stop_seconds)
    else:
        times += [slot.start_at for slot in job.slots.values() if slot.start_at is not None]
    if job.pending_dials:
        times.append(job.dials_sent_at + settings.check_seconds)
    match job.phase:
        case JobPhase.PREPARING if job.saves_alone:
            times.append(job.asked_at + save_alone_limit(job))
        case JobPhase.PREPARING if job.abort:
            times += [job.asked_at + abort_limit(job, job.workers[number]) for number in job.pending]
        case JobPhase.RUNNING | JobPhase.STOPPING | JobPhase.PREPARING:
            times += [job.progressed_at + hang_limit(job) / 2, job.progressed_at + hang_limit(job)]
        case JobPhase.INSTALLING:
            times.append(job.asked_at + install_limit(job))
            if job.stop_reason is not None or any(w.leave_reason == "preempted" for w in in_view(job)):
                times.append(forming_since(job) + settings.cut_short_seconds)
        case JobPhase.RETURNING:
            times.append(reconnect_deadline(job))
        case JobPhase.STARTING:
            times.append(job.started_at + settings.start_seconds)
    # What lay in the past and could not be helped is looked at again a heartbeat later.
    soon = job.now + _least_gap
    return min((at if at > job.now else max(soon, job.now + settings.heartbeat)) for at in times)


def shift_clocks(job: JobState, seconds: float) -> None:
    """Shift all clocks by a time in which the supervisor did not run."""
    job.workers = {
        n: replace(worker, since=worker.since + seconds, dialed_at=worker.dialed_at + seconds)
        for n, worker in job.workers.items()
    }
    job.slots = {
        n: slot if slot.start_at is None else replace(slot, start_at=slot.start_at + seconds)
        for n, slot in job.slots.items()
    }
    job.last_message_at = {number: at + seconds for number, at in job.last_message_at.items()}
    job.probes = {number: (at + seconds, probe) for number, (at, probe) in job.probes.items()}
    for clock in _clocks:
        if isinstance(at := getattr(job, clock), float | int):
            setattr(job, clock, at + seconds)
