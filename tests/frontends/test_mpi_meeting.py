"""Where the ranks of one mpirun meet: the file, the store, the result, and who leads after a loss."""

from __future__ import annotations

import json
import os
import stat
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tests.waiting import wait_for

from paceline.engines.mpi import own_ranks
from paceline.frontends.mpi_meeting import OUTCOME, LeadingRank, MeetingPlace, read_outcome


def _place(rank: int, folder: Path, **environment: str) -> MeetingPlace:
    given = {"PMIX_SERVER_TMPDIR": str(folder), **environment}
    return MeetingPlace(rank, 3, True, "job@1", given)


@pytest.fixture
def leading(tmp_path: Path) -> Iterator[LeadingRank]:
    with LeadingRank(_place(0, tmp_path), 1) as leading:
        yield leading


def test_only_this_user_can_read_where_rank_0_is(tmp_path: Path, leading: LeadingRank) -> None:
    file = _place(1, tmp_path).file()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert json.loads(file.read_text())["host"] == "127.0.0.1"
    shared = MeetingPlace(
        1, 3, False, "job@1", {"PMIX_SERVER_TMPDIR": str(tmp_path), "XDG_STATE_HOME": "/state"}
    )
    assert shared.file() == Path("/state/paceline/mpi/job@1.json")


def test_states_of_the_other_ranks(tmp_path: Path, leading: LeadingRank) -> None:
    assert [status.state for status in leading.statuses()] == ["pending", "pending"]
    with closing(_place(1, tmp_path).connect(1)) as first, closing(_place(2, tmp_path).connect(1)) as second:
        first.set_at_end("gone/1")
        first.set("host/1", "node1")
        first.set("agent/1", b"")
        second.set("ended/2", json.dumps({"code": 1, "reason": "rank 2: refused"}))
        found = leading.statuses()
        assert [(one.node, one.state, one.host) for one in found] == [
            (1, "running", "node1"),
            (2, "ended", ""),
        ]
        assert (found[1].code, found[1].reason) == (1, "rank 2: refused")
    wait_for(lambda: leading.statuses()[0].state == "lost", "the end of the connection is seen")


def test_the_call_for_agents_and_the_result(tmp_path: Path, leading: LeadingRank) -> None:
    large = {"weights": os.urandom(3 << 20), "text": "done"}
    with closing(_place(1, tmp_path).connect(1)) as first, closing(_place(2, tmp_path).connect(1)) as second:
        leading.folder = "/runs/1"
        leading.call_agents(("10.0.0.5", 4), b"secret")
        assert own_ranks.decode_call(first.get("agents") or b"") == (("10.0.0.5", 4), b"secret", "/runs/1")
        found: list[Any] = []

        def read() -> None:
            second.set_at_end("gone/2")
            first.await_keys([OUTCOME], 30.0)
            found.append(read_outcome(first))
            first.set("read/1", b"")
            second.close()  # a rank that dies before it has read

        reader = threading.Thread(target=read)
        reader.start()
        leading.publish(large, ok=True)
        reader.join()
    assert found == [(True, large)]
    assert leading.world_size == 2  # a rank that is gone takes no part in later calls


def test_one_rank_leads_after_a_loss(tmp_path: Path) -> None:
    first, second = _place(1, tmp_path), _place(2, tmp_path)
    assert [second.claim(1), first.claim(1)] == [True, False]
    assert second.others == [1]
    with LeadingRank(second, 1) as leading, closing(first.connect(1)) as store:
        assert first.leader == 2
        store.set("host/1", "node1")
        leading.await_survivors()
        assert leading.world_size == 2
    assert not first.file().exists()
