"""What every transport must do, as tests that the author of a transport can run on it.

    class TestMine(TransportContract):
        def run(self, world_size, fn, *args):
            ...  # start `world_size` ranks, call fn(context, *args) on each, return the results by rank

`run` raises if a rank raises. Each test calls functions of this module on all ranks, so they can travel to
other processes by name. Only what `base.Transport` promises is checked: how fast it is, and how it notices
a process that was killed, is for tests of its own. Works with pytest, and needs nothing of it.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from paceline.testing import transport_ranks as ranks
from paceline.testing.transport_ranks import DISAGREEMENTS, NOTICED_WITHIN, Outcome


class TransportContract(ABC):
    """Subclass it, and implement `run`."""

    __test__ = False
    world_sizes = (2, 3)

    def __init_subclass__(cls) -> None:
        cls.__test__ = True

    @abstractmethod
    def run(self, world_size: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """Calls fn(context, *args) on every rank of a new group; the results by rank."""

    # exchange

    def test_messages_of_a_pair_arrive_in_order(self) -> None:
        for size in self.world_sizes:
            self.run(size, ranks.messages_in_order)

    def test_empty_messages_are_messages(self) -> None:
        self.run(2, ranks.empty_messages)

    def test_every_pair_exchanges_large_messages_at_once(self) -> None:
        for size in self.world_sizes:
            self.run(size, ranks.large_messages)

    def test_many_messages_at_once(self) -> None:
        self.run(3, ranks.many_messages)

    def test_one_side_may_only_send(self) -> None:
        self.run(3, ranks.one_sided)

    def test_every_dtype_travels(self) -> None:
        self.run(2, ranks.all_dtypes)

    def test_memory_is_free_after_an_exchange(self) -> None:
        self.run(2, ranks.reused_memory)

    def test_traffic_is_counted(self) -> None:
        self.run(2, ranks.counted_traffic)

    # post and take

    def test_tags_select_messages(self) -> None:
        self.run(2, ranks.tagged_messages)

    def test_any_source(self) -> None:
        self.run(3, ranks.messages_from_anybody)

    def test_a_timeout_loses_nothing(self) -> None:
        self.run(2, ranks.late_message)

    def test_big_messages_may_cross(self) -> None:
        self.run(2, ranks.crossing_messages)

    def test_messages_and_collectives_do_not_mix(self) -> None:
        self.run(3, ranks.messages_between_collectives)

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

    def test_a_slow_rank_is_only_slow(self) -> None:
        self.run(3, ranks.wait_for_a_slow_rank)

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

    # memory and life

    def test_memory_of_a_transport(self) -> None:
        self.run(2, ranks.own_memory)

    def test_closing_twice(self) -> None:
        self.run(2, ranks.close_twice)


def check_disagreement(case: str, outcomes: list[Outcome]) -> None:
    for kind, text, seconds in outcomes:
        assert kind == "DisagreementError", f"{case}: {kind}: {text}"
        assert seconds < NOTICED_WITHIN, f"{case}: {seconds} s"
        assert "rank 0" in text, text
        assert "rank 1" in text, text
        # What each called, and from which line.
        assert re.search(r"\) at .+:\d+", text), text
