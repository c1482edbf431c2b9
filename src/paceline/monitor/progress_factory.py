"""Show a run on a terminal, by a function that travels to workers with their job: importing this module is
cheap."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.train.callbacks import Observer


@contextmanager
def progress_display() -> Iterator[Observer]:
    """Show a run on this process's terminal. Imports the terminal library, which draws a random number when
    imported, only in the process that shows it."""
    from paceline.monitor.progress import ProgressDisplay

    with closing(ProgressDisplay()) as display:
        yield display
