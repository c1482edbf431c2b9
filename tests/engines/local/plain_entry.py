"""An entry for the engine's tests: calls the function with its task, without any communication.

Imports little, so that ranks which only need this module start fast.
"""

from __future__ import annotations

import os
from typing import Any

from paceline.engines.local import Launch, rank_call, run
from paceline.engines.local.failure_report import ended_well
from paceline.engines.local.forked_rank import RankTask

ENTRY = "tests.engines.local.plain_entry:main"


def main(task: RankTask) -> int:
    """Call the function with the task and pack what it returns."""
    __tracebackhide__ = True
    work = rank_call.unpack(task.payload)
    task.shared = work.classes
    try:
        result = work.function(task, *work.args)
    except SystemExit as error:
        if not ended_well(error):
            raise
        result = None
    return rank_call.pack_result(result, work, task.rank, {})


def launch(function: Any, *args: Any, workers: int = 2, **settings: Any) -> list[Any]:
    """Run a group of ranks with this entry."""
    return run(Launch(entry=ENTRY, function=function, args=args, workers=workers, **settings))


def rank_of(task: RankTask) -> int:
    """The rank itself."""
    return task.rank


def pid_of(task: RankTask) -> tuple[int, int]:
    """The rank's process and its parent."""
    return os.getpid(), os.getppid()
