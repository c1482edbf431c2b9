"""A worker's log file, and what it leaves of the program's own logging."""

from __future__ import annotations

import io
import logging
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from paceline.core import log
from paceline.train.loop.worker_log import WorkerLog, file_name


@contextmanager
def bare() -> Iterator[None]:
    """A program that has set up no logging; pytest has, in every test anew."""
    root = logging.getLogger()
    before, root.handlers = root.handlers, []
    yield
    assert root.handlers == []
    root.handlers = before


def text(folder: Path, rank: int) -> str:
    return (folder / file_name(rank)).read_text()


@pytest.mark.parametrize("rank", [0, 1])
def test_lines_without_a_handler_reach_the_terminal_from_the_first_rank(tmp_path, capsys, rank):
    with bare():
        worker = WorkerLog(tmp_path, rank, 2)
        logging.getLogger("user_code").warning("look")
        logging.getLogger("paceline.somewhere").info("a detail")
        worker.close()
    assert capsys.readouterr().err == ("look\n" if rank == 0 else "")
    assert f"warning [rank {rank}] look\n" in text(tmp_path, rank)
    assert f"info [rank {rank}] a detail\n" in text(tmp_path, rank)
    assert logging.getLogger("paceline").level == logging.NOTSET
    assert log.position().rank is None


def test_a_logger_with_a_handler_of_its_own_is_not_heard_twice(tmp_path, capsys):
    stream = io.StringIO()
    own = logging.getLogger("with.its.own")
    handler = logging.StreamHandler(stream)
    own.addHandler(handler)
    with bare():
        worker = WorkerLog(tmp_path, 0, 1)
        own.getChild("below").error("once")
        worker.close()
    own.removeHandler(handler)
    assert (stream.getvalue(), capsys.readouterr().err) == ("once\n", "")
    assert text(tmp_path, 0).count("once") == 1


def test_paceline_s_own_lines_when_its_logging_is_set_up(tmp_path):
    stream = io.StringIO()
    log.setup(logging.WARNING, stream=stream)
    try:
        worker = WorkerLog(tmp_path, 0, 1)
        logging.getLogger("paceline.somewhere").warning("heard")
        logging.getLogger("paceline.somewhere").info("not asked for")
        worker.close()
    finally:
        log.teardown()
        logging.getLogger("paceline").propagate = True
    assert stream.getvalue().count("heard") == 1
    assert text(tmp_path, 0).count("heard") == 1
    assert "not asked for" not in text(tmp_path, 0)


def test_ranks_that_are_threads_keep_apart(tmp_path):
    logs: list[WorkerLog] = []
    shown = warnings.showwarning

    def rank_main(rank: int) -> None:
        with log.at(rank=rank):
            logs.append(WorkerLog(tmp_path, rank, 3))
            logging.getLogger("user_code").warning("of rank %d", rank)

    for rank in range(3):
        thread = threading.Thread(target=rank_main, args=(rank,))
        thread.start()
        thread.join()
    for worker in logs:  # the first opened is closed first
        worker.close()
    for rank in range(3):
        assert [f"of rank {other}" in text(tmp_path, rank) for other in range(3)] == [
            other == rank for other in range(3)
        ]
    warnings.showwarning = shown


def test_runs_of_one_process_that_end_in_any_order_leave_it_no_rank(tmp_path):
    first = WorkerLog(tmp_path, 0, 2)
    log.label_records(0)
    log.label_records(1)  # a run that began within the first one, and ends after it
    log.unlabel_records()
    first.close()
    assert log.position().rank == 0
    log.unlabel_records()
    assert log.position() == log.LogPosition()


def test_a_folder_that_cannot_be_written_is_said(tmp_path, caplog):
    (tmp_path / "logs").write_text("a file in its place")
    worker = WorkerLog(tmp_path / "logs", 0, 1)
    worker.say(logging.ERROR, "to no file")
    worker.close()
    assert "rank 0 keeps no log" in caplog.text
