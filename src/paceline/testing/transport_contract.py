"""Contract of every transport, as tests that the author of a transport can run on it.

    class TestMine(TransportContract):
        def run(self, world_size, fn, *args):
            ...  # start `world_size` ranks, call fn(context, *args) on each, return the results by rank

`run` raises if a rank raises. Each test calls functions of transport_contract_ranks.py on all ranks, so they
can travel to other processes by name. Only what `base.Transport` promises is checked, and what the transport
declares besides: how fast it is, and how it notices a process that was killed, needs further tests. Works
with pytest, and needs nothing of it.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from paceline.testing import transport_contract_ranks as ranks
from paceline.testing.transport_contract_ranks import DISAGREEMENTS, NOTICED_WITHIN, Outcome


def on_ranks(function: Callable[..., Any], *sizes: int) -> Callable[[TransportContract], None]:
    """Return a test that runs `function` on groups of these sizes; by default those of the class."""

    def test(self: TransportContract) -> None:
        for size in sizes or self.world_sizes:
            self.run(size, function)

    return test


class TransportContract(ABC):
    """Subclass it, and implement `run`."""

    __test__ = False
    world_sizes = (2, 3)

    def __init_subclass__(cls) -> None:
        cls.__test__ = True

    @abstractmethod
    def run(self, world_size: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """Call fn(context, *args) on every rank of a new group; return the results by rank."""

    # exchange
    test_messages_of_a_pair_arrive_in_order = on_ranks(ranks.messages_in_order)
    test_empty_messages_are_messages = on_ranks(ranks.empty_messages, 2)
    test_every_pair_exchanges_large_messages_at_once = on_ranks(ranks.large_messages)
    test_many_messages_at_once = on_ranks(ranks.many_messages, 3)
    test_one_side_may_only_send = on_ranks(ranks.one_sided, 3)
    test_every_dtype_travels = on_ranks(ranks.all_dtypes, 2)
    test_memory_is_free_after_an_exchange = on_ranks(ranks.reused_memory, 2)
    test_traffic_is_counted = on_ranks(ranks.counted_traffic, 2)

    # post and take
    test_tags_select_messages = on_ranks(ranks.tagged_messages, 2)
    test_any_source = on_ranks(ranks.messages_from_any_source, 3)
    test_a_timeout_loses_nothing = on_ranks(ranks.late_message, 2)
    test_big_messages_may_cross = on_ranks(ranks.crossing_messages, 2)
    test_messages_and_collectives_do_not_mix = on_ranks(ranks.messages_between_collectives, 3)

    # memory and life
    test_memory_of_a_transport = on_ranks(ranks.own_memory, 2)
    test_closing_twice = on_ranks(ranks.close_twice, 2)
    test_a_slow_rank_is_only_slow = on_ranks(ranks.wait_for_a_slow_rank, 3)

    # ranks that do not fit together

    def test_disagreement(self) -> None:
        for case in DISAGREEMENTS:
            for size in self.world_sizes:
                check_disagreement(case, self.run(size, ranks.disagree, case))

    def test_ranks_that_wait_for_each_other(self) -> None:
        check_disagreement("circle", self.run(2, ranks.wait_in_a_circle))

    def test_a_rank_that_left(self) -> None:
        results = self.run(3, ranks.leave_early)
        check_disagreement("a rank that left", [result for result in results if result is not None])

    def test_a_failed_rank_is_named(self) -> None:
        for rank, (kind, text, seconds) in enumerate(self.run(3, ranks.fail_in_the_middle)):
            if rank != 1:
                assert kind == "PeerLostError", text
                assert "rank 1" in text, text
                assert "out of beans" in text, text
                assert seconds < NOTICED_WITHIN, seconds

    def test_a_timeout_names_the_late_rank(self) -> None:
        (kind, text, _), _ = self.run(2, ranks.wait_too_short)
        assert kind == "CommTimeoutError", text
        assert "rank 1" in text, text

    # what a transport may offer besides

    def test_a_wait_can_be_seen_if_the_transport_says_so(self) -> None:
        reported, *_ = self.run(2, ranks.watch_a_wait)
        assert reported in (None, (1,)), reported


def check_disagreement(case: str, outcomes: list[Outcome]) -> None:
    for kind, text, seconds in outcomes:
        assert kind == "DisagreementError", f"{case}: {kind}: {text}"
        assert seconds < NOTICED_WITHIN, f"{case}: {seconds} s"
        assert "rank 0" in text, text
        assert "rank 1" in text, text
        # What each called, and from which line.
        assert re.search(r"\) at .+:\d+", text), text
