"""`paceline.spawn` with real ranks and real contexts."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from paceline.core.errors import (
    CommTimeoutError,
    DisagreementError,
    PeerLostError,
    RankFailedError,
    UsageError,
)
from paceline.frontends.spawn import spawn

FOREVER = 3600


def total(ctx: Any, x: float) -> list[float]:
    result: list[float] = ctx.all_reduce([ctx.rank * x])
    return result


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_ranks_get_a_context_and_results_come_by_rank(workers):
    results = spawn(lambda ctx: (ctx.rank, ctx.world_size, total(ctx, 10.0)), workers=workers)
    expected = 10.0 * workers * (workers - 1) / 2
    assert results == [(rank, workers, [expected]) for rank in range(workers)]


@dataclass
class Holder:
    tensor: torch.Tensor
    name: str


DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.complex64, torch.uint8]


@pytest.mark.parametrize("count", [1, 5, 100_000])
def test_tensors_travel_both_ways(count):
    sent = [torch.arange(count).to(dtype) for dtype in DTYPES]
    for rank, back in enumerate(spawn(_change, sent, workers=2)):
        for before, after in zip(sent, back, strict=True):
            assert after.dtype == before.dtype
            assert torch.equal(after, before.flip(0) if rank else before)
            after.zero_()


def _change(ctx: Any, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    for tensor in tensors:
        tensor.copy_(tensor.flip(0) if ctx.rank else tensor.clone())
    return tensors


def test_unusual_tensors_and_modules_travel():
    net = torch.nn.Linear(3, 2)
    odd: dict[str, Any] = {
        "empty": torch.zeros(0, 4),
        "scalar": torch.tensor(3.5),
        "strided": torch.arange(6.0).reshape(2, 3).t(),
        "needs grad": torch.ones(3, requires_grad=True),
        "sparse": torch.eye(3).to_sparse(),
        "net": net,
        "holder": Holder(torch.ones(2), "h"),
    }
    (back,) = spawn(lambda ctx, value: value, odd, workers=1)
    for name in ("empty", "scalar", "strided", "needs grad"):
        assert torch.equal(back[name], odd[name])
        assert back[name].stride() == odd[name].stride()
        assert back[name].requires_grad == odd[name].requires_grad
    assert torch.equal(back["sparse"].to_dense(), torch.eye(3))
    assert torch.equal(back["net"].weight, net.weight)
    assert isinstance(back["net"].weight, torch.nn.Parameter)
    assert type(back["holder"]) is Holder


def test_a_result_in_the_groups_shared_memory_survives_the_group():
    def fill(ctx: Any) -> torch.Tensor:
        mine: torch.Tensor = ctx.empty(100_000)
        mine.fill_(ctx.rank)
        ctx.barrier()
        return mine

    for rank, tensor in enumerate(spawn(fill, workers=2)):
        assert torch.equal(tensor, torch.full((100_000,), float(rank)))


def test_a_hundred_megabytes_come_back_without_many_copies():
    spawn(total, 1.0, workers=1)
    started = time.monotonic()
    (tensor,) = spawn(lambda ctx: torch.ones(25_000_000), workers=1)
    assert tensor.shape == (25_000_000,)
    assert tensor[-1] == 1
    assert time.monotonic() - started < 5


def test_torch_uses_the_ranks_share_of_threads(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    share = max(1, len(os.sched_getaffinity(0)) // 2)
    assert spawn(lambda ctx: torch.get_num_threads(), workers=2) == [share] * 2
    assert spawn(lambda ctx: torch.get_num_threads(), workers=2, threads=3) == [3] * 2


def test_ranks_draw_their_own_numbers_like_any_process():
    drawn = [number for _ in range(2) for number in spawn(lambda ctx: torch.rand(1).item(), workers=2)]
    assert len(set(drawn)) == 4


def _fail_on(ctx: Any, culprit: int, how: str) -> None:
    if ctx.rank == culprit:
        if how == "raise":
            raise ValueError("root cause")
        os.kill(os.getpid(), signal.SIGKILL)
    ctx.barrier()


def test_the_rank_that_raised_is_blamed_not_those_that_lost_it():
    with pytest.raises(RankFailedError, match="root cause") as caught:
        spawn(_fail_on, 2, "raise", workers=4)
    assert caught.value.rank == 2
    assert isinstance(caught.value.original, ValueError)
    assert any("PeerLostError" in note for note in caught.value.__notes__)
    assert "rank_main" not in caught.value.traceback_text


def test_the_rank_that_was_killed_is_blamed_not_those_that_lost_it():
    with pytest.raises(PeerLostError, match=r"rank 1 \(pid \d+\) was killed by signal 9") as caught:
        spawn(_fail_on, 1, "kill", workers=3)
    assert caught.value.ranks == (1,)


def test_ranks_that_disagree_raise_what_they_would_raise_alone():
    with pytest.raises(DisagreementError) as caught:
        spawn(_disagree, workers=2)
    assert "raised on rank" in caught.value.__notes__[0]


def _disagree(ctx: Any) -> None:
    if ctx.rank:
        ctx.barrier()
    else:
        ctx.all_reduce(torch.ones(3))


def test_a_mistake_in_a_rank_is_a_usage_error_here():
    with pytest.raises(UsageError):
        spawn(lambda ctx: ctx.broadcast(torch.ones(1), root_rank=99), workers=2)


def test_a_timeout_says_what_each_rank_waits_for():
    def hang(ctx: Any) -> None:
        if ctx.rank:
            time.sleep(FOREVER)
        ctx.barrier()

    # The function travels by value, so ranks get to it well within the limit.
    with pytest.raises(CommTimeoutError, match="ranks 0 and 1 of 2 did not finish") as caught:
        spawn(hang, workers=2, timeout=1)
    assert caught.value.waiting_for == (0, 1)
    assert str(caught.value).count("in hang") == 2


def _hang(ctx: Any) -> None:
    if ctx.rank:
        time.sleep(FOREVER)
    ctx.barrier()


def test_a_communication_may_have_its_own_limit():
    with pytest.raises(CommTimeoutError):
        spawn(_hang, workers=2, comm_timeout=0.3)


def test_ranks_can_spawn_ranks():
    assert spawn(_nested, workers=2) == [[[1.0], [1.0]], [[1.0], [1.0]]]


def _nested(ctx: Any) -> Any:
    return spawn(total, 1.0, workers=2)


def needs_two(ctx: Any, a: int, b: int) -> None:
    raise AssertionError("never called")


@pytest.mark.parametrize(
    ("arguments", "settings", "words"),
    [
        ((total, 1.0), {"workers": 0}, "workers must be"),
        ((total, 1.0), {"workers": -3}, "workers must be"),
        ((total, 1.0), {"workers": "4"}, "workers must be"),
        ((total, 1.0), {"workers": 5000}, "4096"),
        ((total, 1.0), {"timeout": -1}, "timeout must be"),
        ((total, 1.0), {"comm_timeout": 0}, "comm_timeout must be"),
        ((total, 1.0), {"threads": 0}, "threads must be"),
        ((total, 1.0), {"preload": "torch"}, "preload must be"),
        (("total",), {}, "must be a function"),
        ((needs_two, 1), {}, r"needs_two\(.*cannot be called with the context and 1 argument"),
        ((lambda: None,), {}, "first parameter of the function is the rank's context"),
    ],
)
def test_bad_input_is_refused_before_anything_starts(arguments, settings, words):
    with pytest.raises(UsageError, match=words):
        spawn(*arguments, **settings)
