"""Who has been silent or stuck for too long, and who of them is to blame.

A worker that says nothing is *silent*, unless its process runs and cannot speak (liveness.py): then it has
the time that its phase may take. A member that does not go on, while nobody commits, is *hung* if the others
wait for it and it waits for nobody: those who wait are never blamed for waiting. Limits follow the measured
time per step. Must not change anything but clocks, nor decide what is done about it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from math import inf
from typing import Literal, final

from paceline.elastic.links import broken_link
from paceline.elastic.liveness import cannot_speak, probe_limit, silence_limit
from paceline.elastic.model import Phase, Standing
from paceline.elastic.state import State, Worker, in_view, ranks

SLOW_PHASES = frozenset({"start", "checkpoint", "evaluation"})
_passive = frozenset({"wait", "collective"})
_least_gap = 0.01  # between two ticks
_clocks = (
    "moved_at",
    "asked_at",
    "started_at",
    "dealt_at",
    "gather_at",
    "stop_at",
    "worked_at",
    "doubted_at",
    "due",
)
_all_busy = 4.0  # times the limit, where all are busy and nobody waits: slow is likelier than hung


@final
@dataclass(frozen=True)
class Finding:
    """A culprit: what it did, for people, and what the others wait for."""

    worker: Worker
    kind: Literal["silent", "hung", "unreachable"]
    phase: str
    what: str
    waiting: str


def step_seconds(job: State) -> float:
    """What a step takes: as it did, or longer where fewer members have more shards each than it was with."""
    most = job.view.most_shards if job.view is not None else 0
    return max(job.pace, most * job.shard_seconds)


def hang_limit(job: State) -> float:
    return max(_hang_least(job), job.settings.hang_steps * step_seconds(job))


def _hang_least(job: State) -> float:
    """Twice as long for each member that was expelled as hung since the last commit: a sample that takes long
    each time it is read would otherwise cost one worker after the other, and then the job."""
    least = job.settings.hang_least
    return min(least * 2.0 ** min(job.hangs, 30), max(least, job.settings.slow_phase_seconds))


def patience(job: State, worker: Worker) -> float:
    """How long this member may be in one phase. A first step may compile; saving and evaluating take as long
    as they took before, and nobody knows how long the first time."""
    beat = job.beats.get(worker.number)
    if beat is None or beat.step_seconds <= 0 or (beat.phase in SLOW_PHASES and beat.longest <= 0):
        return max(job.settings.slow_phase_seconds, hang_limit(job))
    if beat.phase in SLOW_PHASES:
        return max(hang_limit(job), job.settings.hang_steps * beat.longest)
    return hang_limit(job)


def abort_limit(job: State, worker: Worker) -> float:
    """How long a member may take to report when it is asked to abort: it finishes at most a shard."""
    at_once = max(_hang_least(job), job.settings.silence_steps * job.pace)
    return at_once if patience(job, worker) <= hang_limit(job) else patience(job, worker)


def narrow_limit(job: State) -> float:
    """How long a member may take to report when one of them is to save alone: longer than the view had, for
    it may be in the middle of a shard, and who is not waited for cannot be the one that saves."""
    return 1.5 * job.settings.cut_short_seconds


def install_limit(job: State) -> float:
    restores = job.view is not None and job.view.restore
    return job.settings.slow_phase_seconds if restores else max(job.settings.install_seconds, hang_limit(job))


def forming_since(job: State) -> float:
    """Since when a view forms although the job is to stop or a member to leave."""
    return max(job.asked_at, job.stop_at) if job.stop is not None else job.asked_at


def return_deadline(job: State) -> float:
    """Until when members may come back after the supervisor's restart."""
    return job.asked_at + 4 * job.settings.silence_least


def return_limit(job: State, worker: Worker, now: float) -> float:
    """Until when this member may come back. One that cannot speak cannot connect either and has the time
    that its phase may take: its first heartbeat is to come, so its pace is unknown; that of the job is known
    where a step was committed. Those that are stopped together have the time of a slow phase."""
    slow_limit = max(job.settings.slow_phase_seconds, hang_limit(job))
    if worker.number in job.held:
        return job.asked_at + slow_limit
    if not cannot_speak(job, worker.number, now):
        return return_deadline(job)
    beat = job.beats.get(worker.number)
    slow = beat is None or beat.phase in SLOW_PHASES or not job.committed
    return job.asked_at + (slow_limit if slow else hang_limit(job))


def phase_of(job: State, worker: Worker) -> str:
    """What it was doing when it last said so."""
    beat = job.beats.get(worker.number)
    return beat.phase if beat is not None else "start"


def silent(job: State, now: float) -> list[Finding]:
    """Workers that should beat and do not, and those that never said hello."""
    limit = silence_limit(job)
    found = []
    for worker in job.workers.values():
        if worker.standing is Standing.STARTING:
            if now - worker.since >= job.settings.start_seconds:
                what = f"rank {worker.slot} has not said hello in {job.settings.start_seconds:g} s"
                found.append(Finding(worker, "silent", "start", what, "nobody waits for it"))
        elif worker.back and now >= job.heard[worker.number] + limit:
            quiet = now - job.heard[worker.number]
            if cannot_speak(job, worker.number, now):
                continue
            if worker.number in job.held and quiet < max(job.settings.slow_phase_seconds, limit):
                continue
            what = f"rank {worker.slot} has sent no heartbeat for {quiet:.1f} s"
            found.append(
                Finding(worker, "silent", phase_of(job, worker), what, _who_waits(job, worker.number, now))
            )
    return found


def overdue(job: State, now: float) -> list[Finding]:
    """Members that hold up the others, by what the job waits for. Who is stopped together with all others of
    its machine does, and is not to blame; nor is anybody who waits for it."""
    if job.held:
        return []
    match job.phase:
        case Phase.RUNNING | Phase.STOPPING:
            return _stuck(job, now)
        case Phase.PREPARING if job.abort:
            return _has_not(job, now, "reported")
        case Phase.PREPARING:
            return _stuck(job, now) or _has_not(job, now, "reported")
        case Phase.INSTALLING:
            # Where one was held up, all were: the last ones have a moment to follow it.
            late = now - job.asked_at >= install_limit(job) and now - job.moved_at >= silence_limit(job)
            return [
                _finding(job, job.workers[number], now, "has not taken over the new view")
                for number in (_culprits_in(job, now) if late else ())
            ]
    return []


def _has_not(job: State, now: float, done: str) -> list[Finding]:
    """Those who did not report in time. Towards a boundary they still compute, and who goes from shard to
    shard, or waits for one that does, is not late: only what nothing else explains is."""
    found = []
    awaited = {} if job.abort else waits(job, now)
    for number in sorted(job.waiting):
        worker = job.workers[number]
        if worker.standing is Standing.READY:
            limit = hang_limit(job)
        elif job.narrow:
            limit = narrow_limit(job)
        elif job.abort:
            limit = abort_limit(job, worker)
        else:
            limit = max(job.settings.slow_phase_seconds, hang_limit(job))
        late = now - job.asked_at
        if not job.abort:
            late = min(late, now - job.moved_at)
            if worker.standing is not Standing.READY:
                explained = any(peer in job.waiting for peer in awaited.get(number, ()))
                late = 0.0 if explained else min(late, _lasted(job, number, now))
        if late >= limit:
            found.append(_finding(job, worker, now, f"has not {done} after {late:.1f} s"))
    return found


def _stuck(job: State, now: float) -> list[Finding]:
    still = now - job.moved_at
    if still < job.settings.hang_least:
        return []
    members = [
        worker
        for worker in in_view(job)
        if worker.standing is not Standing.DONE
        and (job.phase is not Phase.PREPARING or worker.number in job.waiting)
    ]
    lasted = {worker.number: _lasted(job, worker.number, now) for worker in members}
    late = [worker for worker in members if min(still, lasted[worker.number]) >= patience(job, worker)]
    awaited = waits(job, now)
    waited_for = Counter(peer for peers in awaited.values() for peer in peers)
    idle = [worker for worker in late if worker.number not in awaited]
    culprits = [worker for worker in idle if waited_for[worker.number]]
    if not culprits:
        # One that waits lets go of the interpreter: where that is held, something else goes on than waiting.
        busy = [
            worker
            for worker in idle
            if phase_of(job, worker) not in _passive or cannot_speak(job, worker.number, now)
        ]
        if len(busy) == len(members):
            busy = [
                worker
                for worker in busy
                if min(still, lasted[worker.number]) >= _all_busy * patience(job, worker)
            ]
        culprits = sorted(busy, key=lambda worker: -lasted[worker.number])[:1]
    if not culprits and late and len(late) == len(members) and all(w.number in awaited for w in late):
        # They wait for each other: a link that does not carry everything, a lost message, or a deadlock.
        link = broken_link(job, awaited, [worker.number for worker in late])
        if link is not None:
            return [_finding(job, link.end, now, "does not go on", because=link.says)]
        # The member that most wait for has to go.
        culprits = [max(late, key=lambda w: (waited_for[w.number], lasted[w.number], w.slot))]
    return [_finding(job, worker, now, "does not go on") for worker in culprits]


def _culprits_in(job: State, now: float) -> list[int]:
    """Of those who have not installed: who is waited for and waits for nobody, else who waits for nobody,
    else who is waited for most."""
    awaited = waits(job, now)
    waited_for = Counter(peer for peers in awaited.values() for peer in peers)
    idle = [number for number in sorted(job.waiting) if number not in awaited]
    named = [number for number in idle if waited_for[number]]
    if named or idle:
        return named or idle
    link = broken_link(job, awaited, job.waiting)
    if link is not None:
        return [link.end.number]
    return [max(job.waiting, key=lambda n: (waited_for[n], _lasted(job, n, now), job.workers[n].slot))]


def waits(job: State, now: float) -> dict[int, tuple[int, ...]]:
    """Whom each worker waits for, of those who are still there. Who cannot speak said so before something
    else took hold of it."""
    found = {}
    for number, beat in job.beats.items():
        if beat.waits_for and number in job.workers and not cannot_speak(job, number, now):
            peers = tuple(peer for peer in beat.waits_for if peer in job.workers and peer != number)
            if peers:
                found[number] = peers
    return found


def _lasted(job: State, number: int, now: float) -> float:
    """How long it has been in its phase."""
    beat = job.beats.get(number)
    return beat.seconds + now - job.heard[number] if beat is not None else 0.0


def _finding(job: State, worker: Worker, now: float, says: str, because: str = "") -> Finding:
    phase = phase_of(job, worker)
    takes = f"; a step takes {job.pace:.3g} s" if job.pace > 0 else ""
    if cannot_speak(job, worker.number, now):
        takes += "; it does not beat though its process runs: something holds the interpreter's lock"
    what = f"rank {worker.slot} {says}: it is in {phase} for {_lasted(job, worker.number, now):.1f} s{takes}"
    if because:
        what += f"; {because}"
    return Finding(worker, "hung", phase, what, _who_waits(job, worker.number, now))


def _who_waits(job: State, number: int, now: float) -> str:
    slots = [job.workers[other].slot for other, peers in waits(job, now).items() if number in peers]
    verb = "waits" if len(slots) == 1 else "wait"
    return f"{ranks(slots)} {verb} for it" if slots else "nobody said that it waits for it"


def next_due(job: State, now: float) -> float:
    """When something can happen by time alone. Early is harmless: the tick finds nothing and asks again."""
    if job.phase is Phase.ENDED:
        return inf
    settings = job.settings
    times = [now + max(settings.silence_least, settings.heartbeat), job.gather_at]
    limit, probe = silence_limit(job), probe_limit(job)
    for worker in job.workers.values():
        if worker.standing is Standing.STARTING:
            times.append(worker.since + settings.start_seconds)
        elif worker.back or job.phase is Phase.RETURNING:
            if worker.standing is Standing.READY and worker.dialed:
                times.append(worker.dialed_at + settings.dial_seconds)
            heard = job.heard[worker.number]
            # Silence is looked into once in a heartbeat until it is judged.
            times.append(
                heard + probe if now < heard + probe else min(now + settings.heartbeat, heard + limit)
            )
    times += [slot.starts_at for slot in job.slots.values() if slot.starts_at is not None]
    if job.stop is not None:
        times.append(job.stop_at + settings.stop_seconds)
    if job.doubts:
        times.append(job.doubted_at + settings.check_seconds)
    match job.phase:
        case Phase.PREPARING if job.narrow:
            times.append(job.asked_at + narrow_limit(job))
        case Phase.PREPARING if job.abort:
            times += [job.asked_at + abort_limit(job, job.workers[number]) for number in job.waiting]
        case Phase.RUNNING | Phase.STOPPING | Phase.PREPARING:
            times += [job.moved_at + hang_limit(job) / 2, job.moved_at + hang_limit(job)]
        case Phase.INSTALLING:
            times.append(job.asked_at + install_limit(job))
            if job.stop is not None or any(w.leaves == "preempted" for w in in_view(job)):
                times.append(forming_since(job) + settings.cut_short_seconds)
        case Phase.RETURNING:
            times.append(return_deadline(job))
        case Phase.STARTING:
            times.append(job.started_at + settings.start_seconds)
    # What lay in the past and could not be helped is looked at again a heartbeat later.
    soon = now + _least_gap
    return min((at if at > now else max(soon, now + settings.heartbeat)) for at in times)


def shifted(job: State, seconds: float) -> None:
    """Forget that so much time has passed."""
    job.workers = {
        n: replace(worker, since=worker.since + seconds, dialed_at=worker.dialed_at + seconds)
        for n, worker in job.workers.items()
    }
    job.slots = {
        n: slot if slot.starts_at is None else replace(slot, starts_at=slot.starts_at + seconds)
        for n, slot in job.slots.items()
    }
    job.heard = {number: at + seconds for number, at in job.heard.items()}
    job.probed = {number: (at + seconds, probe) for number, (at, probe) in job.probed.items()}
    for clock in _clocks:
        setattr(job, clock, getattr(job, clock) + seconds)
    if job.failed_at is not None:
        job.failed_at += seconds
