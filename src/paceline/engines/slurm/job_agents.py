"""Agents as jobs of their own: an array of jobs of one node each, and another one for what is missing."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, final

from paceline.core.errors import CommTimeoutError, PacelineError, UnavailableError, UsageError
from paceline.engines.engine import LogLine, NodeState, NodeStatus
from paceline.engines.slurm import directives, slurm_commands as commands
from paceline.engines.slurm.shared_folder import SharedFolder, abandoned, abandoned_jobs, remove_folder
from paceline.engines.slurm.slurm_commands import JobRecord

_log = logging.getLogger(__name__)

PENDING_STATES: Final = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT")
RUNNING_STATES: Final = ("RUNNING", "SUSPENDED", "STOPPED", "RESIZING", "SIGNALING", "STAGE_OUT")
LOST_STATES: Final = ("NODE_FAIL", "BOOT_FAIL", "REVOKED")
# Reasons for which SLURM keeps a job pending until a user changes the job.
_NEVER: Final = (
    "AccountNotAllowed",
    "BadConstraints",
    "InvalidAccount",
    "InvalidQOS",
    "PartitionInactive",
    "PartitionNodeLimit",
    "PartitionTimeLimit",
    "QOSNotAllowed",
)
_STOP_SECONDS: Final = 10.0
_PAUSE_SECONDS: Final = 0.1


def status_of(node: int, record: JobRecord) -> NodeStatus:
    """Return what became of the agent that this job is."""
    reason = "" if record.reason in ("None", "") else record.reason
    if record.state in PENDING_STATES:
        return NodeStatus(node, "pending", reason=reason)
    if record.state in RUNNING_STATES:
        return NodeStatus(node, "running", record.nodes)
    state: NodeState = "lost" if record.state in LOST_STATES else "ended"
    code = None if state == "lost" else os.waitstatus_to_exitcode(record.status)
    plain = record.state in ("COMPLETED", "FAILED", "COMPLETING")
    return NodeStatus(node, state, record.nodes, code, "" if plain else f"SLURM says {record.state}")


@final
@dataclass
class _AgentJob:
    """An agent: the job that it is ("17_0"), and the last that was seen of it."""

    job: str
    task: str
    status: NodeStatus
    leaving: bool = False

    @property
    def name(self) -> str:
        return f"{self.job}_{self.task}"

    @property
    def is_over(self) -> bool:
        return self.status.state in ("ended", "lost")


@final
class JobAgents:
    """Agents that sbatch was asked for (engine.EngineJob). `options`: those that the script has."""

    def __init__(
        self, script: str, options: Mapping[str, str], folder: SharedFolder, nodes: int, poll_seconds: float
    ) -> None:
        self._script, self._options, self._folder = script, options, folder
        self._poll_seconds = poll_seconds
        self._agents: list[_AgentJob] = []
        self._asked_at = 0.0
        self._trouble = ""
        self._stopped = False
        self._is_unanswered = False  # whether SLURM may have taken a request whose answer did not come
        self._last_lines: list[LogLine] = []
        try:
            self._ask(nodes)
        except BaseException:
            self._end_jobs()
            folder.remove()
            raise

    def _ask(self, count: int) -> None:
        self._cancel_unanswered()
        # As arguments too: SBATCH_PARTITION and the like win over the lines of a script.
        command = ["sbatch", "--parsable", *directives.arguments(self._options), f"--array=0-{count - 1}"]
        self._is_unanswered = True
        try:
            job = commands.call(command, stdin=self._script).strip().split(";")[0]
        except UsageError:
            self._is_unanswered = False  # a refusal is an answer
            raise
        self._is_unanswered = False
        for task in range(count):
            node = len(self._agents)
            self._agents.append(_AgentJob(job, str(task), NodeStatus(node, "pending")))
            self._folder.watch(node, f"agent-{job}_{task}.log")
        self._folder.note_jobs(sorted({agent.job for agent in self._agents}))
        self._asked_at = 0.0

    def _cancel_unanswered(self) -> None:
        """Cancel the jobs of requests whose answers did not come: nothing else would end them. No other run
        has its output in this folder."""
        if self._is_unanswered:
            known = {agent.job for agent in self._agents}
            for job in commands.jobs_in(self._folder.path, "STDOUT"):
                if job not in known:
                    commands.cancel(job)
            self._is_unanswered = False

    def poll(self) -> Sequence[NodeStatus]:
        now = time.monotonic()
        if now - self._asked_at >= self._poll_seconds:
            self._asked_at = now
            self._look()
        return [agent.status for agent in self._agents]

    def _look(self) -> None:
        active = [agent for agent in self._agents if not agent.is_over]
        try:
            found = commands.records(sorted({agent.job for agent in active}))
        except (UnavailableError, CommTimeoutError) as error:
            # Jobs run on while the controller is away: nothing is known, and nothing is lost.
            if not self._trouble:
                _log.warning("the state of agents is not known: %s", error.message)
            self._trouble = error.message
            return
        self._trouble = ""
        records = {(record.job, record.task): record for record in found}
        for agent in active:
            record = records.get((agent.job, agent.task))
            if record is None:
                reason = "SLURM has no record of its job any more"
                agent.status = NodeStatus(agent.status.node, "lost", agent.status.host, None, reason)
            else:
                agent.status = status_of(agent.status.node, record)
        self._refuse_hopeless()

    def _refuse_hopeless(self) -> None:
        """Raise where no agent runs and SLURM will never start those that wait."""
        waiting = [agent.status for agent in self._agents if not agent.is_over]
        if waiting and all(status.state == "pending" and status.reason in _NEVER for status in waiting):
            raise UsageError(
                f"SLURM will not start the agents: {waiting[0].reason}",
                remedy="ask for what the partition allows (`scontrol show partition`): nodes, time, account",
            )

    def scale(self, nodes: int) -> None:
        active = [agent for agent in self._agents if not agent.is_over and not agent.leaving]
        if len(active) < nodes:
            self._ask(nodes - len(active))
        for agent in reversed(active[nodes:]):
            agent.leaving = True
            if agent.status.state == "pending":
                commands.cancel(agent.name)
            else:
                commands.cancel(agent.name, signal="TERM", batch=True)

    def logs(self) -> Iterable[LogLine]:
        if self._stopped:
            last, self._last_lines = self._last_lines, []
            return last
        return self._folder.lines()

    def stop(self) -> None:
        if self._stopped:
            return
        self._stopped = True
        try:
            self._end_jobs()
        finally:
            self._last_lines = list(self._folder.lines(whole=True))
            self._folder.remove()

    def _end_jobs(self) -> None:
        """Cancel every job, and wait a few seconds for their ends: a job that ends writes to the folder."""
        jobs = sorted({agent.job for agent in self._agents})
        deadline = time.monotonic() + _STOP_SECONDS
        try:
            self._cancel_unanswered()
            for job in jobs:
                commands.cancel(job)
            while any(not _is_over(record) for record in commands.records(jobs)):
                if time.monotonic() > deadline:
                    _log.warning("jobs of agents still end: %s", ", ".join(jobs))
                    return
                time.sleep(_PAUSE_SECONDS)
        except PacelineError as error:
            _log.warning("whether the agents' jobs have ended is not known: %s", error.message)


def end_abandoned(parent: Path) -> None:
    """Take jobs off the queue whose caller was killed, and remove their folder. Agents that run then end by
    themselves once their run is saved. To be called before a run makes its own folder there."""
    for path, jobs in abandoned(parent):
        try:
            found = commands.records(jobs)
            for record in found:
                if record.state in PENDING_STATES:
                    commands.cancel(f"{record.job}_{record.task}" if record.task else record.job)
            are_over = all(record.state in PENDING_STATES or _is_over(record) for record in found)
            # SLURM took its time to answer: the folder may be that of a caller that lives by now.
            if are_over and abandoned_jobs(path) == jobs:
                remove_folder(path)
        except (PacelineError, OSError) as error:
            why = error.message if isinstance(error, PacelineError) else error.strerror
            _log.warning("jobs %s of a caller that was killed may be left: %s", ", ".join(jobs), why)


def _is_over(record: JobRecord) -> bool:
    return record.state not in (*PENDING_STATES, *RUNNING_STATES, "COMPLETING")
