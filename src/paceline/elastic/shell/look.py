"""A look at where a worker of this machine is: its Python stack, and what the kernel says of it.

The worker writes its stack when it gets a signal, also while it holds the interpreter's lock. That takes a
moment, so a look is begun, looked after by a loop, and over when the stack is complete or cannot be had. Must
not know what it is for.
"""

from __future__ import annotations

import signal
from typing import Final, final

from paceline.elastic.shell.seats import kernel_state
from paceline.engines.local.worker import Worker

STACK_SECONDS: Final = 0.4
LOOK_SECONDS: Final = 0.02  # between two looks at whether it is over


@final
class Look:
    """`state` is as it was when the look began: one that was stopped may be let run for it."""

    def __init__(self, worker: Worker, now: float) -> None:
        self._worker = worker
        self._limit = now if worker.has_ended else now + STACK_SECONDS
        self._size = 0
        self.state = kernel_state(worker.pid)
        if not worker.has_ended:
            worker.ask_where()

    def wake(self) -> None:
        """It is to end anyway: let it run for the moment that it needs to say where it was."""
        if self.state:
            self._worker.signal(signal.SIGCONT)

    def is_over(self, now: float) -> bool:
        """Whether the stack is complete, or time is up; to be asked every LOOK_SECONDS."""
        before, self._size = self._size, self._worker.stack_size()
        return (self._size > 0 and self._size == before) or now >= self._limit

    def frames(self) -> list[str]:
        """Innermost first."""
        return self._worker.frames() if self._worker.stack_size() else []
