"""The agents of one run on Ray: asked for, watched, replaced, ended.

Each agent has a placement group of one bundle and an actor in it. A group that Ray has no room for stays
pending, and Ray places it as soon as a node is added or free: nothing here has to look for room. One agent
per node: a group names the nodes that are taken, and where two groups meet on a node all the same the second
actor finds the node claimed and is asked for again elsewhere.
"""

from __future__ import annotations

import contextlib
import dataclasses
import uuid
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, final

from paceline.core.clock import Clock, MonotonicClock
from paceline.core.errors import PacelineError, PeerLostError, UnavailableError
from paceline.core.wording import counted
from paceline.engines.engine import EngineRequest, LogLine, NodeState, NodeStatus
from paceline.engines.ray import ray_connection as connection
from paceline.engines.ray.agent_actor import AgentActor
from paceline.engines.ray.avoided_nodes import AvoidedNodes
from paceline.engines.ray.ray_connection import RayConnection
from paceline.engines.ray.ray_settings import RaySettings

_REPORT_SECONDS: Final = 5.0  # of one call that waits for news on the node
_UNREACHABLE_SECONDS: Final = 3.0  # after which an actor that does not answer counts as lost
_CLOSED: Final = ("Socket closed", "Connection refused")  # gRPC's words where the actor's process is gone
_LOST_NODE_SECONDS: Final = 30.0  # in which Ray may still offer a node that is gone
_CLAIMED_NODE_SECONDS: Final = 1.0  # until the agent that was faster there has reported
_LEAVE_SECONDS: Final = 2.0
_LONGEST_REASON: Final = 300
_NODE_LABEL: Final = "ray.io/node-id"
_RESUME: Final = 'start the run again with resume="auto"'


@dataclasses.dataclass
class _AskedAgent:
    """One agent that was asked for. `group` is None in a trial's own placement group."""

    number: int
    group: Any
    actor: Any
    news: Any  # the call that waits on the node
    avoided: frozenset[str]
    state: NodeState = "pending"
    host: str = ""
    node_id: str = ""
    bundle_index: int | None = None
    code: int | None = None
    reason: str = ""
    remedy: str = ""
    next_line: int = 0
    is_leaving: bool = False
    unreachable_since: float | None = None

    @property
    def is_over(self) -> bool:
        return self.state in ("ended", "lost")

    def status(self) -> NodeStatus:
        return NodeStatus(self.number, self.state, self.host, self.code, self.reason, self.remedy)


def submit(settings: RaySettings, request: EngineRequest, secret: bytes) -> RayJob:
    """Ask for the agents of a request."""
    connected = connection.connect(settings)
    with contextlib.ExitStack() as undo:  # Ctrl-C may come at any point
        connected.users += 1
        undo.callback(connected.close)
        job = RayJob(connected, request, secret)
        undo.pop_all()
        undo.callback(job.stop)
        try:
            # Those beyond `nodes` wait for nodes that are added.
            job.scale(max(request["nodes"], request["max_nodes"] or 0))
        except PacelineError:
            raise
        except Exception as error:
            raise UnavailableError(
                f"Ray at {connected.address} refused the agents: {error}",
                remedy="check runtime_env, resources and the cluster's state (ray status)",
            ) from error
        undo.pop_all()
    return job


@final
class RayJob:
    """Agents on a cluster, as `EngineJob` has it."""

    def __init__(
        self, connected: RayConnection, request: EngineRequest, secret: bytes, clock: Clock | None = None
    ) -> None:
        self._connected = connected
        self._ray = connected.ray
        self._request = request
        self._secret = secret
        self._clock = clock if clock is not None else MonotonicClock()
        self._trial_group = trial_group(self._ray, request["placement_group"]["bundles"][0])
        # Of a trial's bundles Ray decides, which packs them.
        one_per_node = request["one_per_node"] and not connected.is_local and self._trial_group is None
        self._claim = uuid.uuid4().hex if one_per_node else ""
        self._agents: list[_AskedAgent] = []
        self._lines: list[LogLine] = []
        self._avoided_nodes = AvoidedNodes(self._clock)
        self._is_stopped = False
        self._is_lost = False  # the connection to Ray

    def poll(self) -> Sequence[NodeStatus]:
        with self._unless_lost():
            self._look()
        return [agent.status() for agent in self._agents]

    def scale(self, nodes: int) -> None:
        self._check_connected()
        nodes = min(nodes, self._request["max_nodes"] or nodes)
        there = [agent for agent in self._agents if not agent.is_over and not agent.is_leaving]
        for _ in range(nodes - len(there)):
            self._agents.append(self._asked(len(self._agents)))
        excess = max(0, len(there) - nodes)
        # Those that do not run yet go first, then the newest.
        for agent in sorted(there, key=lambda agent: (agent.state == "pending", agent.number))[::-1][:excess]:
            agent.is_leaving = True
            if agent.state == "pending":
                self._end(agent, "ended", 0, "not needed any more")
            else:
                agent.actor.leave.remote()

    def logs(self) -> Iterable[LogLine]:
        self.poll()
        lines, self._lines = self._lines, []
        return lines

    def stop(self) -> None:
        if self._is_stopped:
            return
        self._is_stopped = True
        with contextlib.closing(self._connected), self._unless_lost(), contextlib.ExitStack() as at_the_end:
            self._check_connected()
            at_the_end.callback(self._end_all, "running")
            # First: what waits for a node would be asked for again while the last lines are fetched.
            self._end_all("pending")
            ending = [agent.actor.end.remote(_LEAVE_SECONDS) for agent in self._agents if not agent.is_over]
            if ending:
                self._ray.wait(ending, num_returns=len(ending), timeout=2 * _LEAVE_SECONDS)
                self.poll()  # the last lines

    # inside

    @property
    def _loss(self) -> str:
        return f"the connection to Ray at {self._connected.address} is lost"

    def _notice_loss(self) -> bool:
        """Return whether the connection to Ray is lost, and count all agents as lost then: Ray ends them with
        their driver. What is lost stays lost, also where the user connects again."""
        self._is_lost |= self._connected.is_lost
        if self._is_lost:
            for agent in self._agents:
                if not agent.is_over:
                    agent.state, agent.reason, agent.remedy = "lost", self._loss, _RESUME
        return self._is_lost

    def _check_connected(self) -> None:
        if self._notice_loss():
            raise PeerLostError(self._loss, remedy=_RESUME)

    @contextlib.contextmanager
    def _unless_lost(self) -> Iterator[None]:
        """Suppress errors where the connection to Ray is lost: the agents are lost then, and say so."""
        try:
            yield
        except Exception:
            if not self._notice_loss():
                raise

    def _look(self) -> None:
        """Take the news of all agents."""
        self._check_connected()
        waiting = {agent.news: agent for agent in self._agents if not agent.is_over}
        if waiting:
            ready, _ = self._ray.wait(list(waiting), num_returns=len(waiting), timeout=0)
            for news in ready:
                self._check_connected()
                self._take(waiting[news])
        taken = self._taken_nodes()
        for agent in self._agents:
            if agent.state == "pending" and agent.avoided - taken:
                # A node that the agent avoids is free again.
                self._ask_again(agent)

    def _asked(self, number: int) -> _AskedAgent:
        """Ask Ray for an agent: a group, an actor in it, and the call that waits for its news."""
        self._check_connected()
        taken = self._taken_nodes()
        group, index = self._group(taken)
        try:
            actor = self._actor(self._trial_group if group is None else group, index or 0)
        except BaseException:
            self._remove(group)
            raise
        # A trial's own groups say where their bundles are: nothing is avoided.
        avoided = taken if group is not None else frozenset[str]()
        news = actor.report.remote(0, _REPORT_SECONDS)
        bundle = self._request["placement_group"]["bundles"][0]
        wanted = ", ".join(f"{name} {amount:g}" for name, amount in bundle.items())
        return _AskedAgent(
            number, group, actor, news, avoided, bundle_index=index, reason=f"waits for a node with {wanted}"
        )

    def _group(self, taken: frozenset[str]) -> tuple[Any, int | None]:
        if self._trial_group is not None:
            used = {agent.bundle_index for agent in self._agents if not agent.is_over}
            free = [n for n in range(1, self._trial_group.bundle_count) if n not in used]
            if free:
                return None, free[0]
        wanted = self._request["placement_group"]
        selector = [{_NODE_LABEL: f"!in({','.join(sorted(taken))})"}] if taken else None
        made = self._ray.util.placement_group(
            wanted["bundles"], strategy=wanted["strategy"], bundle_label_selector=selector
        )
        return made, None

    def _actor(self, group: Any, index: int) -> Any:
        placed = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        options = {name: value for name, value in self._request["actor"].items() if value != {}}
        make = self._ray.remote(AgentActor).options(
            **options,
            # `leave` and `end` come while `report` waits.
            max_concurrency=4,
            scheduling_strategy=placed(group, placement_group_bundle_index=index),
        )
        return make.remote(self._request["agent"], self._secret, self._claim)

    def _taken_nodes(self) -> frozenset[str]:
        """Return the nodes that a further agent must not be placed on."""
        if not self._claim:
            return frozenset()
        own = {agent.node_id for agent in self._agents if agent.state == "running"}
        return self._avoided_nodes.now() | own

    def _ask_again(self, agent: _AskedAgent) -> None:
        self._release(agent)
        fresh = self._asked(agent.number)
        self._agents[agent.number] = fresh

    def _take(self, agent: _AskedAgent) -> None:
        """Handle an answer of an agent's actor."""
        errors = self._ray.exceptions
        try:
            news = self._ray.get(agent.news)
        except errors.ActorUnavailableError as error:
            self._note_unreachable(agent, str(error))
            return
        except errors.RuntimeEnvSetupError as error:
            self._end(agent, "ended", 1, f"its runtime_env could not be set up: {_last_line(error)}")
            return
        except errors.RayActorError as error:
            if error.actor_init_failed:
                self._end(agent, "ended", 1, f"the agent could not be started: {_last_line(error)}")
            else:
                self._end(agent, "lost", None, _last_line(error))
            return
        except errors.RayError as error:
            self._end(agent, "lost", None, _last_line(error))
            return
        if news.get("taken"):
            self._remember_claimed(agent, news["node_id"])
            return
        agent.unreachable_since = None
        agent.state, agent.host, agent.node_id = "running", news["host"], news["node_id"]
        agent.reason = ""
        agent.next_line = news["next"]
        self._lines += [LogLine(agent.number, text) for text in news["lines"]]
        if news["code"] is None:
            agent.news = agent.actor.report.remote(agent.next_line, _REPORT_SECONDS)
        else:
            self._end(agent, "ended", news["code"], f"`paceline join` ended with code {news['code']}")

    def _remember_claimed(self, agent: _AskedAgent, node_id: str) -> None:
        """Ask for the agent elsewhere: another one of this job was faster on that node."""
        self._avoided_nodes.avoid(node_id, _CLAIMED_NODE_SECONDS)
        self._ask_again(agent)

    def _note_unreachable(self, agent: _AskedAgent, reason: str) -> None:
        now = self._clock.now()
        if agent.unreachable_since is None:
            agent.unreachable_since = now
        is_gone = any(word in reason for word in _CLOSED)
        if not is_gone and now - agent.unreachable_since < _UNREACHABLE_SECONDS:
            agent.news = agent.actor.report.remote(agent.next_line, _REPORT_SECONDS)
            return
        # Ray itself gives a node up after some 15 s, and offers it until then.
        self._avoided_nodes.avoid(agent.node_id, _LOST_NODE_SECONDS)
        since = f"has not answered for {counted(round(now - agent.unreachable_since), 'second')}"
        what = "closed the connection to its actor" if is_gone else since
        self._end(agent, "lost", None, f"its node {what}: {_first_sentence(reason)}")

    def _end_all(self, state: NodeState) -> None:
        """Give back all agents of a state, also where Ray cannot be told about one of them."""
        with contextlib.ExitStack() as each:
            for agent in self._agents:
                if agent.state == state:
                    each.callback(self._end, agent, "ended", 0, "stopped")

    def _end(self, agent: _AskedAgent, state: NodeState, code: int | None, reason: str) -> None:
        agent.state, agent.code, agent.reason = state, code, reason
        self._release(agent)

    def _release(self, agent: _AskedAgent) -> None:
        """Give back what Ray holds for an agent."""
        try:
            if not self._notice_loss():
                self._ray.kill(agent.actor, no_restart=True)
        finally:
            self._remove(agent.group)

    def _remove(self, group: Any) -> None:
        if group is not None and not self._notice_loss():
            self._ray.util.remove_placement_group(group)


def _last_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return _first_sentence(lines[-1]) if lines else type(error).__name__


def _first_sentence(text: str) -> str:
    """Return how Ray begins: it goes on with advice for its own users."""
    return text.partition(". ")[0][:_LONGEST_REASON]


def trial_group(ray: Any, bundle: dict[str, float]) -> Any:
    """Return the placement group of the Tune trial that this process is, where it has bundles for agents."""
    if not ray.is_initialized() or ray.util.client.ray.is_connected():
        return None
    group = ray.util.get_current_placement_group()
    if group is None or group.bundle_count < 2:
        return None
    fits = all(
        all(given.get(name, 0.0) >= amount for name, amount in bundle.items())
        for given in group.bundle_specs[1:]
    )
    return group if fits else None
