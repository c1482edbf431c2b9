"""The agents of one run: asks the engine for them, replaces those that are lost, shows what they write.

Runs in a thread of the process that waits for the run. It takes no part in repair: the supervisor notices a
lost agent by its connection, and training goes on without it; here only another one is asked for. An agent
that ends again and again without having stayed is a mistake that no repetition mends: after some attempts in
a row the fleet gives up, and `failure` says what the last agents wrote.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, final

from paceline.core.backoff import doubled
from paceline.core.clock import Clock, MonotonicClock
from paceline.core.errors import CommTimeoutError, PacelineError, PeerLostError, UnavailableError
from paceline.core.untrusted import printable
from paceline.core.wording import counted
from paceline.engines.engine import (
    STAY_SECONDS,
    AgentSpec,
    Engine,
    EngineJob,
    NodeStatus,
    most_nodes,
    named_hosts,
)

POLL_SECONDS: Final = 0.25
_FIRST_BACKOFF_SECONDS: Final = 0.5
_MOST_BACKOFF_SECONDS: Final = 30.0
_MAX_FAILURES: Final = 4  # in a row, of agents that did not stay
_START_SECONDS: Final = 30.0  # that an agent may take on its host until it runs
_WAIT_NOTICE_SECONDS: Final = 10.0
_TROUBLE_SECONDS: Final = 5.0  # until a request that failed is made again
_AWAY_SECONDS: Final = 120.0  # that an engine may be away while no agent runs: a controller that restarts
_SAY_AGAIN_SECONDS: Final = 60.0
_KEPT_LINES: Final = 30


@final
@dataclass
class _Known:
    """An agent that was seen. `since`: when it was first seen to run."""

    status: NodeStatus
    since: float


@final
class AgentFleet:
    """Agents of one engine, kept at a number. Close it; `failure` is an error once nothing more will come."""

    def __init__(
        self, engine: Engine, spec: AgentSpec, secret: bytes, say: Callable[[str], object],
        clock: Clock | None = None,
    ) -> None:  # fmt: skip
        self._engine, self._spec, self._secret, self._say = engine, spec, secret, say
        self._clock = clock or MonotonicClock()
        self._job: EngineJob | None = None
        self._nodes = most_nodes(engine, spec.nodes)
        # Where hosts are named each has a try, and with the next one the engine says that none is left.
        self._hosts = named_hosts(engine)
        self._max_failures = max(_MAX_FAILURES, self._hosts + 1)
        self._known: dict[int, _Known] = {}
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._failures = 0
        self._ask_at = 0.0
        self._away_since: float | None = None  # since when no agent runs, and none could be asked for
        self._has_run = False  # an agent
        self._wait_noticed: str | None = None  # why, as it was said last; None: no wait was mentioned
        self._waits = ""  # how many wait, and why, as it was said last
        self._wait_again_at = 0.0
        self._remedies: dict[str, str] = {}  # of hosts, not said yet
        self._trouble, self._say_again_at = "", 0.0  # what was said last
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self.failure: PacelineError | None = None

    def start(self) -> None:
        """Ask the engine for the agents; raise where it refuses."""
        request = self._engine.request(self._spec)
        self._job = self._engine.submit(request, self._secret)
        self._thread = threading.Thread(target=self._attend, name="paceline-agents", daemon=True)
        self._thread.start()

    def scale(self, nodes: int) -> None:
        """Have another number of agents from the next look on."""
        self._nodes = max(1, nodes)
        self._ask_at = 0.0

    def close(self) -> None:
        """End all agents, and wait for that."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        running = sum(known.status.state == "running" for known in self._known.values())
        if self._waits and running < self._spec.nodes:
            # The run may have ended for that, after hours: the supervisor does not know why no agent came.
            self._say(f"at the end {self._waits}")
        self._waits = ""
        if self._job is not None:
            job, self._job = self._job, None
            try:
                job.stop()
            finally:
                self._show(job)

    def _attend(self) -> None:
        assert self._job is not None
        while self.failure is None and not self._closing.wait(POLL_SECONDS):
            self.turn(self._job)

    def turn(self, job: EngineJob) -> None:
        """Look once, and do what is to be done; note an error of the engine, or of its client."""
        try:
            self._look(job)
        except PacelineError as error:
            self._note_trouble(error)
        except Exception as error:
            trouble = UnavailableError(
                f"{self._engine.name} cannot be asked about the agents: {type(error).__name__}: {error}",
                remedy="see whether the engine is up and can be reached from here",
            )
            trouble.__cause__ = error
            self._note_trouble(trouble)

    def _note_trouble(self, error: PacelineError) -> None:
        """Go on while agents run: an engine that is away for a while, or refuses a further agent, takes
        nothing from them. Where the last one was lost, an engine that is away has some time to come back;
        where none has ever run, none will come."""
        now = self._clock.now()
        self._ask_at = now + _TROUBLE_SECONDS
        trains = any(known.status.state == "running" for known in self._known.values())
        if trains or self._away_since is None:
            self._away_since = now
        may_pass = isinstance(error, UnavailableError | CommTimeoutError) and self._has_run
        if not trains and not (may_pass and now - self._away_since < _AWAY_SECONDS):
            self.failure = error
        elif error.message != self._trouble or now >= self._say_again_at:
            self._trouble, self._say_again_at = error.message, now + _SAY_AGAIN_SECONDS
            goes_on = "training goes on, and what it lacks" if trains else "what the run lacks"
            self._say(f"{printable(error.message)}; {goes_on} is asked for again")

    def _look(self, job: EngineJob) -> None:
        """Show what was written, note ends, and ask for what is missing."""
        now = self._clock.now()
        self._show(job)
        statuses = job.poll()
        for status in statuses:
            self._note(status, now)
        active = sum(status.state in ("pending", "running") for status in statuses)
        if self._failures >= self._max_failures and not any(self._may_stay(one, now) for one in statuses):
            self.failure = self._hopeless()
        elif active == self._nodes:
            self._away_since = None
        elif now >= self._ask_at:
            job.scale(self._nodes)
            self._ask_at, self._away_since = now + POLL_SECONDS, None
        if any(status.state == "running" for status in statuses):
            self._say_remedies()
        self._notice_wait(statuses, now)

    def _may_stay(self, status: NodeStatus, now: float) -> bool:
        """Return whether an agent runs, or is being started on a host."""
        is_starting = status.state == "pending" and status.host != ""
        return status.state == "running" or (
            is_starting and now - self._known[status.node].since < _START_SECONDS
        )

    def _note(self, status: NodeStatus, now: float) -> None:
        before = self._known.get(status.node)
        if before is not None and before.status.state == status.state:
            before.status = status  # the engine may find out later where an agent is, or why it waits
            return
        since = now if before is None or before.status.state == "pending" else before.since
        self._known[status.node] = _Known(status, since)
        self._has_run |= status.state == "running"
        if status.state == "running" and status.host:
            self._say(f"agent {status.node} runs on {status.host}")
        elif status.state in ("ended", "lost"):
            has_run = before is not None and before.status.state == "running"
            stayed = has_run and now - since >= STAY_SECONDS
            left = status.state == "ended" and status.code == 0
            self._failures = 0 if stayed or left else self._failures + 1
            self._ask_at = now + self._pause()
            if not left:
                why = status.reason or (
                    f"it ended with code {status.code}" if status.code is not None else ""
                )
                self._say(f"agent {status.node}{_on(status)} is {status.state}: {printable(why)}")
                if status.remedy:
                    self._remedies[status.host] = status.remedy

    def _pause(self) -> float:
        """Return the seconds until the next agent is asked for. A host that is named has a pause of its own,
        which keeps no other host from its try."""
        if self._failures == 0 or self._hosts:
            return 0.0
        return doubled(_FIRST_BACKOFF_SECONDS, self._failures - 1, _MOST_BACKOFF_SECONDS)

    def _say_remedies(self) -> None:
        """Say what can be done about hosts that are lost to a run which goes on; the error of one that does
        not has the remedy itself."""
        for host, remedy in self._remedies.items():
            self._say(f"to have {host} again: {printable(remedy)}")
        self._remedies.clear()

    def _show(self, job: EngineJob) -> None:
        for line in job.logs():
            known = self._known.get(line.node)
            where = known.status.host if known is not None and known.status.host else f"agent {line.node}"
            text = printable(line.text)
            self._lines.append(text)
            self._say(f"[{where}] {text}")

    def _notice_wait(self, statuses: Sequence[NodeStatus], now: float) -> None:
        """Say that the engine has given no node for a while, and why if it says so: when it first does, and
        from time to time where that changes."""
        pending = [
            status
            for status in statuses
            if status.state == "pending" and now - self._known[status.node].since >= _WAIT_NOTICE_SECONDS
        ]
        if not pending:
            self._wait_noticed, self._waits = None, ""
            return
        why = next((status.reason for status in pending if status.reason), "")
        if why == self._wait_noticed or (self._wait_noticed and (not why or now < self._wait_again_at)):
            return
        self._wait_noticed, self._wait_again_at = why, now + _SAY_AGAIN_SECONDS
        waits = f"{counted(len(pending), 'agent', 'waits', 'wait')} for a node of {self._engine.name}"
        self._waits = f"{waits}: {printable(why)}" if why else waits
        self._say(self._waits)

    def _hopeless(self) -> PacelineError:
        last = [known.status for known in self._known.values() if known.status.state in ("ended", "lost")]
        named = next((status for status in reversed(last) if status.reason), None)
        why = "" if named is None else named.reason
        code = last[-1].code if last else None
        remedy = "" if named is None else named.remedy
        # What agents wrote is for the reader where the engine itself does not know what to do.
        tail = "" if remedy else "\n".join(f"  {line}" for line in list(self._lines)[-8:])
        wrote = f"; the agents' last lines:\n{tail}" if tail else ""
        how = why or (f"exit code {code}" if code is not None else "no reason was given")
        return PeerLostError(
            f"no agent of {self._engine.name} stayed, the last of {len(self._known)}: {how}{wrote}",
            remedy=remedy
            or "see that Paceline is installed on the nodes in the same version, that they reach "
            f"{self._spec.address[0]}:{self._spec.address[1]}, and what the engine's own log says",
        )


def _on(status: NodeStatus) -> str:
    return f" on {status.host}" if status.host else ""
