"""The workers' processes: started here or by agents, or adopted from an earlier supervisor; watched; ended.

The end of a process is reported at once, with its exit status. A connection that closes while its process
runs has a moment to come back. The machine decides which worker is replaced, and when. At the end of the job
workers are dismissed, waited for and, where they do not end, killed; then the parent gets the outcome.
"""

from __future__ import annotations

import dataclasses
import selectors
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from typing import Final, final

from paceline.control.messages import AgentEnd, AgentStart, Dismissed, WorkerExited, WorkerFileChunk
from paceline.control.worker_options import WorkerOptions
from paceline.core.clock import Clock
from paceline.core.errors import PacelineError
from paceline.elastic.machine.actions import EndJob
from paceline.elastic.machine.machine_events import FromMember, WorkerLost
from paceline.elastic.machine.settings import LOCAL_AGENT
from paceline.elastic.supervisor.agents import Agents
from paceline.elastic.supervisor.component_ports import EventLoop
from paceline.elastic.supervisor.parent_connection import Parent
from paceline.elastic.supervisor.parent_messages import JobOutcome, KeptWorkers
from paceline.elastic.supervisor.worker_exits import WorkerExits
from paceline.elastic.supervisor.worker_record import WorkerRecord, WorkerRecords
from paceline.engines.local.engine_messages import LaunchOrder
from paceline.engines.local.worker_handle import WorkerProcess

# A control client reconnects after 0.02 s; a process whose connection stays closed is cut off or hangs.
RECONNECT_SECONDS: Final = 1.0
_EXIT_SECONDS: Final = 0.5  # within which the fork server reports the exit status of an ended process
# A worker may be moved to another memory group at any time. Reading 32 groups takes a millisecond; the
# others follow in the next turn.
_MEMORY_SECONDS: Final = 1.0
_MEMORY_READS: Final = 32
_FILE_SECONDS: Final = 15.0  # between two parts of a result: the shutdown waits for a large one


@final
@dataclasses.dataclass(frozen=True)
class WorkerLauncher:
    """Starts workers of this host: one order for all, with the options of each. `start` is the engine's;
    `payload`: descriptor of what they run."""

    order: LaunchOrder
    payload: int
    options: WorkerOptions
    start: Callable[[LaunchOrder, int], WorkerProcess]

    def launch(self, member: int, slot: int, attempt: int) -> WorkerProcess:
        options = dataclasses.replace(self.options, member=member, slot=slot, attempt=attempt)
        return self.start(
            dataclasses.replace(
                self.order,
                workers=1,
                options=options.to_plain(),
                first_rank=slot,
                outlives_parent=True,
                outlives_server=True,
            ),
            self.payload,
        )


@final
@dataclasses.dataclass(eq=False)
class Workers:
    """Processes of all workers. Those that need attention soon (disconnected, dismissed, ended) are in
    `_pressing`, so that `due` is cheap for hundreds of others."""

    loop: EventLoop
    launcher: WorkerLauncher
    records: WorkerRecords
    agents: Agents
    parent: Parent
    flush_journal: Callable[[tuple[int, int]], None]  # of a process: rank and pid
    report_verdict: Callable[[int], None]  # of a member
    import_spool: Callable[[], None]
    exits: WorkerExits = dataclasses.field(default_factory=WorkerExits)
    file_came_at: float = -_FILE_SECONDS  # the last part of a file of a worker at an agent
    _memory_at: float = dataclasses.field(init=False)
    _memory_queue: deque[int] = dataclasses.field(default_factory=deque)
    _pressing: set[int] = dataclasses.field(default_factory=set)
    _starts: Counter[int] = dataclasses.field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._memory_at = self.loop.clock.now() + _MEMORY_SECONDS

    @property
    def due(self) -> float:
        due = self._memory_at
        for member in self._pressing:
            record = self.records.live.get(member)
            if record is not None:
                due = min(due, record.exit_by, _give_up_at(record))
        return due

    def tick(self, now: float) -> None:
        """Give up connections that stayed closed; kill workers that were dismissed and did not end."""
        for member in list(self._pressing):
            record = self.records.live.get(member)
            if record is None:
                self._pressing.discard(member)
            elif record.exit_by <= now:
                record.exit_by = float("inf")
                self.kill(record, "it was dismissed and did not end")
            elif _give_up_at(record) <= now:
                self._give_up(record)
        if now >= self._memory_at:
            self._memory_at = now + _MEMORY_SECONDS
            self._watch_memory()

    def start(self, member: int, slot: int, agent_id: int) -> None:
        """Start a worker, here or at an agent."""
        record = WorkerRecord(member, slot, agent_id)
        self.records.live[member] = record
        self._starts[slot] += 1
        if agent_id != LOCAL_AGENT:
            start = AgentStart(member=member, slot=slot, attempt=self._starts[slot])
            if not self.agents.send(agent_id, start):
                self._end(record, WorkerLost(member, "preempted", "its host is gone"))
            return
        try:
            process = self.launcher.launch(member, slot, self._starts[slot])
        except (PacelineError, OSError) as error:
            self._end(record, WorkerLost(member, "exit", f"it could not be started: {error}"))
            return
        self._attend(record, process)

    def adopt(
        self,
        members: Mapping[int, tuple[int, int]],
        processes: Mapping[int, tuple[int, str]],
        kept: KeptWorkers,
    ) -> None:
        """Take over the workers of an earlier supervisor: slot and agent, pid and host name, and what the
        parent kept, each by member."""
        for member, (slot, agent_id) in members.items():
            known = processes.get(member, (0, ""))
            record = WorkerRecord(member, slot, agent_id, predecessor=known, inherited=True)
            self.records.live[member] = record
            self._starts[slot] += 1
            if member in kept:
                process = WorkerProcess.adopt(*kept.pop(member))
                self._attend(record, process)
                if process.has_ended:
                    # The earlier supervisor may have read the exit status: it does not come again.
                    self.disconnected(record, "its process ended")
            elif agent_id == LOCAL_AGENT:
                reason = "it ended while no supervisor was there to see how"
                self._end(record, WorkerLost(member, "crash", reason))

    def joined(self, record: WorkerRecord) -> None:
        """Watch the process of a worker whose pid is known from its hello: the supervisor that died may have
        been the only one that knew it."""
        process = record.process
        if process is None or record.hello is None:
            return
        process.set_pid(record.hello.pid)
        if not process.has_ended:
            self._watch_process(record, process)
        self.exits.oom.note(record.hello.pid)

    def disconnected(self, record: WorkerRecord, reason: str) -> None:
        """Give a worker whose connection closed a moment to reconnect."""
        record.connection = None
        record.disconnected_at, record.disconnect_reason = self.loop.clock.now(), reason
        self._pressing.add(record.member)

    def kill(self, record: WorkerRecord, reason: str) -> None:
        """End a worker's process now."""
        if record.process is not None:
            record.process.kill()
        elif record.agent_id != LOCAL_AGENT:
            self.agents.send(record.agent_id, AgentEnd(member=record.member, reason=reason))

    def dismiss(self, record: WorkerRecord, dismissal: Dismissed, seconds: float) -> None:
        """Let a worker end by itself within `seconds`."""
        if record.pid:
            # While the worker can still send its receipts again, should this supervisor die before.
            self.flush_journal((record.slot, record.pid))
        record.dismissal = dismissal
        if record.member in self.records.live:
            if record.connection is not None:
                record.connection.send(dismissal)
            self.limit_exit(record, seconds)

    def limit_exit(self, record: WorkerRecord, seconds: float) -> None:
        """Kill a worker that has not ended by itself within `seconds`."""
        record.exit_by = min(record.exit_by, self.loop.clock.now() + seconds)
        self._pressing.add(record.member)

    def remote_exit(self, agent_id: int, message: WorkerExited) -> None:
        """Take an agent's report about the end of one of its workers."""
        record = self.records.live.get(message.member)
        if record is not None and record.agent_id == agent_id:
            self._exited(record, message.status, message.reason, memory=message.memory)

    def remote_file(self, agent_id: int, chunk: WorkerFileChunk) -> None:
        """Take a part of what one of an agent's workers returned or raised."""
        record = self.records.live.get(chunk.member)
        if record is not None and record.agent_id == agent_id:
            self.exits.add_chunk(chunk)
            self.file_came_at = self.loop.clock.now()

    def remove_agent(self, agent_id: int, reason: str, *, refuse: bool = False) -> None:
        """Forget an agent and its workers: how those end will not be reported. `refuse`: send it away."""
        if self.agents.remove(agent_id, reason, refuse=refuse):
            for record in [r for r in self.records.live.values() if r.agent_id == agent_id]:
                self._end(record, None)

    def close(self) -> None:
        """Close all descriptors. Workers that still run are not touched."""
        for record in self.records.live.values():
            self._release(record)
        self.records.live.clear()
        self.exits.close()

    def _watch_memory(self) -> None:
        if not self._memory_queue:
            self._memory_queue.extend(self.records.live)
        for _ in range(min(_MEMORY_READS, len(self._memory_queue))):
            record = self.records.live.get(self._memory_queue.popleft())
            if record is not None and record.process is not None and record.process.pid:
                self.exits.oom.note(record.process.pid)

    def _attend(self, record: WorkerRecord, process: WorkerProcess) -> None:
        record.process = process
        self.parent.keep(record.member, process)
        self.loop.selector.register(
            process, selectors.EVENT_READ, lambda mask, now: self._process_ready(record, process)
        )
        self._watch_process(record, process)

    def _watch_process(self, record: WorkerRecord, process: WorkerProcess) -> None:
        """Watch for the end of a process, also where no fork server is left to report it."""
        if record.watched or process.watch < 0:
            return

        def ended(mask: int, now: float) -> None:
            self._unwatch(record)
            record.exited_at = now
            self._pressing.add(record.member)

        record.watched = True
        self.loop.selector.register(process.watch, selectors.EVENT_READ, ended)

    def _unwatch(self, record: WorkerRecord) -> None:
        if record.watched and record.process is not None:
            record.watched = False
            self.loop.selector.unregister(record.process.watch)

    def _process_ready(self, record: WorkerRecord, process: WorkerProcess) -> None:
        before = process.descriptors(), process.pid
        process.receive()
        if (process.descriptors(), process.pid) != before and not process.done:
            self.parent.keep(record.member, process)
        self._watch_process(record, process)
        if process.refusal is not None:
            self._end(record, self.exits.refused(record, process.refusal))
        elif process.status is not None or process.done:
            self._exited(record, process.status, "")

    def _give_up(self, record: WorkerRecord) -> None:
        """Count a worker as lost: its connection stayed closed, or its process ended without an exit
        status."""
        if record.process is not None and record.process.has_ended:
            self._exited(record, None, "")
            return
        record.disconnected_at = None
        if record.agent_id != LOCAL_AGENT and self.agents.is_away(record.agent_id):
            # The agent is cut off too: its host is gone, and with it all of its workers.
            self.remove_agent(record.agent_id, "the connections of its agent and workers closed")
            return
        reason = (
            f"its connection closed ({record.disconnect_reason}) and stayed closed for "
            f"{RECONNECT_SECONDS:g} s"
        )
        self.loop.emit(WorkerLost(record.member, "silent", reason))

    def _exited(
        self, record: WorkerRecord, status: int | None, remote_reason: str, *, memory: bool = False
    ) -> None:
        """Handle the end of a process: first its last messages, then its exit status."""
        if record.connection is not None:
            record.connection.drain()
        self.report_verdict(record.member)
        if status is None and record.process is not None:
            record.process.kill_orphans()
        event = self.exits.ended(record, status, remote_reason, memory=memory)
        if record.inherited:
            # It may have spooled its messages while no supervisor ran, and left.
            self.import_spool()
        self._end(record, event)

    def _end(self, record: WorkerRecord, event: WorkerLost | FromMember | None) -> None:
        self.records.retire(record)
        self._pressing.discard(record.member)
        self.parent.drop(record.member)
        if record.pid:
            self.flush_journal((record.slot, record.pid))
        self._release(record)
        if event is not None:
            self.loop.emit(event)

    def _release(self, record: WorkerRecord) -> None:
        if record.connection is not None:
            record.connection.close()
            record.connection = None
        if record.process is not None:
            self._unwatch(record)
            self.loop.selector.unregister(record.process)
            record.process.close()


def _give_up_at(record: WorkerRecord) -> float:
    """Return when a worker counts as gone: a moment after its process ended or its connection closed."""
    exited = record.exited_at + _EXIT_SECONDS
    if record.disconnected_at is None:
        return exited
    has_ended = record.process is not None and record.process.has_ended
    return min(exited, record.disconnected_at + (_EXIT_SECONDS if has_ended else RECONNECT_SECONDS))


# After a good end workers pack their results and close their files; after a bad one nothing is worth a wait.
CLEAN_EXIT_SECONDS: Final = 60.0
FAILED_EXIT_SECONDS: Final = 5.0
_KILL_SECONDS: Final = 10.0


@final
class Shutdown:
    """`over` once all workers are gone, or not even SIGKILL ends them. `at_once`: kill them."""

    def __init__(
        self, end: EndJob, records: WorkerRecords, workers: Workers, clock: Clock, *, at_once: bool = False
    ) -> None:
        self.end = end
        self._records, self._workers = records, workers
        seconds = 0.0 if at_once else CLEAN_EXIT_SECONDS if end.ok else FAILED_EXIT_SECONDS
        self.due = clock.now() + seconds
        self._killed = False
        self.over = False
        workers.exits.keep_results = True
        if at_once:
            return
        for record in list(records.live.values()):
            # `due` counts for all of them, so each has longer than that.
            workers.dismiss(record, Dismissed(reason=end.reason), 2 * CLEAN_EXIT_SECONDS)
            if record.hello is None:
                # It has not joined: it has nothing to save or to return.
                workers.kill(record, end.reason)

    def tick(self, now: float) -> None:
        """Check which workers are left; kill them once their time is over."""
        live = list(self._records.live.values())
        if all(_is_unreachable(record) for record in live):
            self.over = True
        elif now >= max(self.due, self._workers.file_came_at + _FILE_SECONDS):
            # A process that SIGKILL does not end waits for the kernel; the fork server reaps it later.
            self.over = self._killed
            self._killed = True
            self.due = now + _KILL_SECONDS
            for record in live:
                self._workers.kill(record, "the job is over")


def _is_unreachable(record: WorkerRecord) -> bool:
    """Return whether a worker of another host is cut off or has not joined: its agent ends it with the
    job."""
    return record.agent_id != LOCAL_AGENT and (record.expelled or record.hello is None)


def job_outcome(
    end: EndJob, view: Iterable[int], records: WorkerRecords, exits: WorkerExits, text: str
) -> JobOutcome:
    """Return the outcome for the parent. Its result is that of the first member of the `view` that returned
    one; `text` was shown on the terminal when the job failed."""
    sender = next((member for member in (*view, *exits.results) if member in exits.results), None)
    blamed = records.find(end.failed) if end.failed is not None else None
    return JobOutcome(
        ok=end.ok,
        reason=end.reason,
        stopped=end.stopped,
        result=exits.results[sender][0] if end.ok and sender is not None else None,
        failure=None if end.failed is None else exits.failures.get(end.failed),
        rank=blamed.slot if blamed is not None else None,
        pid=blamed.pid if blamed is not None else None,
        text="" if end.ok else text,
    )
