"""A state goes to those who lack it: all of it, checked, on every transport."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.comm.ranks import outcomes, raised, sha, until_it_waits, wide_range
from tests.comm.transport.ranks import run_contexts, values
from torch import Tensor

from paceline.comm import state_transfer
from paceline.comm.context import DistributedContext
from paceline.comm.state_transfer import receive_state, send_state
from paceline.comm.transport.shm.cross_memory import CrossMemory
from paceline.core.errors import CorruptDataError, GroupInterruptedError, PeerLostError, UsageError

TRANSPORTS: dict[str, dict[str, Any]] = {
    "shm": {"backend": "shm"},
    "gloo": {"backend": "gloo"},
    "hybrid": {"hosts": 2},
}
PLAIN = {"step": 41, "rng": b"\0\1\2", "nested": [1.5, None, {"a": True}]}


def state() -> dict[str, Tensor]:
    """All kinds of tensors: large ones, none at all, strided, of several dtypes."""
    return {
        "large": wide_range(1, 3_000_001),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 7),
        "strided": wide_range(2, 60).view(6, 10).t(),
        "half": wide_range(3, 1001).to(torch.bfloat16),
        "flags": torch.tensor([True, False, True]),
        "whole": torch.arange(5_000, dtype=torch.int64),
        "complex": torch.complex(torch.ones(3), torch.arange(3.0)).conj(),
        "parameter": torch.nn.Parameter(torch.ones(4)),
    }


def described(tensors: dict[str, Tensor]) -> list[Any]:
    return [
        (name, tensor.dtype, tuple(tensor.shape), sha(tensor.detach().resolve_conj().contiguous()))
        for name, tensor in tensors.items()
    ]


def hand_over(ctx: DistributedContext, source: int, by_messages: bool = False) -> Any:
    if by_messages:
        CrossMemory.try_word = lambda *_: False  # type: ignore[method-assign]
    if ctx.rank == source:
        others = [rank for rank in range(ctx.world_size) if rank != source]
        send_state(ctx, others, state(), PLAIN)
        found, plain = state(), PLAIN
    else:
        found, plain = receive_state(ctx, source)
    return described(found), plain, ctx.all_gather(ctx.rank)


@pytest.mark.parametrize("by_messages", [False, True], ids=["copied", "in pieces"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_several_receivers_get_every_bit(transport: str, by_messages: bool) -> None:
    found = values(run_contexts(3, hand_over, 1, by_messages, **TRANSPORTS[transport]))
    assert found == [(described(state()), PLAIN, [0, 1, 2])] * 3


def test_no_rank_lacks_anything() -> None:
    assert outcomes(1, lambda ctx: send_state(ctx, [], state(), PLAIN)) == [None]


def test_a_state_without_tensors() -> None:
    def one(ctx: DistributedContext) -> Any:
        return send_state(ctx, [1], {}, PLAIN) if ctx.rank == 0 else receive_state(ctx, 0)

    assert outcomes(2, one) == [None, ({}, PLAIN)]


@pytest.mark.parametrize("by_messages", [False, True], ids=["copied", "in pieces"])
def test_damage_on_the_way_is_found_and_the_source_named(
    by_messages: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if by_messages:
        monkeypatch.setattr(CrossMemory, "try_word", lambda *_: False)
    tensors = state()
    checksums = state_transfer.TensorPieces.checksums

    def damaged(stock: state_transfer.TensorPieces) -> list[int]:
        found = checksums(stock)
        return [found[0] ^ 1, *found[1:]]

    monkeypatch.setattr(state_transfer.TensorPieces, "checksums", damaged)

    def one(ctx: DistributedContext) -> tuple[int, bool]:
        act = (
            (lambda: send_state(ctx, [0, 1], tensors, PLAIN))
            if ctx.rank == 2
            else (lambda: receive_state(ctx, 2))
        )
        error = raised(CorruptDataError, act)
        return error.rank, "large" in error.message

    assert outcomes(3, one) == [(2, True)] * 3


def test_what_cannot_travel_is_refused_before_anything_does() -> None:
    def one(ctx: DistributedContext) -> int:
        if ctx.rank == 0:
            raised(UsageError, lambda: send_state(ctx, [1], {"sparse": torch.eye(3).to_sparse()}, {}))
        return len(ctx.all_gather(0))

    assert outcomes(2, one) == [2, 2]


def _interrupted(ctx: DistributedContext) -> str:
    """The receiver of a transfer that no rank begins is taken out of its group."""
    if ctx.rank == 0:
        error: Exception = raised(PeerLostError, lambda: ctx.receive(1))
    else:

        def interrupt() -> None:
            until_it_waits(ctx)
            ctx.interrupt("a test")

        thread = threading.Thread(target=interrupt)
        thread.start()
        error = raised(GroupInterruptedError, lambda: receive_state(ctx, 0))
        thread.join()
    return type(error).__name__


@pytest.mark.parametrize("transport", ["shm", "gloo"])
def test_a_handover_is_interrupted_like_anything_else(transport: str) -> None:
    found = values(run_contexts(2, _interrupted, **TRANSPORTS[transport]))
    assert found == ["PeerLostError", "GroupInterruptedError"]


def _source_dies(ctx: DistributedContext, by_messages: bool) -> tuple[int, ...]:
    if ctx.rank == 0:
        if by_messages:
            state_transfer.send_pieces = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        else:
            state_transfer.TensorPieces.checksums = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment,method-assign]
        send_state(ctx, [1], state(), PLAIN)
    elif by_messages:
        CrossMemory.try_word = lambda *_: False  # type: ignore[method-assign]
    return raised(PeerLostError, lambda: receive_state(ctx, 0)).ranks


@pytest.mark.parametrize("by_messages", [False, True], ids=["copied", "in pieces"])
def test_a_source_that_dies_is_named(by_messages: bool) -> None:
    found = run_contexts(2, _source_dies, by_messages, backend="shm")
    assert found[0].signal == signal.SIGKILL
    assert found[1].value == (0,)


def _peak_mb() -> float:
    text = Path("/proc/self/status").read_text()
    return int(next(line for line in text.splitlines() if line.startswith("VmHWM")).split()[1]) / 1e3


def _large(ctx: DistributedContext, elements: int) -> float:
    if ctx.rank == 0:
        send_state(ctx, [1], {"weights": torch.ones(elements)}, {})
        return 0.0
    before = _peak_mb()
    found, _ = receive_state(ctx, 0)
    assert float(found["weights"][-1]) == 1.0
    return _peak_mb() - before


@pytest.mark.parametrize("transport", ["shm", "gloo"])
def test_a_large_tensor_needs_its_memory_once(transport: str) -> None:
    elements = 20_000_000
    grown = values(run_contexts(2, _large, elements, **TRANSPORTS[transport]))[1]
    assert grown < elements * 4 / 1e6 + 40
