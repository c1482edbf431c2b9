"""What travels: bytes, messages and rounds of each algorithm, to the byte."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tests.comm.ranks import on_hosts

from paceline.comm.compression import cast_gradients, quantize_gradients, sparsify_gradients
from paceline.comm.context import DistributedContext
from paceline.comm.transport.base import HEADER_BYTES
from paceline.comm.transport.tcp.framed_socket import HEAD_BYTES
from paceline.core.session_auth import TAG_BYTES
from paceline.testing.thread_transport import run_ranks


def tally(ctx: DistributedContext, algorithm: str, length: int, **options: Any) -> dict[str, Any]:
    dtype = options.pop("dtype", torch.float32)
    ctx.enable_profiling()
    ctx.all_reduce(torch.ones(length, dtype=dtype), "sum", algorithm, **options)
    found: dict[str, Any] = ctx.get_communication_stats()["operations"]["all_reduce"][algorithm]
    return found


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 7, 8])
def test_ring_sends_the_optimum_to_the_byte(ranks):
    length = 840 * ranks
    for found in run_ranks(ranks, tally, "ring", length):
        assert found["bytes_sent"] == 2 * (ranks - 1) * (4 * length) // ranks
        assert found["bytes_received"] == found["bytes_sent"]
        assert found["messages"] == 2 * (ranks - 1)
        assert found["header_bytes"] == 32 * found["messages"]
        assert found["rounds"] == 2 * (ranks - 1)
    assert HEADER_BYTES == HEAD_BYTES - TAG_BYTES == 32  # of shared memory, and of connections


@pytest.mark.parametrize("length", [0, 1, 5, 1001])
def test_ring_sends_the_optimum_in_all_when_ranks_do_not_divide_the_message(length):
    found = run_ranks(3, tally, "ring", length)
    assert sum(of_rank["bytes_sent"] for of_rank in found) == 2 * 2 * 4 * length
    assert sum(of_rank["bytes_received"] for of_rank in found) == 2 * 2 * 4 * length


@pytest.mark.parametrize("algorithm", ["ring", "tree"])
def test_16_bit_partial_sums_travel_as_fp32_and_results_as_they_are(algorithm):
    def one(ctx: DistributedContext) -> dict[str, Any]:
        return tally(ctx, algorithm, 4000, dtype=torch.bfloat16)

    for found in run_ranks(4, one):
        assert found["bytes_sent"] == 3 * 1000 * 4 + 3 * 1000 * 2


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_tree_takes_two_log_n_rounds_and_the_ring_s_bytes(ranks):
    length = 840 * ranks
    for found in run_ranks(ranks, tally, "tree", length):
        assert found["rounds"] == 2 * math.log2(ranks)
        assert found["messages"] == 2 * math.log2(ranks)
        assert found["bytes_sent"] == 2 * (ranks - 1) * (4 * length) // ranks
        assert found["header_bytes"] == 32 * found["messages"]


@pytest.mark.parametrize("ranks", [3, 5, 6, 7])
def test_tree_takes_two_more_rounds_when_ranks_are_no_power_of_two(ranks):
    core = 1 << (ranks.bit_length() - 1)
    found = run_ranks(ranks, tally, "tree", 840)
    assert max(of_rank["rounds"] for of_rank in found) == 2 * math.log2(core) + 2
    for rank in range(core, ranks):
        assert found[rank]["bytes_sent"] == found[rank]["bytes_received"] == 4 * 840
        assert found[rank]["rounds"] == 2


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("algorithm", ["direct", "canonical"])
def test_small_messages_in_the_window_meet_once(algorithm, ranks):
    for found in run_ranks(ranks, tally, algorithm, 100):
        assert found["rounds"] == 1
        assert found["bytes_sent"] == found["bytes_received"] == 400 * (ranks - 1)
        assert found["header_bytes"] == 0


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("algorithm", ["direct", "canonical"])
def test_large_messages_in_the_window_move_the_optimum(algorithm, shared):
    length = 1 << 19

    def one(ctx: DistributedContext) -> dict[str, Any]:
        data = ctx.empty(length) if shared else torch.empty(length)
        ctx.enable_profiling()
        ctx.all_reduce(data.fill_(1), "sum", algorithm, out=data)
        found: dict[str, Any] = ctx.get_communication_stats()["operations"]["all_reduce"][algorithm]
        return found

    for found in run_ranks(4, one):
        assert found["bytes_sent"] == found["bytes_received"] == 2 * 3 * 4 * length // 4


def test_hierarchical_sends_one_host_s_worth_between_hosts():
    """Two hosts of two: the leaders exchange the message once each way; the others only talk inside."""
    length = 4000

    def one(ctx: DistributedContext) -> dict[str, Any]:
        return tally(on_hosts(ctx, [[0, 1], [2, 3]]), "hierarchical", length)

    found = run_ranks(4, one)
    inside = 4 * length  # half a message for the sum, half for the finished slice
    for leader in (0, 2):
        assert found[leader]["bytes_sent"] == inside + 2 * 4 * length // 2 + 4 * length
    for other in (1, 3):
        assert found[other]["bytes_sent"] == inside


@pytest.mark.parametrize(
    ("make", "bits"),
    [
        (lambda: cast_gradients("bf16"), 16),
        (lambda: quantize_gradients(8), 8.2),
        (lambda: quantize_gradients(4), 4.2),
    ],
)
@pytest.mark.parametrize("algorithm", ["direct", "ring", "tree"])
def test_bytes_are_counted_after_compression(algorithm, make, bits):
    length = 1 << 15

    def one(ctx: DistributedContext) -> dict[str, Any]:
        return tally(ctx, algorithm, length, compression=make())

    for found in run_ranks(4, one):
        plain = 2 * 3 * 4 * length // 4
        assert bits / 32 * 0.95 <= found["bytes_sent"] / plain <= bits / 32 * 1.05
        assert found["header_bytes"] == 32 * found["messages"]


def test_top_k_sends_two_percent():
    def one(ctx: DistributedContext) -> dict[str, Any]:
        return tally(ctx, "ring", 1 << 15, compression=sparsify_gradients(0.99))

    for found in run_ranks(4, one):
        assert found["bytes_sent"] / (2 * 3 * (1 << 15)) <= 0.0205
