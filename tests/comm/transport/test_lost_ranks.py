"""kill -9 inside a collective, between real processes: the survivors name the dead within a second."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.comm.ranks import LARGE, processes
from tests.waiting import wait_for

from paceline.core.errors import PeerLostError

VICTIM = 2
WORKERS = 4

Calls = Callable[[Any], Any]
CALLS: dict[str, Calls] = {
    "small": lambda ctx: ctx.all_reduce([1.0]),
    "large": lambda ctx: ctx.all_reduce(torch.ones(LARGE)),
    "reached": lambda ctx: _reached(ctx),
    "ring": lambda ctx: ctx.all_reduce(torch.ones(LARGE), "sum", "ring"),
    "all_gather": lambda ctx: ctx.all_gather(torch.ones(LARGE)),
    "receive": lambda ctx: ctx.receive(VICTIM),
    "asynchronous": lambda ctx: ctx.all_reduce(torch.ones(LARGE), async_op=True).wait(),
}


def _reached(ctx: Any) -> Any:
    ctx.transport.window.reachable = True
    return ctx.all_reduce(torch.ones(LARGE))


def _until_the_others_wait(ctx: Any) -> None:
    """Only peers can tell: a status is readable when a rank has waited for longer than a moment."""
    board = ctx.transport._board
    wait_for(lambda: all(board.peer(rank).status for rank in range(WORKERS) if rank != VICTIM))


def _lose_one(ctx: Any, name: str, folder: str) -> None:
    """All ranks meet once; then one is killed as soon as the others wait for it."""
    ctx.all_reduce(torch.ones(LARGE))
    ctx.barrier()
    if ctx.rank == VICTIM:
        _until_the_others_wait(ctx)
        (Path(folder) / "killed").write_text(str(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        CALLS[name](ctx)
    except PeerLostError as error:
        found = {"seconds": time.monotonic(), "ranks": error.ranks, "text": str(error)}
        (Path(folder) / f"rank{ctx.rank}").write_text(json.dumps(found))
        raise


@pytest.mark.parametrize("name", list(CALLS))
def test_survivors_name_the_lost_rank_within_a_second(name, tmp_path):
    with pytest.raises(PeerLostError) as caught:
        processes(_lose_one, name, str(tmp_path), workers=WORKERS)
    assert caught.value.ranks == (VICTIM,)
    killed = float((tmp_path / "killed").read_text())
    for rank in range(WORKERS):
        if rank == VICTIM:
            continue
        found = json.loads((tmp_path / f"rank{rank}").read_text())
        assert found["ranks"] == [VICTIM]
        assert found["seconds"] - killed < 1.0
        assert f"rank {VICTIM}" in found["text"]
        assert "test_lost_ranks.py:" in found["text"]


def _lose_one_at_work(ctx: Any, folder: str) -> None:
    """The survivors are in the middle of a long reduction when it happens, not in a quiet wait."""
    data = ctx.empty(3_000_000)
    try:
        for turn in range(10_000):
            if ctx.rank == VICTIM and turn == 5:
                (Path(folder) / "killed").write_text(str(time.monotonic()))
                os.kill(os.getpid(), signal.SIGKILL)
            ctx.all_reduce(data, out=data)
    except PeerLostError as error:
        found = {"seconds": time.monotonic(), "ranks": error.ranks}
        (Path(folder) / f"rank{ctx.rank}").write_text(json.dumps(found))
        raise


def test_a_loss_between_two_of_many_reductions(tmp_path):
    with pytest.raises(PeerLostError):
        processes(_lose_one_at_work, str(tmp_path), workers=WORKERS)
    killed = float((tmp_path / "killed").read_text())
    for rank in (0, 1, 3):
        found = json.loads((tmp_path / f"rank{rank}").read_text())
        assert found["ranks"] == [VICTIM]
        assert found["seconds"] - killed < 1.0
