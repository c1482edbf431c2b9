"""Agents that local commands keep on other hosts, one command (ssh, mpirun) per agent: an EngineJob.

    request["commands"] = [{"host": "node1", "command": ["ssh", ..., "node1", "..."]}, ...]

The first `nodes` hosts get an agent, the others are spare: they replace hosts that are lost. A command's
standard input carries the secret and then words for `remote_agent`; its end ends the agent. One thread reads
what the commands write, notices their ends, and sends a sign of life.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, final

from paceline.core.backoff import doubled
from paceline.core.clock import Clock, MonotonicClock
from paceline.core.errors import PacelineError, PlatformError, UsageError
from paceline.core.version import VERSION
from paceline.engines import remote_agent
from paceline.engines.engine import STAY_SECONDS, AgentSpec, EngineRequest, LogLine, NodeState, NodeStatus

_TICK_SECONDS: Final = 0.1
_END_SECONDS: Final = 12.0  # remote_agent kills what does not leave within 5 s
_KILL_SECONDS: Final = 2.0
_READ_BYTES: Final = 64 * 1024
_KEPT_LINES: Final = 60  # of each agent, to explain its end: mpirun says a lot after ssh did
_QUOTED_LINES: Final = 3
_UNREAD_LINES: Final = 20_000  # of all agents, for a caller that does not ask for them
_FIRST_PAUSE_SECONDS: Final = 0.5
_LONGEST_PAUSE_SECONDS: Final = 30.0
_NAMED_HOSTS: Final = 5  # in an error


@final
@dataclass(frozen=True)
class CommandEnd:
    """Why a command is over, and what to do about it, where that is known. `is_host_unusable`: another try on
    this host would fail in the same way."""

    state: NodeState
    reason: str
    is_host_unusable: bool = False
    remedy: str = ""


def last_words(lines: Sequence[str]) -> str:
    """Return the last lines that a command wrote, to be put behind why it ended."""
    return f": {' | '.join(line.strip() for line in lines[-_QUOTED_LINES:])}" if lines else ""


def watched_command(agents: AgentSpec, python: str) -> list[str]:
    """Return the command that runs on a host: an agent under the process that watches the connection, from
    which the secret comes."""
    words = [python, "-m", "paceline.engines.remote_agent", VERSION]
    return [*words, *agents.command("/dev/stdin", python)]


ExplainEnd = Callable[[str, int, Sequence[str], bool], CommandEnd]
"""(host, exit code of the command, its last lines, whether the agent had been started) -> why it is over."""


@final
@dataclass(eq=False)
class _Host:
    name: str
    command: list[str]
    failures: int = 0
    retry_at: float = 0.0
    unusable: CommandEnd | None = None
    agent: _AgentCommand | None = None


@final
@dataclass(eq=False)
class _AgentCommand:
    node: int
    host: _Host
    process: subprocess.Popen[bytes]
    state: NodeState = "pending"
    leaving: bool = False
    code: int | None = None
    reason: str = ""
    remedy: str = ""
    machine: str = ""
    runs_since: float = 0.0
    rest: bytes = b""
    last_lines: deque[str] = field(default_factory=lambda: deque(maxlen=_KEPT_LINES))

    @property
    def is_over(self) -> bool:
        return self.state in ("ended", "lost")

    def say(self, word: str) -> None:
        """Send a word to `remote_agent`; one whose pipe is full or closed cannot be told anything."""
        with contextlib.suppress(OSError):
            assert self.process.stdin is not None
            os.write(self.process.stdin.fileno(), word.encode() + b"\n")


@final
class AgentCommands:
    """The job: see the module. `explain` says why a command of this engine ended."""

    def __init__(
        self, request: EngineRequest, secret: bytes, explain: ExplainEnd, clock: Clock | None = None
    ) -> None:
        self._secret = secret
        self._explain = explain
        self._clock = clock if clock is not None else MonotonicClock()
        self._hosts = [_Host(entry["host"], list(entry["command"])) for entry in request["commands"]]
        self._agents: list[_AgentCommand] = []
        self._unread: deque[LogLine] = deque(maxlen=_UNREAD_LINES)
        self._selector = selectors.DefaultSelector()
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._beat_at = 0.0
        self._thread = threading.Thread(target=self._attend, name="paceline-agent-commands", daemon=True)
        try:
            self.scale(int(request["nodes"]))
        except BaseException:
            self.stop()
            raise
        self._thread.start()

    def poll(self) -> Sequence[NodeStatus]:
        with self._lock:
            return [
                NodeStatus(
                    agent.node,
                    agent.state,
                    agent.machine or agent.host.name,
                    agent.code,
                    agent.reason,
                    agent.remedy,
                )
                for agent in self._agents
            ]

    def scale(self, nodes: int) -> None:
        """See EngineJob. Where all hosts are in use, or failed a moment ago, fewer are asked for: call
        again. Raise where no agent is left, and no host that is worth another try."""
        with self._lock:
            active = [agent for agent in self._agents if not agent.is_over and not agent.leaving]
            if not active:
                self._check_hopeless()
            for agent in active[nodes:]:
                agent.leaving = True
                agent.say("leave")
            for _ in range(nodes - len(active)):
                host = self._free_host()
                if host is None:
                    return
                self._start(host)

    def logs(self) -> Iterable[LogLine]:
        with self._lock:
            lines = list(self._unread)
            self._unread.clear()
            return lines

    def stop(self) -> None:
        self._stopping.set()
        with self._lock:
            processes = [agent.process for agent in self._agents]
            for agent in self._agents:
                if not agent.is_over:
                    agent.say("stop")
        end = self._clock.now() + _END_SECONDS
        for process in processes:
            _wait(process, end - self._clock.now())
        # What does not answer: the end of its input ends the agent on the other side.
        for process in processes:
            process.terminate()
        for process in processes:
            if not _wait(process, _KILL_SECONDS):
                process.kill()
                process.wait()
        if self._thread.is_alive():
            self._thread.join()
        with self._lock:
            for agent in self._agents:
                self._close(agent)
            self._selector.close()

    def _check_hopeless(self) -> None:
        ends = [host.unusable for host in self._hosts if host.unusable is not None]
        if len(ends) == len(self._hosts):
            raise PlatformError(
                f"no host can be used: {'; '.join(end.reason for end in ends[:_NAMED_HOSTS])}"
                + (f"; and {len(ends) - _NAMED_HOSTS} more" if len(ends) > _NAMED_HOSTS else ""),
                remedy=next((end.remedy for end in ends if end.remedy), "see what the agents wrote"),
            )

    def _free_host(self) -> _Host | None:
        """Return the host to use next: one that never failed, else the most hopeful one. One that could not
        be used may be mended while agents run elsewhere; before any has, what is wrong is reported."""
        now = self._clock.now()
        has_run = any(agent.machine for agent in self._agents)
        free = [
            host
            for host in self._hosts
            if host.retry_at <= now
            and (host.agent is None or host.agent.is_over)
            and (host.unusable is None or has_run)
        ]
        return min(free, key=lambda host: (host.unusable is not None, host.failures), default=None)

    def _start(self, host: _Host) -> None:
        try:
            process = subprocess.Popen(
                host.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                bufsize=0, process_group=0,
            )  # fmt: skip  # an own group: Ctrl-C reaches the agents by `leave`, not by the end of ssh
        except OSError as error:
            raise UsageError(
                f"{host.command[0]} cannot be started: {error.strerror}", remedy=f"install {host.command[0]}"
            ) from error
        agent = _AgentCommand(len(self._agents), host, process)
        host.agent = agent
        self._agents.append(agent)
        assert process.stdin is not None
        assert process.stdout is not None
        for stream in (process.stdin, process.stdout):
            os.set_blocking(stream.fileno(), False)
        agent.say(self._secret.hex())
        self._selector.register(process.stdout, selectors.EVENT_READ, agent)

    # the thread

    def _attend(self) -> None:
        while not self._stopping.is_set() or any(not agent.is_over for agent in self._agents):
            ready = self._selector.select(_TICK_SECONDS) if self._selector.get_map() else []
            if not ready:
                self._stopping.wait(_TICK_SECONDS if not self._selector.get_map() else 0)
            with self._lock:
                for key, _ in ready:
                    self._read(key.data)
                for agent in self._agents:
                    if not agent.is_over and (code := agent.process.poll()) is not None:
                        self._end(agent, code)
                self._beat()

    def _beat(self) -> None:
        if self._clock.now() >= self._beat_at:
            self._beat_at = self._clock.now() + remote_agent.BEAT_SECONDS
            for agent in self._agents:
                if not agent.is_over:
                    agent.say("")

    def _read(self, agent: _AgentCommand) -> bool:
        """Take what an agent's command wrote; False where nothing more is there now."""
        output = agent.process.stdout
        assert output is not None
        try:
            data = os.read(output.fileno(), _READ_BYTES)
        except BlockingIOError:
            return False
        if not data and output in self._selector.get_map():
            self._selector.unregister(output)
        *lines, agent.rest = (agent.rest + data).split(b"\n")
        if len(agent.rest) > _READ_BYTES or not data:
            lines, agent.rest = [*lines, agent.rest], b""
        for line in lines:
            self._take(agent, line.decode(errors="replace").rstrip())
        return bool(data)

    def _take(self, agent: _AgentCommand, line: str) -> None:
        words = line.split()
        if words and words[0] == remote_agent.MARK and agent.state == "pending":
            agent.state, agent.machine, agent.runs_since = "running", words[1], self._clock.now()
        elif line:
            agent.last_lines.append(line)
            self._unread.append(LogLine(agent.node, line))

    def _end(self, agent: _AgentCommand, code: int) -> None:
        while self._read(agent):
            pass  # what it wrote before it ended
        host, was_running, now = agent.host, agent.state == "running", self._clock.now()
        try:
            found = self._explain(host.name, code, tuple(agent.last_lines), was_running)
        except PacelineError as error:
            found = CommandEnd("ended", str(error))
        agent.state, agent.reason, agent.remedy = found.state, found.reason, found.remedy
        # Without an agent a code of 0 says that a shell ended, and not that an agent left.
        has_left = code == 0 and was_running
        agent.code = code if has_left or code else None
        if not has_left and not agent.leaving:
            host.unusable = found if found.is_host_unusable else None
            stayed = was_running and now - agent.runs_since >= STAY_SECONDS
            host.failures = 1 if stayed else host.failures + 1
            host.retry_at = now + doubled(_FIRST_PAUSE_SECONDS, host.failures, _LONGEST_PAUSE_SECONDS)
        self._close(agent)

    def _close(self, agent: _AgentCommand) -> None:
        for stream in (agent.process.stdin, agent.process.stdout):
            assert stream is not None
            if stream.closed:
                continue
            if stream in self._selector.get_map():
                self._selector.unregister(stream)
            stream.close()


def _wait(process: subprocess.Popen[bytes], seconds: float) -> bool:
    try:
        process.wait(max(0.0, seconds))
    except subprocess.TimeoutExpired:
        return False
    return True
