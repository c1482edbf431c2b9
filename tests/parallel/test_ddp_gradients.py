"""DistributedDataParallel with real ranks: the same bits everywhere, and the bits of one process."""

from __future__ import annotations

import copy
import socket
from typing import Any

import pytest
import torch
from tests.parallel.models import (
    DDP,
    TINY_BUCKETS,
    Branches,
    Net,
    batch,
    canonical_average,
    equal,
    expected_average,
    grads,
    loss,
    ranks,
)
from torch import Tensor, nn

from paceline.comm.context import DistributedContext
from paceline.core.errors import UsageError
from paceline.parallel.ddp import no_sync

WAYS = [(bucket, overlap) for bucket in (25, TINY_BUCKETS) for overlap in (False, True)]


def _one_backward(ctx: Any, model: nn.Module) -> list[list[Tensor | None]]:
    results = []
    for bucket, overlap in WAYS:
        ddp = DDP(copy.deepcopy(model), bucket, context=ctx, overlap=overlap)
        loss(ddp(batch(ctx.rank))).backward()
        results.append(grads(ddp))
    return results


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_gradients_have_the_bits_of_one_process_on_every_rank(workers):
    expected = expected_average(Net(), workers)
    for results in ranks(_one_backward, Net(), workers=workers):
        for way, result in zip(WAYS, results, strict=True):
            assert equal(result, expected), way


def _over_gloo(ctx: Any, model: nn.Module, port: int) -> list[Tensor | None]:
    with DistributedContext(
        ctx.world_size, ctx.rank, address=f"127.0.0.1:{port}", backend="gloo"
    ) as messages:
        ddp = DDP(model, TINY_BUCKETS, context=messages, overlap=True)
        loss(ddp(batch(ctx.rank))).backward()
        return grads(ddp)


def test_without_shared_memory_the_bits_are_the_same():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    expected = expected_average(Net(), 3)
    for result in ranks(_over_gloo, Net(), port, workers=3):
        assert equal(result, expected)


def _train(ctx: Any, steps: int, set_to_none: bool, mb: float) -> tuple[dict[str, Tensor], bool]:
    ddp = DDP(Net(seed=ctx.rank), mb)  # each rank starts elsewhere: rank 0's weights count
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01)
    views = True
    for step in range(steps):
        optimizer.zero_grad(set_to_none=set_to_none)
        loss(ddp(batch(ctx.rank, step))).backward()
        memory = {p.grad.untyped_storage().data_ptr() for p in ddp.parameters() if p.grad is not None}
        views &= mb < 1 or len(memory) == 1
        optimizer.step()
    return ddp.module.state_dict(), views


@pytest.mark.parametrize("set_to_none", [False, True])
def test_training_keeps_weights_and_buffers_equal_on_all_ranks(set_to_none):
    (first, views), *others = ranks(_train, 4, set_to_none, 25, workers=3)
    assert views
    for state, still_views in others:
        assert still_views
        assert equal(list(state.values()), list(first.values()))
    assert not torch.equal(first["first.weight"], Net(seed=0).first.weight)


def test_training_does_not_depend_on_the_buckets():
    (whole, _), *_ = ranks(_train, 4, True, 25)
    (pieces, _), *_ = ranks(_train, 4, True, TINY_BUCKETS)
    assert equal(list(whole.values()), list(pieces.values()))


def _accumulate(ctx: Any, how: str) -> tuple[list[Tensor | None], list[Tensor | None]]:
    ddp = DDP(Net(), context=ctx)
    ddp.eval()  # batch statistics would make the second forward depend on the first
    pause = {"method": ddp.no_sync, "model": lambda: no_sync(ddp), "all": no_sync}[how]
    with pause():
        for step in range(2):
            loss(ddp(batch(ctx.rank, step))).backward()
    local = grads(ddp)
    loss(ddp(batch(ctx.rank, 2))).backward()
    return local, grads(ddp)


@pytest.mark.parametrize("how", ["method", "model", "all"])
def test_no_sync_accumulates_and_the_next_backward_averages_the_sum(how):
    summed = []
    for rank in range(2):
        alone = Net().eval()
        for step in range(2):
            loss(alone(batch(rank, step))).backward()
        half = grads(alone)
        loss(alone(batch(rank, 2))).backward()
        summed.append((half, grads(alone)))
    results = ranks(_accumulate, how)
    for rank, (local, final) in enumerate(results):
        assert equal(local, summed[rank][0])
        assert equal(
            final, [canonical_average(list(parts)) for parts in zip(*(s for _, s in summed), strict=True)]
        )


def _twice(ctx: Any) -> list[Tensor | None]:
    ddp = DDP(Net().eval())
    output = ddp(batch(ctx.rank))
    loss(output).backward(retain_graph=True)
    loss(output).backward()
    return grads(ddp)


def test_two_backwards_add_two_averages():
    expected = [2 * grad for grad in expected_average(Net().eval(), 2)]
    for result in ranks(_twice):
        for got, wanted in zip(result, expected, strict=True):
            torch.testing.assert_close(got, wanted)


SIDES = ("left", "right")


def _branches(
    ctx: Any, sides: tuple[str, ...], find_unused: bool, overlap: bool = True
) -> list[Tensor | None]:
    ddp = DDP(Branches(), TINY_BUCKETS, find_unused, overlap=overlap)
    for _ in range(2):
        ddp.zero_grad()
        loss(ddp(batch(ctx.rank), sides[ctx.rank])).backward()
    return grads(ddp)


@pytest.mark.parametrize("overlap", [False, True])
def test_unused_parameters_count_as_zero_where_allowed(overlap):
    results = ranks(_branches, SIDES, True, overlap)
    parts = []
    for rank, side in enumerate(SIDES):
        alone = Branches()
        loss(alone(batch(rank), side)).backward()
        parts.append([torch.zeros_like(p) if p.grad is None else p.grad for p in alone.parameters()])
    expected: list[Tensor | None] = [canonical_average(list(pair)) for pair in zip(*parts, strict=True)]
    expected[-2:] = [None, None]  # no rank used them
    for result in results:
        assert equal(result, expected)


def _buffers(ctx: Any, broadcast: bool) -> list[Tensor]:
    model = Net()
    with torch.no_grad():
        model.norm.running_mean.fill_(ctx.rank)  # type: ignore[union-attr]
    ddp = DDP(model, broadcast_buffers=broadcast)
    start = model.norm.running_mean.clone()  # type: ignore[union-attr]
    loss(ddp(batch(ctx.rank))).backward()
    own = Net()
    own(batch(ctx.rank))
    ddp.eval()
    if ctx.is_master:  # only the master evaluates
        ddp(batch(0))
    return [start, model.norm.running_mean, own.norm.running_mean]  # type: ignore[list-item]


def test_buffers_are_those_of_rank_0_from_the_start_and_after_each_step():
    results = ranks(_buffers, True)
    for start, after, _ in results:
        assert torch.equal(start, torch.zeros(16))
        assert torch.equal(after, results[0][2])


def test_buffers_can_stay_each_ranks_own():
    for start, after, own in ranks(_buffers, False):
        assert torch.equal(start, torch.zeros(16))
        assert torch.equal(after, own)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encode = nn.Linear(5, 5, bias=False)
        self.decode = nn.Linear(5, 5, bias=False)
        self.decode.weight = self.encode.weight
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.nothing = nn.Parameter(torch.zeros(0, 3))
        self.twice = nn.Parameter(torch.ones(5, dtype=torch.float64))
        self.narrow = nn.Parameter(torch.ones(5, dtype=torch.bfloat16))
        self.conv = nn.Conv2d(1, 2, 1).to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, x: Tensor) -> Tensor:
        x = self.decode(torch.tanh(self.frozen(self.encode(x)))) * self.twice.float() * self.narrow.float()
        image = x.view(-1, 1, 1, 5)
        out: Tensor = self.conv(image).sum() + self.nothing.sum()
        return out


def _tied(ctx: Any, bucket: float) -> tuple[list[Tensor | None], list[tuple[int, ...]], int]:
    ddp = DDP(Tied(), bucket, overlap=True)
    ddp(batch(ctx.rank)).backward()
    strides = [p.grad.stride() for p in ddp.parameters() if p.grad is not None]
    return grads(ddp), strides, len(list(ddp.parameters()))


@pytest.mark.parametrize("bucket", [25, TINY_BUCKETS])
def test_tied_frozen_empty_and_mixed_parameters(bucket):
    by_rank = []
    for rank in range(2):
        alone = Tied()
        alone(batch(rank)).backward()
        by_rank.append(grads(alone))
    results = ranks(_tied, bucket)
    for got, strides, count in results:
        assert count == len(by_rank[0]) == 8
        assert strides == [p.stride() for p in Tied().parameters() if p.requires_grad]
        for mine, a, b in zip(got, *by_rank, strict=True):
            if a is None or b is None:
                assert mine is None
            else:
                wide = torch.float32 if a.dtype == torch.bfloat16 else a.dtype
                assert mine.dtype == a.dtype
                assert torch.equal(mine, canonical_average([a.to(wide), b.to(wide)]).to(a.dtype))


def _checkpointed(ctx: Any, reentrant: bool) -> list[Tensor | None]:
    from torch.utils.checkpoint import checkpoint

    class Piece(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net().eval()

        def forward(self, x: Tensor) -> dict[str, list[Tensor]]:
            hidden = checkpoint(self.net.first, x.requires_grad_(), use_reentrant=reentrant)
            return {"out": [self.net.last(torch.tanh(self.net.norm(hidden)))]}

    ddp = DDP(Piece(), TINY_BUCKETS, overlap=True)
    loss(ddp(batch(ctx.rank))["out"][0]).backward()
    return grads(ddp)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_layers_are_averaged_too(reentrant):
    expected = expected_average(Net().eval(), 2)
    for result in ranks(_checkpointed, reentrant):
        assert equal(result, expected)


def _input_gradients(ctx: Any) -> list[Tensor | None]:
    ddp = DDP(Net().eval())
    x = batch(ctx.rank).requires_grad_()
    if ctx.rank == 0:  # a local question, which the other rank does not ask
        torch.autograd.grad(ddp(x).sum(), x)
    loss(ddp(batch(ctx.rank))).backward()
    return grads(ddp)


def test_gradients_of_inputs_alone_are_not_synchronised():
    expected = expected_average(Net().eval(), 2)
    assert all(equal(result, expected) for result in ranks(_input_gradients))


class _Explodes(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, grad: Tensor) -> Tensor:
        raise ArithmeticError("halfway")


def _fails_once(ctx: Any) -> list[Tensor | None]:
    ddp = DDP(Net().eval(), TINY_BUCKETS, overlap=True)
    with pytest.raises(ArithmeticError, match="halfway"):
        loss(ddp(_Explodes.apply(batch(ctx.rank).requires_grad_()))).backward()
    ddp.zero_grad()
    loss(ddp(batch(ctx.rank))).backward()
    return grads(ddp)


def test_a_backward_that_failed_halfway_can_be_repeated():
    expected = expected_average(Net().eval(), 2)
    assert all(equal(result, expected) for result in ranks(_fails_once))


def _state(ctx: Any) -> tuple[list[str], list[str], str, bool]:
    ddp = DDP(Net())
    torch_keys = ["module." + key for key in Net().state_dict()]
    copied = copy.deepcopy(ddp.module)
    loss(copied(batch(ctx.rank))).backward()  # the copy belongs to no group
    untouched = all(p.grad is None for p in ddp.parameters())
    ddp.load_state_dict(ddp.state_dict())
    with pytest.raises(UsageError, match=r"save its \.module"):
        copy.deepcopy(ddp)
    return list(ddp.state_dict()), torch_keys, repr(ddp), untouched


def test_state_dict_has_torchs_keys_and_the_module_can_be_copied():
    keys, torch_keys, text, untouched = ranks(_state, workers=1)[0]
    assert keys == torch_keys
    assert "mode='exact'" in text
    assert untouched
