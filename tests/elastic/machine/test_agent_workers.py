"""Jobs whose workers come with agents: waiting for them, going on without some, and giving up."""

from __future__ import annotations

from typing import Any

import pytest
from tests.elastic.machine.machine_driver import Driven, beat_of, only, some, started

from paceline.elastic.machine.actions import EndJob, InstallView, RequestAgents, StartWorker
from paceline.elastic.machine.machine_events import AgentJoined, AgentLost, ScaleRequested
from paceline.elastic.machine.settings import MachineSettings
from paceline.elastic.machine.state import JobPhase, WorkerStatus


def remote(workers: int = 4, **settings: Any) -> Driven:
    return Driven(workers, 8, agent_workers=workers, agents_wait_seconds=50.0, **settings)


def joined(job: Driven, *agents: int) -> Driven:
    for agent in agents:
        job.tell(AgentJoined(agent, 2, f"host{agent}"))
    return job


def ready(job: Driven) -> Driven:
    """All who were started come, and send heartbeats from now on."""
    job.join_all()
    for number, worker in list(job.state.workers.items()):
        if worker.status is not WorkerStatus.STARTING:
            job.tell(beat_of(number, "wait", 0.1))
    return job


def test_no_worker_is_started_before_an_agent_comes():
    job = remote()
    assert started(job.actions) == []
    assert job.state.phase is JobPhase.STARTING
    assert [a.agent_id for a in some(job.tell(AgentJoined(1, 2, "host1")), StartWorker)] == [1, 1]


def test_a_first_view_waits_for_all_agents_that_are_expected():
    job = joined(remote(), 1)
    assert some(job.join_all(), InstallView) == []
    told = job.tell(AgentJoined(2, 2, "host2")) + job.join_all()
    assert len(only(told, InstallView).plan.members) == 4


def test_agents_that_do_not_come_in_time_are_not_waited_for_longer():
    job = ready(joined(remote(start_seconds=20.0), 1))
    told = job.wait(19.0)
    assert some(told, InstallView) == []
    assert len(only(job.wait(3.0), InstallView).plan.members) == 2
    # The one that comes late is a joiner like any other.
    job.install_all()
    job.tell(AgentJoined(2, 2, "host2"))
    ready(job).wait(0.5)
    assert job.state.phase is JobPhase.PREPARING


def test_the_time_for_the_others_counts_from_the_first_agent():
    job = remote(start_seconds=20.0)
    job.wait(30.0)
    ready(joined(job, 1))
    assert some(job.wait(15.0), InstallView) == []
    assert some(job.wait(6.0), InstallView)


def test_the_loss_of_one_agent_of_two_is_a_view_without_it():
    job = joined(remote(), 1, 2).running()
    job.tell(AgentLost(2, "it is gone"))
    plan = job.form_view()
    assert len(plan.members) == 2
    ready(joined(job, 3))
    job.wait(0.5)
    assert len(job.form_view().members) == 4


def test_a_job_without_agents_waits_for_another_and_starts_from_a_checkpoint():
    job = joined(remote(), 1, 2).running()
    job.tell(AgentLost(1, "it is gone"))
    job.tell(AgentLost(2, "it is gone"))
    assert job.state.view is None
    assert job.wait(40.0) == []
    joined(job, 3, 4)
    plan = only(job.join_all(), InstallView).plan
    assert (len(plan.members), plan.restore) == (4, True)
    job.install_all()
    job.beat_all()
    job.wait(4.0)
    assert job.state.too_few_at is None
    assert len(job.members) == 4


def test_a_job_that_waited_for_agents_in_vain_ends_with_the_reason():
    for agents in ((), (1, 2)):
        job = joined(remote(), *agents)
        if agents:
            job.running()
        for agent in agents:
            job.tell(AgentLost(agent, "it is gone"))
        assert not some(job.wait(49.0), EndJob)
        end = only(job.wait(4.0), EndJob)
        assert not end.ok
        assert end.reason == "0 workers are left, at least 1 is required: no other agent has come in 50 s"


def test_fewer_than_the_least_number_train_on_while_others_are_awaited():
    job = joined(remote(min_workers=3), 1, 2).running()
    job.tell(AgentLost(2, "it is gone"))
    assert len(job.form_view().members) == 2
    end = only(job.wait(60.0), EndJob)
    assert end.reason == "2 workers are left, at least 3 are required: no other agent has come in 50 s"


def test_another_size_is_another_number_of_agents():
    job = joined(remote(), 1, 2).running()
    assert job.tell(ScaleRequested(6)) == [RequestAgents(6)]
    assert job.state.phase is JobPhase.RUNNING
    # Workers of this host can be added here, and only these.
    mixed = Driven(2, 8, agent_workers=1)
    joined(mixed, 1)
    mixed.running()
    assert [a.agent_id for a in some(mixed.tell(ScaleRequested(4)), StartWorker)] == [0]


def test_the_workers_of_this_host_are_those_that_do_not_come_with_agents():
    job = Driven(4, 8, agent_workers=2)
    assert started(job.actions) == [0, 1]
    assert some(job.join_all(), InstallView) == []
    told = job.tell(AgentJoined(1, 2, "host1")) + job.join_all()
    assert len(only(told, InstallView).plan.members) == 4


@pytest.mark.parametrize(("workers", "agents", "expected"), [(4, 0, False), (4, 2, False), (4, 4, True)])
def test_only_a_job_of_agents_scales_by_them(workers: int, agents: int, expected: bool):
    settings = MachineSettings(workers=workers, shards=8, agent_workers=agents)
    assert settings.scales_by_agents is expected
    assert settings.local_workers == workers - agents
