"""Compare two checkpoints: tensors, bit for bit, and the state."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.checkpoint.loader import Checkpoint


@dataclass(frozen=True)
class TensorChange:
    """A tensor that is not the same bits in both; `largest` is None when shapes or dtypes differ."""

    name: str
    before: str
    after: str
    elements: int | None
    largest: float | None


@dataclass(frozen=True)
class StateChange:
    """A value of the state; None stands for one that is absent there (and for None itself)."""

    place: str
    before: Any
    after: Any


@dataclass(frozen=True)
class CheckpointDiff:
    """Difference from checkpoint `before` to checkpoint `after`."""

    before: int
    after: int
    added: tuple[str, ...]
    removed: tuple[str, ...]
    changed: tuple[TensorChange, ...]
    same: int
    state: tuple[StateChange, ...]

    @property
    def empty(self) -> bool:
        return not (self.added or self.removed or self.changed or self.state)


def compare(before: Checkpoint, after: Checkpoint) -> CheckpointDiff:
    """Return every difference. Equal means equal bits: NaN equals itself, and 0.0 is not -0.0."""
    old, new = before.tensors(), after.tensors()
    both = sorted(old.keys() & new.keys())
    changed = [change for name in both if (change := _change(name, old[name], new[name]))]
    return CheckpointDiff(
        before.version,
        after.version,
        added=tuple(sorted(new.keys() - old.keys())),
        removed=tuple(sorted(old.keys() - new.keys())),
        changed=tuple(changed),
        same=len(both) - len(changed),
        state=tuple(_state_changes("state", before.state, after.state)),
    )


def describe(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _change(name: str, old: Tensor, new: Tensor) -> TensorChange | None:
    if old.dtype != new.dtype or old.shape != new.shape:
        return TensorChange(name, describe(old), describe(new), None, None)
    if old.numel() == 0:
        return None
    # Compared as bytes: a number may be unequal to itself, or equal to one of another sign.
    pieces = (tensor.reshape(-1).view(torch.uint8).view(old.numel(), -1) for tensor in (old, new))
    different = torch.ne(*pieces).any(dim=1)
    count = int(different.sum())
    if count == 0:
        return None
    wide = torch.complex128 if old.is_complex() else torch.float64
    gap = (new.reshape(-1)[different].to(wide) - old.reshape(-1)[different].to(wide)).abs()
    return TensorChange(name, describe(old), describe(new), count, float(gap.max()))


def _state_changes(place: str, old: Any, new: Any) -> Iterator[StateChange]:
    if type(old) is dict and type(new) is dict:
        for key in [*old, *(key for key in new if key not in old)]:
            yield from _state_changes(f"{place}[{key!r}]", old.get(key), new.get(key))
    elif type(old) is type(new) and type(old) in (list, tuple) and len(old) == len(new):
        for index, (left, right) in enumerate(zip(old, new, strict=True)):
            yield from _state_changes(f"{place}[{index}]", left, right)
    elif type(old) is not type(new) or repr(old) != repr(new):
        yield StateChange(place, old, new)
