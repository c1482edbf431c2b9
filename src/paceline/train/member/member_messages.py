"""Make the messages in which a member describes itself: hello, heartbeat, report, the end, its errors.

Both threads of a worker call these; nothing is changed or sent here. membership.py decides when.
"""

from __future__ import annotations

import os
from typing import Any, final

from paceline.control.field_types import Progress
from paceline.control.messages import (
    CollectiveFailed,
    Heartbeat,
    MemberFinished,
    MemberHello,
    MemberReport,
    View,
    WorkerException,
)
from paceline.control.worker_options import WorkerOptions
from paceline.core import phase_page
from paceline.core.errors import CommTimeoutError, CorruptDataError, PacelineError, PeerLostError
from paceline.core.host import host_identity, host_name
from paceline.core.process_state import resident_bytes
from paceline.core.wording import first_line
from paceline.train.loop.run import Run
from paceline.train.member.machine_shell import MachineShell, members_in
from paceline.train.member.step_reports import StepReports
from paceline.train.state.model_state import quick_hash


@final
class MemberMessages:
    """Messages of one member about itself. `address` is that of its listener, where peers reach it."""

    def __init__(
        self, options: WorkerOptions, run: Run, shell: MachineShell, reports: StepReports, address: Any
    ) -> None:
        self._options, self._shell, self._reports = options, shell, reports
        self._state, self._parts, self._phases = run.state, run.parts, run.parts.phases
        self._endpoint = (str(address[0]), int(address[1]))
        # Of the model as it was built: the supervisor compares it with that of the other members.
        self._model = quick_hash(run.parts.module)
        self.host = host_identity()

    @property
    def _progress(self) -> Progress | None:
        return self._state.progress if self._shell.state.has_state else None

    def hello(self) -> MemberHello:
        return MemberHello(
            member=self._options.member,
            slot=self._options.slot,
            pid=os.getpid(),
            host=self.host,
            hostname=host_name(),
            endpoint=self._endpoint,
            fingerprint=self._parts.fingerprint,
            model=self._model,
            generation=self._shell.state.generation,
            progress=self._progress,
        )

    def heartbeat(self) -> Heartbeat:
        phase, seconds = self._phases.now
        checkpointer = self._parts.checkpointer
        return Heartbeat(
            phase=phase,
            seconds=seconds,
            progress=self._progress,
            waits_for=self._shell.waits_for(),
            shard_seconds=self._reports.shard_seconds,
            step_seconds=self._reports.step_seconds,
            longest=0.0
            if checkpointer is not None and checkpointer.waits_for_storage
            else self._phases.longest(phase),
            rss=resident_bytes(),
        )

    def report(self, generation: int) -> MemberReport:
        """Describe, for the view of `generation`, how far this member is and what it holds."""
        state, held = self._state, self._shell.state.has_state
        transaction = self._parts.transaction
        return MemberReport(
            generation=generation,
            progress=self._progress,
            held_shards=transaction.held if held else (),
            has_private_state=transaction.residuals.kept,
            digest=f"report:{state.hash()}" if held else "",
            agreed=state.agreed_step if held else -1,
            private_shards=transaction.residuals.private_shards,
            trail=state.hashes.recent if held else (),
            memory_changed=held and state.watch.has_changed(state.position.step),
            peers_differed=held and self._peers_differed(),
        )

    def _peers_differed(self) -> bool:
        """Return whether more members of the view held other weights after the last step than held the same.
        Their phase pages outlive them."""
        view, folder, step = self._shell.state.view, self._shell.folder, self._state.position.step
        mine = self._state.watch.left(step)
        if view is None or mine is None or folder is None:
            return False
        others = [member for member in view.members if member != self._options.member]
        found = [phase_page.left(phase_page.page_file(folder, member)) for member in others]
        same = [one[1] == mine for one in found if one is not None and one[0] == step]
        return same.count(False) > same.count(True)

    def finished(self, digest: str) -> MemberFinished:
        """State that this member is at the end of the run, with weights of this hash."""
        state = self._state
        return MemberFinished(
            generation=self._parts.team.generation,
            progress=state.progress,
            hash=digest,
            stopped=state.ended if state.stopped_on_request else None,
        )

    def exception(
        self, error: BaseException, traceback_text: str, *, phase: str, holds: bool
    ) -> WorkerException:
        """Describe what the user's code raised; `holds`: this member has a state that is worth saving."""
        return WorkerException(
            summary=f"{type(error).__name__}: {first_line(error)}",
            traceback=traceback_text,
            phase=phase,
            fault=error.fault if isinstance(error, PacelineError) else "code",
            step=self._phases.step,
            holds=holds,
            progress=self._progress,
        )


def collective_failed(view: View, error: BaseException) -> CollectiveFailed:
    """Return what the supervisor has to know: whose data was damaged, which members were not reached."""
    accused = (error.rank,) if isinstance(error, CorruptDataError) else ()
    unreachable: tuple[int, ...] = ()
    if isinstance(error, PeerLostError):
        unreachable = error.ranks
    elif isinstance(error, CommTimeoutError):
        unreachable = error.waiting_for
    return CollectiveFailed(
        generation=view.generation,
        reason=first_line(error) or type(error).__name__,
        accused=members_in(view, accused),
        unreachable=members_in(view, unreachable),
    )
