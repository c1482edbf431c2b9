"""The exit code of an agent whose host leaves a job that trains on."""

from __future__ import annotations

import threading
from contextlib import closing

from tests.control.far_end import SECRET, FarEnd, hear

from paceline.control.messages import AgentHello
from paceline.control.spool import STOPPED_EXIT_CODE
from paceline.elastic.supervisor.agent import Agent


def test_an_agent_that_leaves_before_the_end_asks_to_come_again():
    """0 would complete an index of a Kubernetes Job for good: no pod would come in its place."""
    with closing(FarEnd()) as far:
        agent = Agent(far.address, SECRET, 2, until_finished=True)
        codes: list[int] = []
        thread = threading.Thread(target=lambda: codes.append(agent.run()))
        thread.start()
        with closing(far.accept()) as channel:
            ((_, joined),) = hear(channel)
            agent.leave()
            thread.join()
            ((_, left),) = hear(channel)
    assert isinstance(joined, AgentHello)
    assert isinstance(left, AgentHello)
    assert (joined.workers, left.workers, codes) == (2, 0, [STOPPED_EXIT_CODE])
