"""Ends of workers' processes, and the files they left: results, failure reports, exceptions."""

from __future__ import annotations

import os
import signal
from typing import Final, final

from paceline.control.messages import WorkerException, WorkerFileChunk
from paceline.control.spool import START_OVER_EXIT_CODE, SUPERVISOR_LOST_EXIT_CODE
from paceline.core.errors import PacelineError
from paceline.elastic.machine.actions import FailureKind
from paceline.elastic.machine.machine_events import FromMember, WorkerLost
from paceline.elastic.supervisor.worker_files import ReceivedFiles
from paceline.elastic.supervisor.worker_record import WorkerRecord
from paceline.engines.local import failure_report, memfd_pickle
from paceline.engines.local.blame import how_ended
from paceline.engines.local.oom_detection import OomWatch
from paceline.engines.local.worker_handle import WorkerProcess

_MAX_FAILURES: Final = 16


@final
class WorkerExits:
    """Turns ended processes into events, and keeps what they left. `results` and `failures` are descriptors,
    by member; of failures the latest are kept. Results count only while the job ends (`keep_results`): a
    worker that is released earlier returns nothing of use. `oom` remembers which limit applies to the memory
    of a running process: afterwards it cannot be read."""

    def __init__(self) -> None:
        self.oom = OomWatch()
        self.keep_results = False
        self.results: dict[int, tuple[int, ...]] = {}
        self.failures: dict[int, tuple[int, ...]] = {}
        self._received = ReceivedFiles()

    def add_chunk(self, chunk: WorkerFileChunk) -> None:
        """Add a part of a file that a worker of another host left."""
        self._received.add(chunk)

    def refused(self, record: WorkerRecord, error: PacelineError) -> FromMember | WorkerLost:
        """Return the event for a process that the fork server did not start."""
        self.failures[record.member] = (
            memfd_pickle.dump(failure_report.describe(error)),
            memfd_pickle.dump(error),
        )
        if error.fault == "user":
            return _raised(record, str(error), "user")
        return WorkerLost(record.member, "exit", f"it could not be started: {error.message}")

    def ended(
        self, record: WorkerRecord, status: int | None, remote_reason: str, *, memory: bool = False
    ) -> FromMember | WorkerLost | None:
        """Return the event for a process that ended; None where it was expected to, or has reported why. For
        a worker of another host its agent knows the reason, and whether `memory` ran out."""
        failed = self._take_files(record)
        if record.dismissal is not None or record.exception is not None or (record.finished and status == 0):
            self.oom.forget(record.pid)
            return None
        if status == SUPERVISOR_LOST_EXIT_CODE and record.inherited and record.hello is None:
            # It left before this supervisor came: that is no failure of the worker, whatever it raised last.
            self.oom.forget(record.pid)
            _close_files(self.failures, record.member)
            return WorkerLost(record.member, "unattended", "the supervisor stayed away, so it saved and left")
        if status == START_OVER_EXIT_CODE:
            self.oom.forget(record.pid)
            reason = "there is no checkpoint to go back to, so it starts over"
            return WorkerLost(record.member, "restart", reason)
        if failed and status is not None:
            described = memfd_pickle.load(failed[0])
            if isinstance(described, failure_report.FailureReport):
                return _raised(record, described.summary, described.fault)
        if status is None:
            reason = remote_reason or "the process is gone; its exit status is not known"
            return WorkerLost(record.member, "crash", reason)
        if memory:
            return WorkerLost(record.member, "memory", remote_reason)
        kind, reason = exit_reason(status)
        if record.process is not None:
            # After the expected ends above: a dismissed worker that was killed for not ending must not use up
            # the count of a kill for memory that another worker died of.
            out_of_memory, reason = describe_exit(record.process, status, self.oom)
            kind = "memory" if out_of_memory else kind
        return WorkerLost(record.member, kind, remote_reason or reason)

    def close(self) -> None:
        """Close all descriptors."""
        self._received.close()
        for files in (self.results, self.failures):
            for member in list(files):
                _close_files(files, member)

    def _take_files(self, record: WorkerRecord) -> tuple[int, ...]:
        if record.process is None:
            returned, failed = self._received.release(record.member)
        else:
            returned, failed = record.process.release()
        if returned:
            self.results[record.member] = returned
        if not self.keep_results:
            _close_files(self.results, record.member)
        if failed:
            self.failures[record.member] = failed
        while len(self.failures) > _MAX_FAILURES:
            _close_files(self.failures, next(iter(self.failures)))
        return failed


def _close_files(files: dict[int, tuple[int, ...]], member: int) -> None:
    for descriptor in files.pop(member, ()):
        os.close(descriptor)


def exit_reason(status: int) -> tuple[FailureKind, str]:
    """Describe a process's exit status in one word and in a sentence."""
    killed: FailureKind = "preempted" if status == -signal.SIGTERM else "crash"
    return "exit" if status >= 0 else killed, f"the process {how_ended(status)}"


def describe_exit(process: WorkerProcess, status: int, oom: OomWatch) -> tuple[bool, str]:
    """Return whether the kernel killed a process of this host for memory, and a sentence about its end. Call
    once: it forgets the memory limit."""
    if status == -signal.SIGKILL:
        # The kernel's kill for memory looks like any other: the counters of the cgroup, noted while the
        # process lived, tell them apart. Asked once: each kill that was counted explains one death.
        explanation = oom.explain(process.pid)
        if explanation is not None:
            return True, explanation
    oom.forget(process.pid)
    reason = exit_reason(status)[1]
    frames = process.frames() if status < 0 else []
    return False, f"{reason}; it was at {frames[0]}" if frames else reason


def _raised(record: WorkerRecord, summary: str, fault: str) -> FromMember:
    """Return the exception of a worker that could not send it."""
    return FromMember(
        record.member, WorkerException(summary=summary, traceback="", phase="start", fault=fault)
    )
