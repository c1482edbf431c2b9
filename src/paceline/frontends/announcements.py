"""Lines by which a front door tells its user, once, how it understood the settings.

They go to the log at INFO. Where the program shows no such lines they go to stderr: arithmetic that only a
configured logger would show reaches no newcomer. In a job the first rank speaks for all.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_log = logging.getLogger(__name__)
_said: set[str] = set()
_speaker: list[bool] = []  # whether this process speaks, where the caller knows better than the environment


def announce(line: str) -> None:
    """Tell the user one line; the same line only once in this process."""
    if line in _said or not _is_first_rank():
        return
    _said.add(line)
    if _log.isEnabledFor(logging.INFO) and _log.hasHandlers():
        _log.info("%s", line)
    elif sys.stderr is not None:
        print(f"paceline: {line}", file=sys.stderr)


def forget() -> None:
    """Forget what was said: every line may come again."""
    _said.clear()


@contextmanager
def speaking_as(*, is_first: bool) -> Iterator[None]:
    """Tell lines inside only where `is_first`: for jobs of launchers that are not known here."""
    _speaker.append(is_first)
    try:
        yield
    finally:
        _speaker.pop()


def _is_first_rank() -> bool:
    if _speaker:
        return _speaker[-1]
    from paceline.comm import default_group
    from paceline.comm.rendezvous.environment import find_launch_info

    context = default_group.current()
    return find_launch_info(os.environ).rank == 0 if context is None else context.is_master
