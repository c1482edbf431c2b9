"""Modifiers that communicate while they change the gradients: what they did to themselves is undone when the
group fails meanwhile, because the step is done again.

Their states are kept before each step for this, where they have communicated before, or where it is not known
yet: in the first step of a process. Copies of large states are not made for modifiers that do not.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import final

from paceline.comm.context import DistributedContext
from paceline.core.errors import GROUP_FAILURES, UsageError
from paceline.train.callbacks import Callbacks


@final
class RepeatableChanges:
    """The states of one rank's gradient changers across an update."""

    def __init__(self, callbacks: Callbacks) -> None:
        self._callbacks = callbacks
        self._communicate: bool | None = None  # None: not known yet

    @contextmanager
    def undone_when_the_group_fails(self, context: DistributedContext, step: int) -> Iterator[None]:
        """Restore the states where the block ends with a failure of the group; `step` is being computed."""
        if not self._callbacks.changes_gradients or context.world_size == 1:
            yield
            return
        kept, calls = None, context.calls
        if self._communicate is not False:
            kept = copy.deepcopy(self._callbacks.state_dict(of_gradient_changers=True))
        try:
            yield
        except GROUP_FAILURES as failure:
            if kept is None and self._callbacks.state_dict(of_gradient_changers=True):
                raise UsageError(
                    f"a rank was lost while a modifier communicated in change_gradients of step {step}, for "
                    "the first time in this run: its state before that step was not kept",
                    remedy='start again with resume="auto"; communicate in every step, from the first on',
                ) from failure
            self._callbacks.load_state_dict(kept or {})
            raise
        if context.calls > calls or self._communicate is None:
            self._communicate = context.calls > calls
