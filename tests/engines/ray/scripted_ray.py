"""What a RayJob asks of Ray, by a test's script: for failures that no real cluster has when a test wants
them. The real one is in tests/clusters/ray."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from tests.virtual_clock import VirtualClock

from paceline.engines.engine import AgentSpec
from paceline.engines.ray.ray_connection import RayConnection
from paceline.engines.ray.ray_engine import Ray
from paceline.engines.ray.ray_job import RayJob

SECRET = bytes(32)


class RayError(Exception):
    """Ray's own base class of what a call raises."""


class ActorUnavailableError(RayError): ...


class RuntimeEnvSetupError(RayError): ...


class RaySystemError(RayError): ...


class TaskCancelledError(RayError): ...


class RayTaskError(RayError):
    """What a task raised, as `cause`; its text has the traceback."""

    def __init__(self, cause: Exception, text: str) -> None:
        super().__init__(text)
        self.cause = cause


class RayActorError(RayError):
    actor_init_failed = False


@dataclass(eq=False)
class Call:
    """A call of an actor's method. `answer`: what it returned or raised; None: it has not returned."""

    actor: Actor
    method: str
    answer: Any = None


@dataclass(eq=False)
class Actor:
    """One agent's actor. `selector`: the nodes that its group excludes."""

    number: int
    selector: str
    calls: list[Call] = field(default_factory=list)
    is_killed: bool = False

    def __getattr__(self, method: str) -> Any:
        def remote(*_: Any) -> Call:
            self.calls.append(Call(self, method))
            return self.calls[-1]

        return SimpleNamespace(remote=remote)

    def answer(self, given: Any) -> None:
        """Have the call for news that waits return, or raise."""
        [call] = [call for call in self.calls if call.method == "report" and call.answer is None]
        call.answer = given

    def runs_on(self, node: str, *lines: str) -> None:
        self.answer({"node_id": node, "host": node, "lines": lines, "next": len(lines), "code": None})

    def cannot_be_reached(self, reason: str) -> None:
        self.answer(ActorUnavailableError(reason))


class ScriptedRay:
    """Counts the groups that are reserved; a function in `broken` raises what it says, each time.

    `is_client`: the connection is one of Ray client. `lost_in`: the function during which the connection is
    lost. `started`: the functions that were called without one, each of which starts a Ray on the caller's
    machine.
    """

    def __init__(self) -> None:
        self.is_connected, self.lost_in = True, ""
        self.is_client = False
        self.started: list[str] = []
        self.actors: list[Actor] = []
        self.groups: list[Any] = []
        self.broken: dict[str, BaseException] = {}
        self.exceptions = SimpleNamespace(
            ActorUnavailableError=ActorUnavailableError,
            RuntimeEnvSetupError=RuntimeEnvSetupError,
            RayActorError=RayActorError,
            RaySystemError=RaySystemError,
            RayTaskError=RayTaskError,
            TaskCancelledError=TaskCancelledError,
            RayError=RayError,
        )
        self.client = SimpleNamespace(data_client=SimpleNamespace(_in_shutdown=False))
        context = SimpleNamespace(client_worker=self.client)
        client = SimpleNamespace(
            ray=SimpleNamespace(is_connected=lambda: self.is_client, get_context=lambda: context)
        )
        self.util = SimpleNamespace(
            client=client,
            placement_group=self._group,
            remove_placement_group=self._remove,
            get_current_placement_group=lambda: None,
            scheduling_strategies=SimpleNamespace(PlacementGroupSchedulingStrategy=lambda group, **_: group),
        )

    def is_initialized(self) -> bool:
        return self.is_connected

    def lose_channel(self) -> None:
        """Have the head refuse the channel of a client, which stays connected."""
        self.client.data_client = SimpleNamespace(_in_shutdown=True)

    def lose(self) -> None:
        """Lose the connection: Ray ends what its driver had."""
        self.is_connected = False
        self.groups.clear()

    def _group(self, bundles: Any, strategy: str, bundle_label_selector: Any) -> Any:
        self._break("placement_group")
        [named] = bundle_label_selector or [{"ray.io/node-id": ""}]
        self.groups.append(SimpleNamespace(selector=named["ray.io/node-id"]))
        return self.groups[-1]

    def _remove(self, group: Any) -> None:
        if self.is_connected:
            self.groups.remove(group)
        self._break("remove_placement_group")

    def remote(self, _: type) -> Any:
        return SimpleNamespace(options=self._options)

    def _options(self, *, scheduling_strategy: Any, **_: Any) -> Any:
        def make(*_: Any) -> Actor:
            self._break("actor")
            self.actors.append(Actor(len(self.actors), scheduling_strategy.selector))
            return self.actors[-1]

        return SimpleNamespace(remote=make)

    def wait(self, calls: Sequence[Call], num_returns: int, timeout: float) -> tuple[list[Call], list[Call]]:
        self._break("wait")
        return [one for one in calls if one.answer is not None], [one for one in calls if one.answer is None]

    def get(self, call: Call) -> Any:
        self._break("get")
        if isinstance(call.answer, Exception):
            raise call.answer
        return call.answer

    def kill(self, actor: Actor, no_restart: bool) -> None:
        assert no_restart
        actor.is_killed = True
        self._break("kill")

    def shutdown(self) -> None:
        self.is_connected = False

    def _break(self, name: str) -> None:
        if not self.is_connected:
            self.started.append(name)
        if name == self.lost_in:
            self.lose()
            raise ConnectionError("Client is shutting down.")
        if name in self.broken:
            raise self.broken[name]


class AskedAgents:
    """A job on a scripted Ray, whose first agents have been asked for."""

    def __init__(self, ray: ScriptedRay, engine: Ray, connected: RayConnection) -> None:
        spec = AgentSpec(run="r", address=("10.0.0.1", 1), nodes=engine.nodes, workers_per_node=1)
        self.ray, self.connected, self.clock = ray, connected, VirtualClock()
        self.job = RayJob(connected, engine.request(spec), SECRET, self.clock)
        self.job.scale(engine.nodes)

    @property
    def states(self) -> list[str]:
        return [status.state for status in self.job.poll()]

    @property
    def reasons(self) -> list[str]:
        return [status.reason for status in self.job.poll()]


@contextlib.contextmanager
def agents_of(engine: Ray) -> Iterator[AskedAgents]:
    """Ask for the agents of an engine; at the end nothing of them may be left."""
    ray = ScriptedRay()
    connected = RayConnection(ray, "head:6379", is_ours=False)
    connected.users += 1
    asked = AskedAgents(ray, engine, connected)
    yield asked
    asked.job.stop()
    assert not ray.groups
    assert connected.users == 0
