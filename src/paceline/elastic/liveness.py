"""Who is silent, who only cannot speak, and who was stopped together with all others of a machine.

A heartbeat needs the interpreter's lock, and a worker can be well without it: a C call that holds the lock
for seconds (a large `json.loads`) keeps the thread that beats from running. So before silence is judged the
processes of the silent are probed (ProbeWorkers), by the machine that they run on:

    no answer        the machine cannot be reached, or the process is gone: silent
    stopped          SIGSTOP, a debugger, a freezer: silent; but not where all workers of a machine (or of
                     the job) are stopped at once. Then the cause is outside of them, and none is judged
                     before one of them is heard again, or a slow phase's limit has passed
    runs             and the thread that beats has not had the interpreter since it last spoke: that is held.
                     Its limit is that of the phase (deadlines.py), not that of silence
                     and that thread ran (or the phase is a later one): it could have spoken: silent

Must not change anything but clocks, nor decide what is done about it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from paceline.elastic.model import Beaten, Phase, Probed, Standing
from paceline.elastic.state import State, Worker

_SAME_PHASE_SECONDS = 0.1  # by which two clocks of one phase may differ


def silence_limit(job: State) -> float:
    """How long a worker that should beat may say nothing."""
    settings = job.settings
    return max(settings.silence_least, 8 * settings.heartbeat, settings.silence_steps * job.pace)


def probe_limit(job: State) -> float:
    """After how long a silence the process is probed: early enough for several answers before the end."""
    return silence_limit(job) / 2


def _listened_to(job: State, worker: Worker) -> bool:
    """Whether it should beat, or is expected back."""
    if worker.standing is Standing.STARTING:
        return False
    return worker.back or job.phase is Phase.RETURNING


def to_probe(job: State, now: float) -> tuple[int, ...]:
    """Those whose silence may have to be judged soon."""
    limit = probe_limit(job)
    return tuple(
        number
        for number, worker in job.workers.items()
        if _listened_to(job, worker) and now >= job.heard[number] + limit
    )


def _probe(job: State, number: int, now: float) -> tuple[float, Probed] | None:
    """The answer of its machine, if there is one from this silence that is not too old."""
    found = job.probed.get(number)
    if found is None or found[0] <= job.heard[number] or now - found[0] > silence_limit(job):
        return None
    return found


def cannot_speak(job: State, number: int, now: float) -> bool:
    """Whether its process runs, and its interpreter is held since it last spoke."""
    found = _probe(job, number, now)
    if found is None or found[1].stopped:
        return False
    at, probe = found
    # What shows that the interpreter ran: the thread that beats did, or else another phase began. Either may
    # have been just after the last heartbeat. Where neither is known the process has to do.
    shown = probe.ran if probe.ran >= 0 else probe.seconds
    return shown < 0 or at - job.heard[number] - shown <= probe_limit(job)


def stopped_together(job: State, now: float) -> frozenset[int]:
    """Members of machines all of whose workers are stopped, where there are several; or of the whole job."""
    listened = [worker for worker in job.workers.values() if _listened_to(job, worker)]
    stopped = {
        worker.number
        for worker in listened
        if (found := _probe(job, worker.number, now)) is not None and found[1].stopped
    }
    if not stopped:
        return frozenset()
    # A replacement that came after they fell silent was not there to be stopped: that it runs shows nothing.
    silent_since = max(job.heard[number] for number in stopped)
    listened = [
        worker
        for worker in listened
        if worker.number in stopped or worker.standing is not Standing.READY or worker.since <= silent_since
    ]
    groups = [[worker.number for worker in listened]]
    for place in {worker.place for worker in listened}:
        groups.append([worker.number for worker in listened if worker.place == place])
    return frozenset(
        number for group in groups if len(group) > 1 and stopped.issuperset(group) for number in group
    )


def heed_signs_of_life(job: State, now: float) -> str | None:
    """Look who is stopped together. Where that is over, because one of them is heard or runs again, it is
    from now on that the others are late or not. None: nothing is to be said."""
    before, job.held = job.held, stopped_together(job, now)
    awake = before - job.held
    if awake:
        _begin_anew(job, before, now)
        return f"{len(awake)} workers that were stopped together are not any longer"
    return f"{len(job.held)} workers are stopped together: none of them is to blame" if job.held else None


def _begin_anew(job: State, members: Iterable[int], now: float) -> None:
    """Time in which all stood still is not held against anybody."""
    for number in members:
        if number in job.heard:
            job.heard[number] = now
    job.moved_at = job.asked_at = now


def with_phase(job: State, probe: Probed, now: float) -> None:
    """The page of a process knows its phase better than its last heartbeat, which may have come just before
    it entered it; who entered another phase waits for nobody that it said it waited for."""
    if probe.seconds < 0 or not probe.phase:
        return
    beat = job.beats.get(probe.member) or Beaten(probe.member, "", 0.0)
    quiet = now - job.heard[probe.member]
    lasted = beat.seconds + quiet
    if beat.phase == probe.phase and abs(lasted - probe.seconds) <= _SAME_PHASE_SECONDS:
        return
    job.beats[probe.member] = replace(
        beat, phase=probe.phase, seconds=max(0.0, probe.seconds - quiet), waits_for=()
    )
