"""Rank and step in the records of every logger."""

from __future__ import annotations

import copy
import io
import logging
import pickle

import pytest
import torch

import paceline
from paceline.core import log


@pytest.fixture
def lines():
    """What a logger of the user's own writes, with a format of their own."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter("%(rank)d %(step)d %(message)s"))
    logger = logging.getLogger("users.own")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield stream
    logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)


def say(text: str, **more: object) -> None:
    logging.getLogger("users.own").info(text, extra=more or None)


def test_after_init_process_group_and_no_longer_after_destroy(lines):
    before = logging.getLogRecordFactory()
    paceline.init_process_group(rank=0, world_size=1)
    say("inside")
    with log.at(step=41):
        say("in a step")
    paceline.destroy_process_group()
    assert lines.getvalue() == "0 0 inside\n0 41 in a step\n"
    assert logging.getLogRecordFactory() is before
    assert not hasattr(logging.makeLogRecord({}), "rank")
    assert log.position() == log.LogPosition()
    paceline.destroy_process_group()  # a second one changes nothing
    assert logging.getLogRecordFactory() is before


def test_the_step_of_a_loop_is_that_of_its_wrapped_model(lines):
    paceline.init_process_group(rank=0, world_size=1)
    try:
        model = paceline.DistributedDataParallel(torch.nn.Linear(2, 1))
        for _ in range(2):
            with model.no_sync():
                model(torch.ones(1, 2)).sum().backward()
            model(torch.ones(1, 2)).sum().backward()
            say("trained")
        with torch.no_grad():
            model(torch.ones(1, 2))
        say("evaluated")
    finally:
        paceline.destroy_process_group()
    assert lines.getvalue() == "0 1 trained\n0 2 trained\n0 2 evaluated\n"


def test_fields_of_the_caller_win(lines):
    with log.labelled(3, lambda: 7):
        say("own", rank=9)
        say("ours")
        with pytest.raises(KeyError, match="overwrite 'name'"):
            say("refused as ever", name="x")
    assert lines.getvalue() == "9 7 own\n3 7 ours\n"


@pytest.mark.parametrize("style", ["%(rank)d/%(step)d", "{rank}/{step}", "$rank/$step"])
def test_every_style_of_format(style):
    kind = {"%": "%", "{": "{", "$": "$"}[style[0]]
    with log.labelled(3, lambda: 7):
        record = logging.getLogger("x").makeRecord("x", logging.INFO, "f", 1, "text", (), None)
        made = logging.Formatter(style, style=kind).format(record)  # type: ignore[arg-type]
        assert made == "3/7"
        # As a QueueHandler passes it to another process.
        sent = pickle.loads(pickle.dumps(copy.copy(record)))
        assert (sent.rank, sent.step) == (3, 7)


def test_a_factory_of_the_user_is_called_and_comes_back():
    class Own(logging.LogRecord):
        pass

    plain = logging.getLogRecordFactory()
    logging.setLogRecordFactory(Own)
    try:
        with log.labelled(1, lambda: 2):
            record = logging.getLogger("x").makeRecord("x", logging.INFO, "f", 1, "text", (), None)
            assert isinstance(record, Own)
            assert vars(record)["rank"] == 1
        assert logging.getLogRecordFactory() is Own
    finally:
        logging.setLogRecordFactory(plain)


def test_a_factory_that_was_put_over_ours_stays():
    plain = logging.getLogRecordFactory()
    made = []
    try:
        log.label_records(1)
        ours = logging.getLogRecordFactory()

        def over(*args: object, **kwargs: object) -> logging.LogRecord:
            made.append(ours(*args, **kwargs))
            return made[-1]

        logging.setLogRecordFactory(over)
        log.unlabel_records()
        assert logging.getLogRecordFactory() is over
        logging.getLogger("x").makeRecord("x", logging.INFO, "f", 1, "text", (), None)
        assert not hasattr(made[-1], "rank")
        with log.labelled(4, lambda: 5):
            logging.getLogger("x").makeRecord("x", logging.INFO, "f", 1, "text", (), None)
        assert vars(made[-1])["rank"] == 4
    finally:
        logging.setLogRecordFactory(ours)
        log.label_records(1)
        log.unlabel_records()
    assert logging.getLogRecordFactory() is plain
