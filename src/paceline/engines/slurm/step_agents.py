"""Agents as steps of the allocation that this process runs in: one srun per node, and another one, on any node
of the allocation that is free, where an agent has ended.
"""

from __future__ import annotations

import logging
import subprocess
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, final

from paceline.core.errors import CommTimeoutError, PacelineError, UnavailableError
from paceline.engines.engine import LogLine, NodeState, NodeStatus
from paceline.engines.slurm import commands
from paceline.engines.slurm.allocation import environment_for_steps
from paceline.engines.slurm.shared_folder import SharedFolder

_log = logging.getLogger(__name__)

_LEAVE_SECONDS: Final = 5.0
_END_SECONDS: Final = 5.0
_RETRY_SECONDS: Final = 1.0
_MOST_RETRY_SECONDS: Final = 30.0
_UNUSABLE: Final = ("down", "drain", "fail", "inval", "unk", "*")


@final
@dataclass
class _Agent:
    """An agent: its srun, none while it waits for a host; `step` is the step's number once it runs."""

    node: int
    host: str = ""
    srun: subprocess.Popen[bytes] | None = None
    step: str = ""
    leaving: bool = False
    ended: NodeStatus | None = None

    @property
    def name(self) -> str:
        return f"paceline-agent-{self.node}"

    @property
    def status(self) -> NodeStatus:
        if self.ended is not None:
            return self.ended
        if self.step:
            return NodeStatus(self.node, "running", self.host)
        why = "" if self.srun is not None else "no node of the allocation is free"
        return NodeStatus(self.node, "pending", self.host, reason=why)


@final
@dataclass
class _Host:
    """A host of the allocation. `failures` counts agents that ended there, after which others come first."""

    failures: int = 0
    not_before: float = 0.0


@final
@dataclass
class StepAgents:
    """Agents that srun starts (engine.EngineJob). `command` is that of srun for any host: HOST and NAME stand
    for the host's and the step's name."""

    job: str
    command: Sequence[str]
    folder: SharedFolder
    nodes: int
    poll_seconds: float
    _agents: list[_Agent] = field(default_factory=list)
    _hosts: dict[str, _Host] = field(default_factory=dict)
    _looked_at: float = 0.0
    _stopped: bool = False
    _last_lines: list[LogLine] = field(default_factory=list)

    def __post_init__(self) -> None:
        try:
            self.scale(self.nodes)
        except BaseException:
            self.stop()
            raise

    def poll(self) -> Sequence[NodeStatus]:
        now = time.monotonic()
        ended = [agent for agent in self._agents if agent.ended is None and _has_ended(agent)]
        if ended or now - self._looked_at >= self.poll_seconds:
            self._looked_at = now
            self._look(ended, now)
        return [agent.status for agent in self._agents]

    def _look(self, ended: Sequence[_Agent], now: float) -> None:
        try:
            running, usable = commands.steps(self.job), usable_hosts(self.job)
        except (UnavailableError, CommTimeoutError) as error:
            _log.warning("the state of agents is not known: %s", error.message)
            return
        for agent in ended:
            self._note_end(agent, usable, now)
        for agent in self._agents:
            if agent.ended is None and not agent.step:
                agent.step = running.get(agent.name, "")
        self._start_waiting(usable, now)

    def _note_end(self, agent: _Agent, usable: Sequence[str], now: float) -> None:
        assert agent.srun is not None
        code = agent.srun.wait()
        # srun ends with 0 where its node left the allocation.
        lost = agent.host not in usable
        state: NodeState = "lost" if lost else "ended"
        reason = f"{agent.host} is not a usable node of the allocation any more" if lost else ""
        # srun passes a signal of the agent on as 128 and its number.
        code = 128 - code if code > 128 else code
        agent.ended = NodeStatus(agent.node, state, agent.host, None if lost else code, reason)
        host = self._hosts.setdefault(agent.host, _Host())
        if code or lost:
            pause = min(_MOST_RETRY_SECONDS, _RETRY_SECONDS * 2.0**host.failures)
            host.failures, host.not_before = host.failures + 1, now + pause

    def _start_waiting(self, usable: Sequence[str], now: float) -> None:
        """Start agents that wait for a host; hosts on which fewer agents failed come first."""
        taken = {agent.host for agent in self._agents if agent.ended is None}
        free = [host for host in usable if host not in taken]
        free.sort(key=lambda host: self._hosts.setdefault(host, _Host()).failures)
        for agent in self._agents:
            if agent.ended is not None or agent.srun is not None or agent.leaving:
                continue
            host = next((host for host in free if self._hosts[host].not_before <= now), None)
            if host is None:
                return
            free.remove(host)
            self._start(agent, host)

    def _start(self, agent: _Agent, host: str) -> None:
        log = self.folder.watch(agent.node, f"agent-{agent.node}.log")
        words = {"HOST": host, "NAME": agent.name}
        command = [part.format_map(words) for part in self.command]
        with open(log, "ab") as output:
            agent.srun = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment_for_steps(),
                start_new_session=True,  # Ctrl-C is for the supervisor, which ends agents in order
            )
        agent.host = host

    def scale(self, nodes: int) -> None:
        active = [agent for agent in self._agents if agent.ended is None and not agent.leaving]
        for _ in range(nodes - len(active)):
            self._agents.append(_Agent(len(self._agents)))
        for agent in reversed(active[nodes:]):
            agent.leaving = True
            if agent.step:
                commands.cancel(agent.step, signal="TERM")
            elif agent.srun is not None:
                agent.srun.terminate()
            else:
                agent.ended = NodeStatus(agent.node, "ended", "", 0, "it was not needed")
        if len(active) < nodes:
            self._start_waiting(usable_hosts(self.job), time.monotonic())

    def logs(self) -> Iterable[LogLine]:
        if self._stopped:
            last, self._last_lines = self._last_lines, []
            return last
        return self.folder.lines()

    def stop(self) -> None:
        if self._stopped:
            return
        self._stopped = True
        alive = [agent for agent in self._agents if agent.srun is not None and agent.ended is None]
        # The supervisor has told agents that the job is over: most of them end by themselves.
        _wait(alive, _LEAVE_SECONDS)
        try:
            if any(agent.srun is not None and agent.srun.poll() is None for agent in alive):
                self._kill(alive)
        finally:
            for agent in alive:
                if agent.srun is not None:
                    agent.srun.kill()
                    agent.srun.wait()
            self._last_lines = list(self.folder.lines(whole=True))
            self.folder.remove()

    def _kill(self, agents: Sequence[_Agent]) -> None:
        try:
            running = commands.steps(self.job)
            for agent in agents:
                if agent.name in running:
                    commands.cancel(running[agent.name])
            _wait(agents, _END_SECONDS)
        except PacelineError as error:
            _log.warning("whether the agents' steps have ended is not known: %s", error.message)


def usable_hosts(job: str) -> list[str]:
    """Return the hosts of an allocation that SLURM reaches, in its order."""
    nodes = commands.call(["squeue", "--noheader", f"--jobs={job}", "--format=%N"]).strip()
    if not nodes:
        return []
    text = commands.call(["sinfo", "--noheader", "--Node", f"--nodes={nodes}", "--format=%n|%N|%T"])
    bad = set()
    for line in text.splitlines():
        _, name, state = line.split("|")
        if any(part in state.lower() for part in _UNUSABLE):
            bad.add(name.strip())
    return [host for host in commands.expand(nodes) if host not in bad]


def _has_ended(agent: _Agent) -> bool:
    return agent.srun is not None and agent.srun.poll() is not None


def _wait(agents: Sequence[_Agent], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    for agent in agents:
        if agent.srun is None:
            continue
        try:
            agent.srun.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return
