"""Carry out the machine's actions: processes, messages, journal lines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, final

from paceline.control.messages import AgentNotice, DialRequest, Dismissed, Prepare, Stop, View
from paceline.core.events import Repaired, ViewChanged
from paceline.elastic.machine import actions
from paceline.elastic.machine.settings import LOCAL_AGENT
from paceline.elastic.supervisor.agents import Agents
from paceline.elastic.supervisor.component_ports import WorkerProcesses
from paceline.elastic.supervisor.journal_writer import JournalWriter
from paceline.elastic.supervisor.parent_connection import Parent
from paceline.elastic.supervisor.process_probe import ProcessProbe
from paceline.elastic.supervisor.verdict_reports import VerdictReports
from paceline.elastic.supervisor.view_messages import ViewMessages, endpoints
from paceline.elastic.supervisor.worker_record import WorkerRecord, WorkerRecords

# A worker that raised sends its traceback and ends by itself; one that was dismissed closes its files.
RAISED_SECONDS: Final = 10.0
DISMISSED_SECONDS: Final = 30.0
REACH_REMEDY: Final = (
    "let the machines connect to each other on the ports of the workers, in both directions; ports= (or "
    "--ports) and interface= (or --interface) choose which"
)


@final
@dataclass(frozen=True)
class ActionExecutor:
    """All actions but the last, EndJob."""

    records: WorkerRecords
    workers: WorkerProcesses
    agents: Agents
    journal: JournalWriter
    verdicts: VerdictReports
    views: ViewMessages
    probe: ProcessProbe
    parent: Parent

    def execute(self, action: actions.Action, judged: set[int]) -> None:
        """Carry out one action; `judged` are members about which the same decision holds a verdict."""
        match action:
            case actions.StartWorker():
                self.workers.start(action.member, action.slot, action.agent_id)
            case actions.KillWorker():
                self._kill(action)
            case actions.ProbeWorkers():
                self.probe.probe(action.members)
            case actions.RequestDial():
                self._dial(action)
            case actions.RejectAgent():
                self.workers.remove_agent(action.agent_id, action.reason, refuse=True)
            case actions.RequestAgents():
                self.parent.send("agents", workers=action.workers)
            case actions.Send(members, Dismissed() as dismissal):
                for member in members:
                    self.workers.dismiss(self.records.find(member), dismissal, DISMISSED_SECONDS)
            case actions.Send(members, message):
                for record in self.records.send(members, message):
                    if isinstance(message, Prepare):
                        record.prepare = message
                    elif isinstance(message, Stop):
                        record.stop = message
            case actions.InstallView():
                self._view(action)
            case actions.RecordFailure():
                record = self.records.find(action.member)
                self.verdicts.failure(action, record, has_verdict=action.member in judged)
                if action.kind == "unreachable" and record.agent_id != LOCAL_AGENT:
                    text = f"{action.reason}\n  try: {REACH_REMEDY}"
                    self.agents.send(record.agent_id, AgentNotice(text=text))
            case actions.RecordVerdict():
                self.verdicts.open(action, self.records.find(action.member))
            case actions.RecordRepair():
                self.journal.write(
                    Repaired(
                        time=self.journal.time(),
                        generation=action.generation,
                        seconds=action.seconds,
                        lost=list(action.lost),
                    )
                )
            case actions.EndJob():
                raise AssertionError("EndJob is carried out by the supervisor itself")

    def _kill(self, action: actions.KillWorker) -> None:
        record = self.records.live.get(action.member)
        if record is None:
            return
        record.expelled = True
        if record.exception is not None:
            self.workers.limit_exit(record, RAISED_SECONDS)
        elif not self.verdicts.after(action.member, lambda: self.workers.kill(record, action.reason)):
            self.workers.kill(record, action.reason)

    def _dial(self, action: actions.RequestDial) -> None:
        """Ask a worker to dial its peers, and its peers to dial it: a firewall may block one direction."""
        peers = [record for number in action.peers if (record := self.records.live.get(number)) is not None]
        worker = self.records.live.get(action.member)
        if worker is None:
            return
        own, *others = endpoints([worker, *peers])
        wanted = ((peer.member, peer.slot, *at) for peer, at in zip(peers, others, strict=True))
        self.records.send([worker.member], DialRequest(peers=tuple(wanted)))
        back = DialRequest(peers=((worker.member, worker.slot, *own),))
        self.records.send([peer.member for peer in peers], back)

    def _view(self, action: actions.InstallView) -> None:
        plan = action.plan
        # Receipts name their generation: those of the old view are written before the new one begins.
        self.journal.flush()
        records = {member: self.records.find(member) for member in plan.members}
        view = self.views.make(plan, records, self.journal.journaled)
        for record in self.records.send(plan.members, view):
            record.view, record.prepare = view, None
        self.journal.write(
            ViewChanged(
                time=self.journal.time(),
                generation=plan.generation,
                reason=action.reason,
                members=list(plan.slots),
                shards=[list(shards) for shards in view.shards],
                pids=list(view.pids),
                hosts=list(view.hostnames),
                step=_committed(view, records),
                behind=[plan.slots[rank] for rank in plan.stale_indexes],
            )
        )


def _committed(view: View, records: Mapping[int, WorkerRecord]) -> int:
    """Return the last step that was committed before this view."""
    if view.restore:
        return view.journaled
    if view.source >= 0:
        source = records[view.members[view.source]].progress
        return source[0] if source is not None else 0
    return max((record.progress[0] for record in records.values() if record.progress is not None), default=0)
