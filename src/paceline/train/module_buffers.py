"""What the model's buffers become in a step, whoever computed which shard.

The rule: every shard starts from the buffers of the step before; afterwards a floating-point buffer has moved
by the average of its movements in the shards, weighted by their samples, and any other buffer (counters) has
moved as in the first shard that has samples. A buffer that no shard touches keeps its bits. For BatchNorm
that is the running average of the shards' batch statistics. Must not know shards or ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class ModuleBuffers:
    """The buffers of one module, read and moved as one vector."""

    def __init__(self, module: nn.Module) -> None:
        self._owners: list[tuple[nn.Module, str]] = []
        seen: set[int] = set()
        for child in module.modules():
            for key, buffer in child._buffers.items():
                if buffer is not None and id(buffer) not in seen and not buffer.is_complex():
                    seen.add(id(buffer))
                    self._owners.append((child, key))
        self._owners.sort(key=lambda owner: not self._of(owner).is_floating_point())
        self.floats = sum(self._of(o).numel() for o in self._owners if self._of(o).is_floating_point())
        self.size = sum(self._of(owner).numel() for owner in self._owners)
        self._before: list[Tensor] = []

    def remember(self) -> None:
        """The buffers as they are now are those that every shard starts from."""
        self._before = [self._of(owner).clone() for owner in self._owners]

    @torch.no_grad()
    def restore(self) -> None:
        for owner, before in zip(self._owners, self._before, strict=True):
            self._of(owner).copy_(before)

    @torch.no_grad()
    def movement(self, weight: float, *, counters: bool, out: Tensor) -> None:
        """How the buffers moved since `remember`, times `weight`; counters as they are, or not at all."""
        start = 0
        for owner, before in zip(self._owners, self._before, strict=True):
            now = self._of(owner)
            part = out[start : start + now.numel()]
            start += now.numel()
            if now.is_floating_point():
                # An infinity that stays is no movement, though their difference is no number.
                moved = (now - before).masked_fill_(now == before, 0.0)
                part.copy_(moved.flatten()).mul_(weight)
            elif counters:
                part.copy_((now.long() - before.long()).flatten())
            else:
                part.zero_()

    @torch.no_grad()
    def move(self, movement: Tensor) -> None:
        """The buffers of before, moved; what did not move keeps its bits."""
        start = 0
        for owner, before in zip(self._owners, self._before, strict=True):
            now = self._of(owner)
            part = movement[start : start + now.numel()].view(now.shape)
            start += now.numel()
            if now.is_floating_point():
                now.copy_(torch.where(part == 0, before, before + part.to(now.dtype)))
            else:
                now.copy_(before.long() + part.round().long())

    @staticmethod
    def _of(owner: tuple[nn.Module, str]) -> Tensor:
        buffer = owner[0]._buffers[owner[1]]
        assert buffer is not None
        return buffer
