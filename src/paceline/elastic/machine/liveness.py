"""Tell workers that are silent from those whose interpreter is held, and from those stopped with their host.

A heartbeat needs the interpreter lock (GIL), and a healthy worker can be without it: a C call that holds it
for seconds (a large `json.loads`) keeps the heartbeat thread from running. So before silence is judged, the
processes of silent workers are probed (ProbeWorkers) by their hosts:

    no answer        the host cannot be reached, or the process is gone: silent
    stopped          SIGSTOP, a debugger, a freezer: silent; but not where all workers of a host (or of the
                     job) are stopped at once. Then the cause is outside of them, and none is judged before
                     one of them sends a message again, or the limit of a slow phase has passed
    runs             and the heartbeat thread has not had the interpreter since its last message: it is
                     held. The limit is that of the phase (hang_detection.py), not that of silence
                     and the heartbeat thread ran (or the phase is a later one): it could have sent: silent

Changes nothing but clocks; the caller decides what is done about a finding.
"""

from __future__ import annotations

from dataclasses import replace

from paceline.control.messages import Heartbeat
from paceline.core.wording import counted
from paceline.elastic.machine.machine_events import ProcessProbed
from paceline.elastic.machine.state import JobPhase, JobState, Worker, WorkerStatus

_SAME_PHASE_SECONDS = 0.1  # by which two clocks of one phase may differ


def silence_limit(job: JobState) -> float:
    """Return how long a worker that should send heartbeats may be silent."""
    settings = job.settings
    return max(settings.silence_least, 8 * settings.heartbeat, settings.silence_steps * job.step_seconds)


def probe_limit(job: JobState) -> float:
    """Return after which silence a process is probed: early enough for several answers before the limit."""
    return silence_limit(job) / 2


def _listened_to(job: JobState, worker: Worker) -> bool:
    """Return whether the worker should send heartbeats, or is expected to reconnect."""
    if worker.status is WorkerStatus.STARTING:
        return False
    return worker.reconnected or job.phase is JobPhase.RETURNING


def to_probe(job: JobState) -> tuple[int, ...]:
    """Return the workers whose silence may have to be judged soon."""
    limit = probe_limit(job)
    return tuple(
        number
        for number, worker in job.workers.items()
        if _listened_to(job, worker) and job.now >= job.last_message_at[number] + limit
    )


def _probe(job: JobState, number: int) -> tuple[float, ProcessProbed] | None:
    """Return the answer of the worker's host to the probe, if it is of this silence and recent."""
    found = job.probes.get(number)
    if found is None or found[0] <= job.last_message_at[number] or job.now - found[0] > silence_limit(job):
        return None
    return found


def interpreter_is_held(job: JobState, number: int) -> bool:
    """Return whether the process runs, and its interpreter has been held since its last message."""
    found = _probe(job, number)
    if found is None or found[1].stopped:
        return False
    at, probe = found
    # What shows that the interpreter ran: the heartbeat thread did, or else another phase began. Either may
    # have been just after the last heartbeat. Where neither is known the process has to do.
    shown = probe.ran if probe.ran >= 0 else probe.seconds
    return shown < 0 or at - job.last_message_at[number] - shown <= probe_limit(job)


def _find_stopped_together(job: JobState) -> frozenset[int]:
    """Return the members of hosts all of whose workers are stopped, where there are several; or of the whole
    job."""
    listened = [worker for worker in job.workers.values() if _listened_to(job, worker)]
    stopped = {
        worker.number
        for worker in listened
        if (found := _probe(job, worker.number)) is not None and found[1].stopped
    }
    if not stopped:
        return frozenset()
    # As long as none of them runs, whatever was found of workers that came later.
    known = job.stopped_together if stopped >= job.stopped_together else frozenset()
    # A replacement that came after they fell silent was not there to be stopped: that it runs shows nothing.
    silent_since = max(job.last_message_at[number] for number in stopped)
    listened = [
        worker
        for worker in listened
        if worker.status is not WorkerStatus.READY or worker.since <= silent_since
    ]
    groups = [[worker.number for worker in listened]]
    for agent_id in {worker.agent_id for worker in listened}:
        groups.append([worker.number for worker in listened if worker.agent_id == agent_id])
    return known.union(*(group for group in groups if len(group) > 1 and stopped.issuperset(group)))


def update_stopped_together(job: JobState) -> str | None:
    """Update which members are stopped together. When that ends, because one of them sends a message or runs
    again, the silence of the others counts from now on. None: nothing to report."""
    before, job.stopped_together = job.stopped_together, _find_stopped_together(job)
    awake = before - job.stopped_together
    if awake:
        # Time in which all stood still is not held against any of them.
        job.last_message_at.update((number, job.now) for number in before if number in job.last_message_at)
        job.progressed_at = job.asked_at = job.now
        return f"{counted(len(awake), 'worker', 'runs', 'run')} again after being stopped together"
    if not job.stopped_together:
        return None
    stopped = counted(len(job.stopped_together), "worker", "is", "are")
    return f"{stopped} stopped together: none of them is to blame"


def apply_probed_phase(job: JobState, probe: ProcessProbed) -> None:
    """Take the phase from the probed page of a process: it is newer than the last heartbeat. A member that
    has entered another phase no longer waits for the members it had named."""
    if probe.seconds < 0 or not probe.phase:
        return
    heartbeat = job.heartbeats.get(probe.member) or Heartbeat(phase="", seconds=0.0)
    quiet = job.now - job.last_message_at[probe.member]
    lasted = heartbeat.seconds + quiet
    if heartbeat.phase == probe.phase and abs(lasted - probe.seconds) <= _SAME_PHASE_SECONDS:
        return
    job.heartbeats[probe.member] = replace(
        heartbeat, phase=probe.phase, seconds=max(0.0, probe.seconds - quiet), waits_for=()
    )
