"""Whether this rank's weights are still what its last update left there.

Ranks that hold the same compare themselves with each other (agreement.py). A rank that is the only one left
compares itself with what it had seen of itself: a hash of its weights when the update was through. Whatever
changed them since without going through torch, which counts its writes to a tensor, is no part of the run.
A callback that writes past torch (`parameter.data`) looks the same: seen in a step in which all ranks agreed,
it ends these conclusions. Until some such steps have gone by without one, nothing is said at all.

Of the parameters that the next sample is of: all, where the model is not looked at in parts. Must not know
what follows.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, final

from torch import Tensor

from paceline.train.agreement import Look, WeightSample

QUIET_STEPS: Final = 4
"""Steps without a write past torch, in groups that agreed, before a change counts as one of memory."""


@dataclass(frozen=True)
class _Left:
    step: int
    look: Look
    writes: int


@final
class OwnMemory:
    def __init__(self, sample: WeightSample, parameters: Iterable[Tensor]) -> None:
        self._sample, self._parameters = sample, list(parameters)
        self._left: _Left | None = None
        self._quiet = 0
        self._written_past = False

    def leave(self, step: int, *, alone: bool) -> Look | None:
        """The update that makes `step` committed steps is through; None: nothing is looked at."""
        self._left = None
        if alone and not self._is_trusted:
            return None
        self._left = _Left(step, self._sample.look(step), self._writes())
        return self._left.look

    def left(self, step: int) -> int | None:
        """The hash of what the update of `step` has left, where it is known without waiting for a device."""
        left = self._left
        return left.look.value if left is not None and left.step == step and self._sample.at_hand else None

    def forget(self) -> None:
        """The weights were replaced on purpose."""
        self._left = None

    def agreed(self, step: int, sample: int) -> None:
        """All ranks of a group hold this sample: what has changed it since the update did so on all."""
        if self._differs(step, sample):
            self._written_past = True
        elif self._left is not None:
            self._quiet += 1

    def has_changed(self, step: int, sample: int | None = None) -> bool:
        """Whether the weights are others than the update of `step` has left."""
        if not self._is_trusted or self._left is None or self._left.step != step:
            return False
        return self._differs(step, self._sample.of(step) if sample is None else sample)

    @property
    def _is_trusted(self) -> bool:
        return self._quiet >= QUIET_STEPS and not self._written_past

    def _differs(self, step: int, sample: int) -> bool:
        left = self._left
        if left is None or left.step != step or left.look.value == sample:
            return False
        return left.writes == self._writes()

    def _writes(self) -> int:
        """How often torch has written to the parameters; what it does not count is what is looked for."""
        return sum(one._version for one in self._parameters)
