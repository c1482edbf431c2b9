"""What DistributedDataParallel says when it is used wrongly, or differently by different ranks."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tests.parallel.models import (
    DDP,
    TINY_BUCKETS,
    Branches,
    Net,
    batch,
    loss,
    ranks,
)
from torch import nn

from paceline.comm import default_group
from paceline.comm.compression import PowerSGD
from paceline.comm.context import DistributedContext
from paceline.core.errors import DisagreementError, PacelineError, PeerLostError, UsageError
from paceline.core.shm_segment_layout import create_segment
from paceline.parallel.ddp import no_sync


def _leave_out(ctx: Any) -> None:
    loss(DDP(Branches())(batch(ctx.rank), "left")).backward()


def test_parameters_unused_everywhere_are_an_error_that_names_them():
    with pytest.raises(UsageError, match="find_unused_parameters=True") as caught:
        ranks(_leave_out, workers=2)
    names = "'right.weight', 'right.bias', 'never.weight', 'never.bias' (ranks 0 and 1)"
    assert f"without a gradient for {names}" in caught.value.message


def _caught(ctx: Any, sides: tuple[str, ...]) -> tuple[str, bool]:
    ddp = DDP(Branches(), TINY_BUCKETS, overlap=True)
    for parameter in ddp.module.never.parameters():
        parameter.requires_grad_(False)
    try:
        loss(ddp(batch(ctx.rank), sides[ctx.rank])).backward()
    except PacelineError as error:
        message = str(error)
    try:
        ctx.barrier()
    except PacelineError:
        return message, False
    return message, True


def test_the_group_survives_an_error_that_all_ranks_make():
    for message, group_works in ranks(_caught, ("left", "left")):
        assert "'right.weight', 'right.bias' (ranks 0 and 1)" in message
        assert group_works


def _one_leaves_out(ctx: Any) -> str:
    ddp = DDP(Branches(), TINY_BUCKETS, overlap=True)
    sides = ("left", "right", "never") if ctx.rank == 0 else ("left", "never")
    try:
        loss(ddp(batch(ctx.rank), *sides)).backward()
    except PacelineError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_a_rank_that_alone_leaves_parameters_out_names_them_and_the_others_do_not_hang():
    started = time.monotonic()
    zero, one = ranks(_one_leaves_out)
    assert one.startswith(
        "UsageError: backward ended without a gradient for 'right.weight', 'right.bias' (rank 1)"
    )
    assert zero.startswith("DisagreementError")
    assert time.monotonic() - started < 5 + 5  # the ranks' own start included


def _dies(ctx: Any) -> None:
    ddp = DDP(Branches(), TINY_BUCKETS)
    if ctx.rank == 1:
        ddp.module.trunk.weight.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
    loss(ddp(batch(ctx.rank), "left", "right", "never")).backward()


def test_a_rank_that_is_killed_in_backward_is_named_by_the_others():
    with pytest.raises(PeerLostError) as caught:
        ranks(_dies, workers=3)
    assert caught.value.ranks == (1,)


def _mismatched(ctx: Any, kind: str) -> None:
    width = 3 if ctx.rank == 1 else 4
    if kind == "shape":
        DDP(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, width)))
    elif kind == "name":
        DDP(nn.ModuleDict({"b" if ctx.rank == 2 else "a": nn.Linear(2, 2)}))
    elif kind == "dtype":
        DDP(nn.Linear(2, 2, dtype=torch.float64 if ctx.rank else torch.float32))
    elif kind == "settings":
        DDP(nn.Linear(2, 2), bucket_size_mb=1 + ctx.rank)
    elif kind == "order":
        names = ["a", "b"] if ctx.rank else ["b", "a"]
        DDP(nn.ModuleDict({name: nn.Linear(2, 2) for name in names}))


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (
            "shape",
            r"'1.weight' on rank 0 differs from rank 1, and 1 more differs(.|\n)*rank 1: .*float32\[3, 2\]",
        ),
        ("name", r"'a.weight' on rank 0 differs from rank 2(.|\n)*rank 2: .*has none of this name"),
        ("dtype", r"'weight' on rank 0 differs from ranks 1 and 2(.|\n)*float64"),
        ("settings", r"'settings'(.|\n)*bucket_size_mb=3"),
        ("order", r"another order(.|\n)*rank 0: b.weight"),
    ],
)
def test_ranks_with_different_models_are_told_which_parameter_and_where(kind, words):
    with pytest.raises(DisagreementError, match=words):
        ranks(_mismatched, kind, workers=3)


@contextmanager
def group_of_one() -> Iterator[DistributedContext]:
    segment = create_segment(1)
    context = DistributedContext.from_segment(segment, 0, 1)
    os.close(segment)
    default_group.install(context)
    try:
        yield context
    finally:
        default_group.clear()
        context.close()


def _thawed(ctx: Any) -> None:
    model = Net()
    model.first.requires_grad_(False)
    ddp = DDP(model)
    model.first.requires_grad_(True)
    ddp(batch(ctx.rank))


def _sparse(ctx: Any) -> None:
    DDP(nn.Embedding(4, 2, sparse=True))(torch.tensor([1])).sum().backward()


def _converted(ctx: Any) -> None:
    model = DDP(Net())
    model.double()
    loss(model(batch(ctx.rank).double())).backward()


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (_thawed, "'first.weight', 'first.bias' did not require a gradient when"),
        (_sparse, "'weight' has a gradient of layout"),
        (_converted, "was float32.* when the model was wrapped"),
        (lambda ctx: DDP(Net().requires_grad_(False)), "requires a gradient"),
        (lambda ctx: DDP(nn.LazyLinear(3)), "'weight', 'bias' have no shape yet"),
        (lambda ctx: DDP("net"), "was given a str"),
        (lambda ctx: DDP(Net(), 0), "bucket_size_mb=0"),
        (lambda ctx: DDP(Net(), float("nan")), "bucket_size_mb=nan"),
        (lambda ctx: DDP(Net(), mode="quick"), "mode='quick'"),
        (lambda ctx: DDP(Net(), compression="int8"), "compression='int8'"),
        (
            lambda ctx: DDP(nn.Linear(2, 2, dtype=torch.complex64), compression=PowerSGD()),
            "'weight'",
        ),
        (lambda ctx: DDP(Net(), mode="fast", context=ctx), "takes neither context="),
        (lambda ctx: DDP(Net(), mode="fast"), "needs an initialised group of torch.distributed"),
        (lambda ctx: no_sync(Net()), "no_sync was given a Net"),
    ],
)
def test_mistakes_are_named(function, words):
    with group_of_one() as context, pytest.raises(UsageError, match=words):
        function(context)


def test_a_model_without_a_group_is_refused():
    with pytest.raises(UsageError, match=r"paceline.init_process_group\(\) first"):
        DDP(Net())
