"""Update the model's buffers in a step, the same way whichever rank computed which shard.

The rule: every shard starts from the buffers of the step before; afterwards a floating-point buffer has moved
by the average of its movements in the shards, weighted by their samples, and any other buffer (counters) has
moved as in the first shard that has samples. A buffer that no shard touches keeps its bits. For BatchNorm
that is the running average of the shards' batch statistics.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NoReturn, final

import torch
from torch import Tensor, nn

from paceline.core.errors import UsageError
from paceline.core.wording import counted

_PIECES = 4
_BITS = 16


@final
class ModuleBuffers:
    """The buffers of one module, read and moved as one vector."""

    def __init__(self, module: nn.Module) -> None:
        groups: dict[torch.dtype, dict[str, tuple[nn.Module, str]]] = {}
        seen: set[int] = set()
        for path, child in module.named_modules():
            for key, buffer in child._buffers.items():
                if buffer is not None and buffer.numel() and id(buffer) not in seen:
                    seen.add(id(buffer))
                    name = f"{path}.{key}" if path else key
                    groups.setdefault(buffer.dtype, {})[name] = (child, key)
        self._groups = [_OneDtype(owners) for owners in groups.values()]
        self.size = sum(group.size for group in self._groups)

    def remember(self) -> None:
        """Remember the present buffers as those that every shard starts from."""
        for group in self._groups:
            group.before = group.flat()

    @torch.no_grad()
    def restore(self) -> None:
        for group in self._groups:
            group.put(group.before)

    @torch.no_grad()
    def movement(self, weight: float, *, counters: bool, out: Tensor) -> None:
        """Write to `out` how the buffers moved since `remember`, times `weight`; counters as they are, or
        not at all."""
        for group, part in self._parts(out):
            if group.is_float:
                now, before = group.flat(), group.before
                still = (now == before) | (now.isnan() & before.isnan())
                part.copy_(torch.sub(now, _start(before))).mul_(weight).masked_fill_(still, -0.0)
            elif counters:
                moved = group.flat().long() - group.before.long()
                for number, piece in enumerate(part.chunk(_PIECES)):
                    piece.copy_((moved >> (number * _BITS)) & ((1 << _BITS) - 1))
            else:
                part.zero_()

    @torch.no_grad()
    def move(self, movement: Tensor, share: float = 1.0) -> None:
        """Move the remembered buffers; what did not move keeps its bits. `share` is the sum of the weights of
        all movements."""
        for group, part in self._parts(movement):
            before = group.before
            if group.is_float:
                # The sum of negative zeros alone is a negative zero. What is finite is not moved by any zero.
                still = (part == 0) & (part.signbit() | before.isfinite())
                moved = _start(before) + (part if share == 1.0 else part / share)
                group.put(torch.where(still, before, moved.to(before.dtype)))
                continue
            moved = before.long()
            for number, piece in enumerate(part.chunk(_PIECES)):
                moved = moved + (piece.round().long() << (number * _BITS))
            group.put(moved.to(before.dtype))

    def _parts(self, vector: Tensor) -> Iterator[tuple[_OneDtype, Tensor]]:
        parts = torch.split(vector, [group.size for group in self._groups])
        return zip(self._groups, parts, strict=True)


@final
class _OneDtype:
    """All buffers of a dtype, one behind the other: a few long vectors are faster than many short ones.

    Looked up by owner and name each time, since a module may put another tensor in a buffer's place.
    """

    def __init__(self, owners: dict[str, tuple[nn.Module, str]]) -> None:
        self._names = list(owners)
        self._owners = list(owners.values())
        self._sizes = [buffer.numel() for buffer in self._buffers()]
        self.before = torch.cat([_real(buffer).reshape(-1) for buffer in self._buffers()])
        self._numel = self.before.numel()
        self.is_float = self.before.is_floating_point()
        self.size = self.before.numel() * (1 if self.is_float else _PIECES)

    def flat(self) -> Tensor:
        """Return the buffers in new memory; complex ones as pairs of reals."""
        found = torch.cat([_real(buffer).reshape(-1) for buffer in self._buffers()])
        if found.numel() != self._numel:
            self._refuse_growing()
        return found

    def put(self, flat: Tensor) -> None:
        buffers = [_real(buffer) for buffer in self._buffers()]
        sizes = [buffer.numel() for buffer in buffers]
        if sum(sizes) != self._numel:
            self._refuse_growing()
        parts = zip(torch.split(flat, sizes), buffers, strict=True)
        torch._foreach_copy_(buffers, [part.view(buffer.shape) for part, buffer in parts])

    def _buffers(self) -> list[Tensor]:
        found = [owner._buffers[key] for owner, key in self._owners]
        return [buffer.detach() for buffer in found if buffer is not None]

    def _refuse_growing(self) -> NoReturn:
        now = [owner._buffers[key] for owner, key in self._owners]
        changed = [
            f"{name} (had {counted(size, 'element')}, has {0 if buffer is None else buffer.numel()})"
            for name, buffer, size in zip(self._names, now, self._sizes, strict=True)
            if buffer is None or buffer.numel() != size
        ]
        raise UsageError(
            f"the buffer {', '.join(changed)} changed its size in training, and buffers of all shards are "
            "averaged",
            remedy="give it its largest size from the start, or keep it as a plain attribute of the module, "
            "which is not averaged and not saved",
        )


def _real(buffer: Tensor) -> Tensor:
    return torch.view_as_real(buffer) if buffer.is_complex() else buffer


def _start(before: Tensor) -> Tensor:
    """Return what a movement is counted from: nothing moves away from an infinity by adding to it."""
    return before.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
