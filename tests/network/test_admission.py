"""A machine that reaches the control port and nothing else: the run trains on, and takes it in once it can.

Two hosts as network namespaces; routing rules between them are the firewall.
"""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest
from tests.network.joined_runs import Run, ended, training
from tests.waiting import wait_for

from paceline.core import events
from paceline.testing import netns
from paceline.testing.netns import Hosts

_WHY_NOT = netns.why_not()

pytestmark = [
    pytest.mark.netns,
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(_WHY_NOT), reason=_WHY_NOT or "namespaces work"),
]

PORTS = "42000-42019"
FIXED = ("port=41000", f"ports={PORTS}")
ONE = ("--workers", "1")


def unreachable(run: Run) -> list[events.WorkerFailed]:
    return [event for event in run.of(events.WorkerFailed) if event.cause == "unreachable"]


def steps(run: Run) -> int:
    return len(run.of(events.StepCommitted))


@pytest.mark.parametrize(("sender", "receiver"), [(0, 1), (1, 0)], ids=["to the joiner", "from the joiner"])
def test_a_blocked_joiner_disturbs_no_member_and_comes_in_when_it_can(
    tmp_path: Path, undisturbed: str, sender: int, receiver: int
) -> None:
    with training(tmp_path, *FIXED, "max_worker_failures=50") as run:
        run.hosts.block(sender, receiver, PORTS)
        agent = run.join(*ONE)
        before = steps(run)
        wait_for(lambda: len(unreachable(run)) > 1, "two attempts that failed")
        # An attempt takes the 5 s of a connection that is not answered; a step takes 0.4 s.
        assert steps(run) - before > 12
        assert [view.hosts for view in run.of(events.ViewChanged)] == [["a", "a"]]
        failed = unreachable(run)[0]
        who = r"rank 2 cannot reach rank [01]" if sender else r"rank [01] cannot reach rank 2"
        where = re.escape(run.hosts.addresses[receiver])
        assert re.fullmatch(rf"{who} at {where}:420[01]\d: connecting timed out", failed.reason)
        run.hosts.unblock(sender, receiver, PORTS)
        run.until_view("aab")
        assert run.finish() == undisturbed
        code, said = ended(agent)
        assert (code, failed.reason in said) == (0, True), said
        run.check_exactly_once()


def test_a_joiner_that_stays_blocked_is_sent_away_with_the_reason(tmp_path: Path, undisturbed: str) -> None:
    with training(tmp_path, *FIXED, "max_worker_failures=0") as run:
        run.hosts.block(1, 0, PORTS)
        code, said = ended(run.join(*ONE))
        assert code == 1
        assert re.search(r"is refused: rank 2 cannot reach rank \d at 10\.77\.0\.1:420[01]\d: ", said), said
        assert "try: let the machines connect to each other" in said
        assert run.finish() == undisturbed
        run.check_exactly_once()


def test_a_stop_while_a_view_cannot_form_ends_soon_and_saves(tmp_path: Path) -> None:
    """The way between the hosts is lost after they have met: the next view does not form."""
    with training(tmp_path, *FIXED) as run:
        agent = run.join(*ONE)
        run.until_view("aab")
        generation = run.view.generation
        run.hosts.block(0, 1, PORTS)
        run.hosts.block(1, 0, PORTS)
        os.kill(run.view.pids[1], signal.SIGKILL)
        wait_for(lambda: run.view.generation > generation, "the next view")
        asked = time.monotonic()
        run.process.send_signal(signal.SIGTERM)
        run.process.wait(60)
        # 2 s for the view, then saving and ending; it was 60 to 90 s.
        assert time.monotonic() - asked < 10.0
        assert run.of(events.CheckpointSaved)[-1].step >= run.of(events.StepCommitted)[-1].step
        ended(agent)


@pytest.mark.parametrize("bind", ["::", "fd77::1"])
def test_hosts_with_ipv6_only(tmp_path: Path, undisturbed: str, bind: str) -> None:
    with Hosts(2, ipv6=True) as hosts:
        run = Run(hosts, tmp_path, f"bind={bind}")
        agent = run.join(*ONE)
        run.until_view("aab")
        assert run.finish() == undisturbed
        assert ended(agent)[0] == 0
        run.check_exactly_once()


def test_ports_of_the_range_and_the_chosen_interface_only(tmp_path: Path, undisturbed: str) -> None:
    with training(tmp_path, f"ports={PORTS}", where="interface=eth0") as run:
        agent = run.join(*ONE)
        run.until_view("aab")
        for host, address in enumerate(run.hosts.addresses):
            found = run.hosts.listeners(host)
            assert {where for where, _ in found} == {address}
            # A worker's endpoint each, and the control port; perhaps those of a group that is forming.
            assert len(found) >= (1 if host else 3), found
            assert all(42000 <= port <= 42019 for _, port in found), found
        assert run.finish() == undisturbed
        assert ended(agent)[0] == 0
