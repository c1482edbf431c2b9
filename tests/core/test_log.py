"""Log lines carry rank and step; equal lines of several ranks become one, in order and in time."""

from __future__ import annotations

import io
import logging
import re
import threading

import pytest
from hypothesis import given, strategies as st

from paceline.core import log
from paceline.core.clock import VirtualClock
from paceline.core.fold import Folder, format_ranks

LOGGER = logging.getLogger("paceline.test")


@pytest.fixture
def stream():
    stream = io.StringIO()
    yield stream
    log.teardown()


def said(stream):
    """The lines without their time, which has its own test."""
    return [line.split(" ", 1)[1] for line in stream.getvalue().splitlines()]


def test_a_line_has_time_level_position_and_message(stream):
    log.setup(stream=stream, rank=2)
    with log.at(step=41):
        LOGGER.warning("slow by %d ms", 5)
    assert re.fullmatch(r"\d\d:\d\d:\d\d\.\d{3} warning \[rank 2 step 41\] slow by 5 ms\n", stream.getvalue())


def test_what_is_not_known_is_left_out(stream):
    log.setup(stream=stream)
    LOGGER.info("a")
    with log.at(step=1):
        LOGGER.info("b")
        with log.at(rank=3):
            LOGGER.info("c")
    LOGGER.info("d", extra={"rank": 7, "step": 8})
    assert said(stream) == ["info a", "info [step 1] b", "info [rank 3 step 1] c", "info [rank 7 step 8] d"]


def test_ranks_that_are_threads_keep_their_own_position(stream):
    log.setup(stream=stream, rank=9)
    meet = threading.Barrier(2)

    def rank(number):
        with log.at(rank=number):
            log.set_step(number * 10)
            meet.wait(10)
            LOGGER.info("here")

    threads = [threading.Thread(target=rank, args=(number,)) for number in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    LOGGER.info("main")
    assert sorted(said(stream)) == [
        "info [rank 1 step 10] here",
        "info [rank 2 step 20] here",
        "info [rank 9] main",
    ]


def test_setup_replaces_itself_and_teardown_leaves_nothing(stream):
    logger = logging.getLogger("paceline")
    log.setup(stream=stream)
    log.setup(level="WARNING", stream=stream)
    LOGGER.info("too quiet")
    LOGGER.warning("once")
    assert said(stream) == ["warning once"]
    log.teardown()
    assert (logger.handlers, logger.propagate, logger.level) == ([], True, logging.NOTSET)


def test_exceptions_are_shown_with_their_traceback(stream):
    log.setup(stream=stream)
    try:
        raise KeyError("x")
    except KeyError:
        LOGGER.exception("failed")
    assert "error failed\nTraceback" in stream.getvalue()
    assert "KeyError: 'x'" in stream.getvalue()


@pytest.mark.parametrize(
    ("ranks", "text"),
    [([3], "rank 3"), ([0, 1, 2, 3], "ranks 0-3"), ([5, 0, 2, 1], "ranks 0-2,5"), ([1, 3], "ranks 1,3")],
)
def test_ranks_are_written_as_spans(ranks, text):
    assert format_ranks(ranks) == text


def test_equal_lines_within_the_window_become_one():
    folder: Folder[str] = Folder(window=1.0)
    for rank in range(4):
        assert folder.feed(rank, "ready", 0.1 * rank) == []
    assert folder.deadline == 1.0
    assert folder.poll(0.99) == []
    assert [str(line) for line in folder.poll(1.0)] == ["[ranks 0-3] ready"]
    assert folder.deadline is None


def test_a_line_that_every_rank_has_said_does_not_wait():
    folder: Folder[str] = Folder(window=1.0, world_size=2)
    folder.feed(0, "ready", 0.0)
    assert [str(line) for line in folder.feed(1, "ready", 0.0)] == ["[ranks 0-1] ready"]


def test_a_late_line_stands_alone():
    folder: Folder[str] = Folder(window=1.0)
    folder.feed(0, "ready", 0.0)
    assert [str(line) for line in folder.feed(1, "ready", 2.0)] == ["[rank 0] ready"]
    assert [str(line) for line in folder.flush()] == ["[rank 1] ready"]


def test_a_rank_that_repeats_itself_is_heard_as_often():
    folder: Folder[str] = Folder(window=1.0)
    for rank in (0, 1):
        folder.feed(rank, "again", 0.0)
        folder.feed(rank, "again", 0.0)
    assert [str(line) for line in folder.flush()] == ["[ranks 0-1] again", "[ranks 0-1] again"]


def test_nothing_is_held_back_beyond_the_limit():
    folder: Folder[str] = Folder(window=1.0, max_pending=2)
    out = [line for number in range(5) for line in folder.feed(0, str(number), 0.0)]
    assert [line.line for line in out] == ["0", "1", "2"]
    assert folder.pending == 2


@given(
    st.lists(st.tuples(st.integers(0, 3), st.sampled_from("abc"), st.floats(0, 0.6)), max_size=60),
    st.none() | st.just(4),
)
def test_every_rank_is_heard_completely_and_in_its_order(feed, world_size):
    folder: Folder[str] = Folder(window=0.5, world_size=world_size)
    now = 0.0
    out = []
    for rank, line, pause in feed:
        now += pause
        out += folder.feed(rank, line, now)
        assert folder.deadline is None or folder.deadline > now
    out += folder.flush()
    for rank in range(4):
        heard = [folded.line for folded in out if rank in folded.ranks]
        assert heard == [line for who, line, _ in feed if who == rank]


def test_the_handler_folds_what_ranks_log(stream):
    clock = VirtualClock()
    log.setup(handler=log.FoldingHandler(stream, window=5.0, world_size=3, clock=clock))
    for rank in range(3):
        LOGGER.info("ready", extra={"rank": rank, "step": 4})
    assert said(stream) == ["info [ranks 0-2 step 4] ready"]
    LOGGER.info("alone", extra={"rank": 1})
    LOGGER.info("from the supervisor")
    LOGGER.warning("last", extra={"rank": 2})
    log.teardown()
    assert said(stream)[1:] == ["info [rank 1] alone", "info from the supervisor", "warning [rank 2] last"]


def test_the_handler_does_not_keep_a_last_line_to_itself():
    written = threading.Event()

    class Stream(io.StringIO):
        def flush(self):
            written.set()

    stream = Stream()
    log.setup(handler=log.FoldingHandler(stream, window=0.01))
    LOGGER.info("the end", extra={"rank": 0})
    assert written.wait(10)
    assert said(stream) == ["info [rank 0] the end"]
    log.teardown()
