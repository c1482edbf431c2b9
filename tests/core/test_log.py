"""Log lines carry rank and step."""

from __future__ import annotations

import io
import logging
import re
import threading

import pytest

from paceline.core import log

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
        with log.at(rank=number, step=number * 10):
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
