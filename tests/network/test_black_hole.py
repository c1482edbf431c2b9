"""A link between two of three hosts carries small packets and loses large ones, after training has begun.

Handshakes, heartbeats and dials without data pass such a link, gradients do not: all wait for all. The link
is named, with the direction, before any rank is blamed; one end goes, stays out, and the bits are the same.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.network import joined_run
from tests.network.joined_runs import Run, ended, training
from tests.waiting import wait_for

import paceline
from paceline.core import events
from paceline.testing import netns

_WHY_NOT = netns.why_not()

pytestmark = [
    pytest.mark.netns,
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(_WHY_NOT), reason=_WHY_NOT or "namespaces work"),
]

WIDTH = 3000  # 120 KB of gradients: messages of many packets


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The hash of the run in one process."""
    folder = tmp_path_factory.mktemp("wide")
    (folder / "open").touch()
    config = joined_run.config_of(folder / "run", 1, paceline.FaultTolerance(enabled=False))
    return joined_run.fit(config, folder / "open", width=WIDTH)


def trains_with_all(run: Run) -> bool:
    view = run.view
    return sorted(view.hosts) == ["a", "a", "b", "c"] and run.last_step > view.step


HOLES = [
    pytest.param([(1, 2)], id="one way between two that joined"),
    pytest.param([(0, 1), (1, 0)], id="both ways to the supervisor's host"),
]


@pytest.mark.parametrize("holes", HOLES)
def test_the_link_is_named_and_the_run_goes_on(
    tmp_path: Path, wide: str, holes: list[tuple[int, int]]
) -> None:
    with training(tmp_path, f"width={WIDTH}", count=3) as run:
        agents = [run.join("--workers", "1", on=host) for host in (1, 2)]
        wait_for(lambda: trains_with_all(run), "all three hosts train together")
        before = run.view
        rank = {host: number for number, host in zip(before.members, before.hosts, strict=True)}
        for sender, receiver in holes:
            run.hosts.lose_large(sender, receiver)
        wait_for(lambda: run.of(events.Verdict), "a verdict")
        verdict = run.of(events.Verdict)[0]
        assert "the link between the hosts is at fault, not a rank" in verdict.text
        assert "small packets arrive there and large ones do not" in verdict.text
        # Both ends are named; where it is one way only, so is the direction.
        from_host, to_host = ("abc"[host] for host in holes[0])
        if len(holes) == 1 and from_host != "a":
            assert f"rank {rank[from_host]} cannot reach rank {rank[to_host]} at" in verdict.text
        assert verdict.host in (from_host, to_host)
        assert verdict.host != "a"
        left = "".join(sorted({*before.hosts, "a"} - {verdict.host}))
        wait_for(lambda: run.last_step > run.view.step + 3, "steps without that end")
        assert "".join(sorted({*run.view.hosts})) == left
        # The other workers are the same processes: none was blamed, none was replaced.
        assert {*run.view.pids} < {*before.pids}
        # The replacement dials before it may join, so it disturbs no member.
        assert run.finish() == wide
        assert run.of(events.WorkerFailed)[0].cause == "unreachable"
        assert {event.host for event in run.of(events.WorkerFailed)} == {verdict.host}
        assert len(run.of(events.Verdict)) == 1
        for agent in agents:
            ended(agent)
        run.check_exactly_once()
