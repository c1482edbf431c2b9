"""What a RayJob decides: which nodes it avoids, how many agents it keeps, what it gives back."""

from __future__ import annotations

from typing import Any

import pytest
from tests.engines.ray.scripted_ray import SECRET, RayActorError, ScriptedRay, agents_of
from tests.virtual_clock import VirtualClock

from paceline.core.errors import PeerLostError, UnavailableError
from paceline.engines.agent_fleet import AgentFleet
from paceline.engines.engine import AgentSpec
from paceline.engines.ray import ray_connection, ray_job
from paceline.engines.ray.avoided_nodes import AvoidedNodes
from paceline.engines.ray.ray_connection import RayConnection
from paceline.engines.ray.ray_engine import Ray

SPEC = AgentSpec(run="r", address=("10.0.0.1", 4000), nodes=2, workers_per_node=1)


@pytest.mark.parametrize(
    "reason", ["RpcError: Socket closed; code 14", "failed to connect: Connection refused; code 14"]
)
def test_an_actor_whose_process_is_gone_is_lost_at_once_and_its_node_avoided(reason: str) -> None:
    with agents_of(Ray(nodes=1)) as it:
        it.ray.actors[0].runs_on("abc")
        assert it.states == ["running"]
        it.ray.actors[0].cannot_be_reached(reason)
        assert it.states == ["lost"]
        assert it.reasons[0].startswith("its node closed the connection to its actor: ")
        it.job.scale(1)
        assert it.ray.actors[1].selector == "!in(abc)"


def test_an_actor_that_does_not_answer_is_lost_after_some_seconds() -> None:
    with agents_of(Ray(nodes=1)) as it:
        it.ray.actors[0].runs_on("abc")
        assert it.states == ["running"]
        for _ in range(3):
            it.ray.actors[0].cannot_be_reached("the deadline is exceeded")
            assert it.states == ["running"]
            it.clock.advance(1.0)
        it.ray.actors[0].cannot_be_reached("the deadline is exceeded")
        assert it.states == ["lost"]
        assert "its node has not answered for 3 seconds" in it.reasons[0]


def test_an_agent_that_is_lost_before_its_first_report_names_no_node_to_avoid() -> None:
    """Ray refuses a selector without a node."""
    with agents_of(Ray(nodes=1)) as it:
        it.ray.actors[0].cannot_be_reached("Socket closed")
        assert it.states == ["lost"]
        it.job.scale(1)
        assert it.ray.actors[1].selector == ""


def test_a_node_is_avoided_until_the_last_reason_for_it_is_over() -> None:
    clock = VirtualClock(1000.0)
    nodes = AvoidedNodes(clock)
    nodes.avoid("abc", 30.0)
    nodes.avoid("abc", 1.0)
    nodes.avoid("", 30.0)
    assert nodes.now() == {"abc"}
    clock.advance(29.0)
    assert nodes.now() == {"abc"}
    clock.advance(1.0)
    assert nodes.now() == frozenset()
    # What was avoided long ago is avoided again.
    nodes.avoid("abc", 1.0)
    assert nodes.now() == {"abc"}


def test_an_agent_on_a_node_that_another_one_has_is_asked_for_elsewhere() -> None:
    with agents_of(Ray(nodes=1)) as it:
        it.ray.actors[0].runs_on("abc")
        assert it.states == ["running"]
        it.ray.actors[0].cannot_be_reached("Socket closed")
        assert it.states == ["lost"]
        it.clock.advance(60.0)  # the node has come back, and is not avoided any more
        it.job.scale(1)
        assert it.ray.actors[1].selector == ""
        it.ray.actors[1].answer({"node_id": "abc", "taken": True})
        assert it.states == ["lost", "pending"]
        assert it.ray.actors[1].is_killed
        assert it.ray.actors[2].selector == "!in(abc)"


def test_a_number_that_is_asked_for_is_literal_and_ends_at_max_nodes() -> None:
    with agents_of(Ray(nodes=3, max_nodes=4)) as it:
        it.job.scale(4)
        assert it.states == ["pending"] * 4
        it.job.scale(3)
        assert it.states == ["pending"] * 3 + ["ended"]
        it.job.scale(6)
        assert it.states == ["pending"] * 3 + ["ended", "pending"]


def test_without_max_nodes_a_person_may_ask_for_more() -> None:
    with agents_of(Ray(nodes=1)) as it:
        it.job.scale(3)
        assert it.states == ["pending"] * 3


def test_agents_up_to_max_nodes_are_asked_for_at_first(monkeypatch: pytest.MonkeyPatch) -> None:
    ray, connected = connection_to(monkeypatch)
    engine = Ray(nodes=2, max_nodes=4)
    job = ray_job.submit(engine, engine.request(SPEC), SECRET)
    assert len(job.poll()) == 4
    job.stop()
    assert not ray.groups
    assert connected.users == 0


def test_a_fleet_keeps_max_nodes_until_a_person_asks_for_another_number() -> None:
    """It sends none of them away, and asks for no more."""
    with agents_of(Ray(nodes=2, max_nodes=4)) as it:
        it.job.scale(4)
        clock = VirtualClock()
        fleet = AgentFleet(Ray(nodes=2, max_nodes=4), SPEC, SECRET, lambda _: None, clock)
        clock.advance(1.0)
        fleet.turn(it.job)
        assert it.states == ["pending"] * 4
        fleet.scale(2)
        clock.advance(1.0)
        fleet.turn(it.job)
        assert it.states == ["pending"] * 2 + ["ended"] * 2


@pytest.mark.parametrize("broken", ["kill", "remove_placement_group", "wait"])
def test_stop_gives_everything_back_where_ray_fails_for_each_agent(broken: str) -> None:
    with agents_of(Ray(nodes=3)) as it:
        it.ray.actors[0].runs_on("abc")
        it.ray.actors[1].runs_on("def")
        assert it.states == ["running", "running", "pending"]
        it.ray.broken[broken] = ConnectionError("the head is gone")
        with pytest.raises(ConnectionError, match="the head is gone"):
            it.job.stop()
        assert [actor.is_killed for actor in it.ray.actors] == [True] * 3
        # agents_of looks at the rest; the second stop does nothing.


def test_stop_asks_for_no_agent_again() -> None:
    """One that waits would be asked for again as soon as the node that it avoids is free."""
    with agents_of(Ray(nodes=2)) as it:
        first, _ = it.ray.actors
        first.runs_on("abc")
        it.job.poll()
        it.job.scale(3)
        assert it.ray.actors[2].selector == "!in(abc)"
        first.answer(RayActorError("the actor is dead"))
        it.job.stop()
        assert len(it.ray.actors) == 3


@pytest.mark.parametrize(
    ("error", "raised"), [(ValueError("no such folder"), UnavailableError), (KeyboardInterrupt(), None)]
)
def test_agents_that_are_refused_or_not_waited_for_leave_no_group(
    error: BaseException, raised: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray, connected = connection_to(monkeypatch)
    ray.broken["actor"] = error
    engine = Ray(nodes=2)
    with pytest.raises(raised or type(error)):
        ray_job.submit(engine, engine.request(SPEC), SECRET)
    assert not ray.groups
    assert connected.users == 0


def test_a_connection_is_given_up_where_the_job_cannot_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    ray, connected = connection_to(monkeypatch)

    def broken() -> None:
        raise ConnectionError("the head is gone")

    ray.util.get_current_placement_group = broken
    engine = Ray(nodes=1)
    with pytest.raises(ConnectionError):
        ray_job.submit(engine, engine.request(SPEC), SECRET)
    assert connected.users == 0


@pytest.mark.parametrize("seconds", [0.3, 30.0], ids=["new", "stayed"])
@pytest.mark.parametrize("lost_in", ["", "wait", "get"])
def test_a_run_whose_connection_is_lost_ends_at_once_and_starts_no_ray_here(
    seconds: float, lost_in: str
) -> None:
    with agents_of(Ray(nodes=2)) as it:
        clock, said = VirtualClock(), list[str]()
        fleet = AgentFleet(Ray(nodes=2), SPEC, SECRET, said.append, clock)
        for number, actor in enumerate(it.ray.actors):
            actor.runs_on(f"node{number}")
        fleet.turn(it.job)
        clock.advance(seconds)
        fleet.turn(it.job)
        it.ray.lost_in = lost_in
        if not lost_in:
            it.ray.lose()
        for actor in it.ray.actors:
            actor.runs_on("news")
        begun = clock.now()
        while fleet.failure is None and clock.now() - begun < 5.0:
            fleet.turn(it.job)
            clock.advance(0.25)
        lost = "the connection to Ray at head:6379 is lost"
        assert isinstance(fleet.failure, PeerLostError)
        assert fleet.failure.message == lost
        assert fleet.failure.remedy == 'start the run again with resume="auto"'
        assert said[2:] == [f"agent {number} on node{number} is lost: {lost}" for number in range(2)]
        it.job.stop()
        assert it.connected.users == 0
        it.ray.is_connected = True  # by the user, elsewhere
        with pytest.raises(PeerLostError):
            it.job.scale(2)
        assert it.ray.started == []


@pytest.mark.parametrize("lost_in", ["placement_group", "actor", "kill", "remove_placement_group"])
def test_a_connection_that_is_lost_meanwhile_starts_no_ray_here(lost_in: str) -> None:
    with agents_of(Ray(nodes=3)) as it:
        it.ray.actors[0].runs_on("abc")
        assert it.states == ["running", "pending", "pending"]
        it.ray.lost_in = lost_in
        it.ray.actors[1].answer({"node_id": "abc", "taken": True})  # is asked for again
        it.ray.actors[2].answer({"node_id": "abc", "taken": True})
        assert it.states == ["lost"] * 3
        assert it.ray.started == []


@pytest.mark.parametrize("lost_in", ["", "wait", "kill"])
def test_stop_is_quiet_where_the_connection_is_lost(lost_in: str) -> None:
    with agents_of(Ray(nodes=2)) as it:
        it.ray.actors[0].runs_on("abc")
        assert it.states == ["running", "pending"]
        it.ray.lost_in = lost_in
        if not lost_in:
            it.ray.lose()
        it.job.stop()
        assert it.connected.users == 0
        assert it.ray.started == []


def test_stop_raises_what_ray_raised_before_it_was_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    with agents_of(Ray(nodes=1)) as it:
        it.connected.is_ours = True
        monkeypatch.setattr(ray_connection, "_current", it.connected)
        it.ray.broken["kill"] = ConnectionError("the head is gone")
        with pytest.raises(ConnectionError, match="the head is gone"):
            it.job.stop()
        assert not it.ray.is_connected


def connection_to(monkeypatch: pytest.MonkeyPatch) -> tuple[ScriptedRay, RayConnection]:
    """Have `submit` find a connection to a scripted Ray."""
    ray = ScriptedRay()
    connected = RayConnection(ray, "head:6379", is_ours=False)
    monkeypatch.setattr(ray_connection, "connect", lambda _: connected)
    return ray, connected
