"""The canonical sum of compressed shards: few bytes travel, and the bits still do not depend on the workers.

Idea: compression and its error feedback belong to the shard. Each shard's gradients are encoded with what
that shard could not send in earlier steps; every rank gets every shard's bytes, decodes them and folds the
whole tree by itself.
What travels: the encoded bytes of the own shards to every peer. What it costs: decoding all shards on every
rank. What survives: the residuals, one per shard, are part of the run's state and follow the shard to whoever
computes it next. They are in the unit of the loss itself, so that a loss scale (fp16) may change between
steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor

from paceline.comm.compression.base import Compression, Transfer
from paceline.comm.shards import Holdings
from paceline.train.gradients import Flat, Layout
from paceline.train.shard_fold import ShardFold
from paceline.train.team import Team

_RESIDUAL = "residual."


@final
class CompressedSummation:
    keeps = False  # what is encoded belongs to residuals that may move with their shards

    def __init__(self, team: Team, layout: Layout, device: torch.device, compression: Compression) -> None:
        self._team = team
        self._layout = layout
        self._device = device
        self._compression = compression
        self._leaf = self._flat()
        self._fold = ShardFold(self._flat)
        self._encoded: dict[int, list[Tensor]] = {}
        self._transfers: list[Transfer] = []
        self.scale = 1.0  # what the gradients of this step are multiplied by

    def _flat(self) -> Flat:
        return Flat(
            self._layout, lambda n, dtype, where: torch.empty(n, dtype=dtype, device=where), self._device
        )

    def start(self) -> None:
        for transfer in self._transfers:
            transfer.abort()
        self._transfers, self._encoded = [], {}

    def rebind(self) -> None:
        """Nothing: what is held lies in this process's own memory."""

    def deposit(self, shard: int, gradients: Sequence[Tensor | None], tail: Tensor) -> None:
        # Decoding wrote between the gradients as well, where a NaN of an earlier step would spoil blocks.
        self._leaf.clear()
        self._leaf.store(gradients, tail)
        parts = []
        for dtype, memory in self._leaf.memory.items():
            flat = memory[: self._gradients_end(dtype, memory)]
            if self.scale != 1.0:
                flat.mul_(1.0 / self.scale)
            transfer = self._compression.open(flat, _name(dtype, shard))
            self._transfers.append(transfer)
            parts.append(transfer.encode(0, flat.numel()).cpu())
        parts.append(self._leaf.tail.detach().clone().cpu())
        self._encoded[shard] = parts

    def finish(self, ballot: Tensor, holdings: Holdings | None = None) -> Flat:
        told: list[Any] = self._team.context.all_gather(
            [sorted(self._encoded), [self._encoded[shard] for shard in sorted(self._encoded)], ballot.cpu()]
        )
        shards = {
            shard: parts for held, all_parts, _ in told for shard, parts in zip(held, all_parts, strict=True)
        }
        self._fold.start(self._team.shards)
        for shard in range(self._team.shards):
            *encoded, tail = shards[shard]
            for (dtype, memory), part in zip(self._leaf.memory.items(), encoded, strict=True):
                flat = memory[: self._gradients_end(dtype, memory)]
                self._decode(part.to(self._device), flat)
                if self.scale != 1.0:
                    flat.mul_(self.scale)
            self._fold.deposit(shard, list(self._leaf.views), tail.to(self._device))
        for transfer in self._transfers:
            transfer.close()
        self._transfers = []
        (result,) = self._fold.partials
        result.ballot.copy_(torch.stack([their_ballot for _, _, their_ballot in told]).sum(0))
        return result

    def residuals(self) -> dict[str, Tensor]:
        """What the shards of this rank still owe, by "<dtype>/<shard>"."""
        state = self._compression.state_dict()
        return {
            key.removeprefix(_RESIDUAL): value for key, value in state.items() if key.startswith(_RESIDUAL)
        }

    def load_residuals(self, residuals: Mapping[str, Tensor], block: Sequence[int]) -> None:
        """Takes those of the shards that this rank computes from now on."""
        state = {
            key: value
            for key, value in self._compression.state_dict().items()
            if not key.startswith(_RESIDUAL)
        }
        mine = {str(shard) for shard in block}
        state |= {
            _RESIDUAL + key: value for key, value in residuals.items() if key.rpartition("/")[2] in mine
        }
        self._compression.load_state_dict(state)

    def _gradients_end(self, dtype: torch.dtype, memory: Tensor) -> int:
        return self._layout.tail_start if dtype == torch.float32 else memory.numel()

    def _decode(self, encoded: Tensor, flat: Tensor) -> None:
        if flat.dtype == torch.float32:
            self._compression.codec.decode(encoded, flat)
            return
        single = torch.empty(flat.numel(), dtype=torch.float32, device=flat.device)
        self._compression.codec.decode(encoded, single)
        flat.copy_(single)


def _name(dtype: torch.dtype, shard: int) -> str:
    return f"{str(dtype).removeprefix('torch.')}/{shard}"
