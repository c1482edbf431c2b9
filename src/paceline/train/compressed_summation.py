"""The canonical sum of compressed shards: few bytes travel, and the bits still do not depend on the workers.

Idea: compression and its error feedback belong to the shard. Each shard's gradients are encoded with what
that shard could not send in earlier steps; every rank gets every shard's bytes, decodes them and folds the
whole tree by itself.
What travels: the encoded bytes of the own shards to every peer. What it costs: decoding all shards on every
rank. What survives: the residuals, one per shard, are part of the run's state and follow the shard to the
rank that computes it next. They are in the unit of the loss itself, so that a loss scale (fp16) may change
between steps.

Residuals are the one state of a run that a rank has alone, so they carry the number of committed steps that
they belong to. A step that others have decided had this rank's bytes in it; what it owes after that step
follows from its own gradients and its own bytes alone. So a rank that was late, and takes the others' state
over, moves its residuals one step on by itself (`settle`); and one that had not sent its bytes cannot be late
by a decided step. Residuals that went to another rank are kept until a step was decided in the new group:
then all of that group have what they were sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor

from paceline.comm.compression.base import Compression, Transfer
from paceline.comm.shards import Holdings
from paceline.core.errors import GroupInterruptedError, InternalError
from paceline.train.gradients import Flat, Layout
from paceline.train.shard_fold import ShardFold
from paceline.train.team import Team
from paceline.train.trail import contribution

Owed = tuple[tuple[int, tuple[int, ...]], ...]
"""(committed steps, shards) for each moment at which a rank knows what these shards owe."""


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
        self.watched, self.contributed = False, ""
        self._scale = 1.0  # what the gradients of this step are multiplied by
        self._step = 0  # committed steps that the residuals belong to
        # The shards of which it is known here what they owe at that step: at the beginning, nothing.
        self._known = frozenset(range(team.shards))
        self._sent: frozenset[int] = frozenset()  # shards whose bytes may be in a sum that others have

    def _flat(self) -> Flat:
        return Flat(
            self._layout, lambda n, dtype, where: torch.empty(n, dtype=dtype, device=where), self._device
        )

    def start(self) -> None:
        for transfer in self._transfers:
            transfer.abort()
        self._transfers, self._encoded, self._sent = [], {}, frozenset()

    def begin(self, step: int, scale: float) -> None:
        """The step after `step` committed ones begins, with gradients that are multiplied by `scale`."""
        self._scale = scale
        if self.keeps_residuals and (step != self._step or not self._known >= set(self._team.block)):
            raise InternalError(
                f"step {step + 1} begins, and what shards {list(self._team.block)} owe is known of "
                f"{sorted(self._known)} after step {self._step}: it was not computed",
                remedy="report this with the run's journal; the run can be resumed from its last checkpoint",
            )

    def rebind(self) -> None:
        """Nothing: what is held lies in this process's own memory."""

    def deposit(self, shard: int, gradients: Sequence[Tensor | None], tail: Tensor) -> None:
        # Decoding wrote between the gradients as well, where a NaN of an earlier step would spoil blocks.
        self._leaf.clear()
        self._leaf.store(gradients, tail)
        parts = []
        for dtype, memory in self._leaf.memory.items():
            flat = memory[: self._gradients_end(dtype, memory)]
            if self._scale != 1.0:
                flat.mul_(1.0 / self._scale)
            transfer = self._compression.open(flat, _name(dtype, shard))
            self._transfers.append(transfer)
            parts.append(transfer.encode(0, flat.numel()).cpu())
        parts.append(self._leaf.tail.detach().clone().cpu())
        self._encoded[shard] = parts

    def finish(self, ballot: Tensor, holdings: Holdings | None = None) -> Flat:
        if self.watched:
            given = (part for shard in sorted(self._encoded) for part in self._encoded[shard])
            self.contributed = contribution(given)
        # From here on the others may have all that they need to decide the step.
        self._sent = frozenset(self._encoded)
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
                if self._scale != 1.0:
                    flat.mul_(self._scale)
            self._fold.deposit(shard, list(self._leaf.views), tail.to(self._device))
        (result,) = self._fold.partials
        result.ballot.copy_(torch.stack([their_ballot for _, _, their_ballot in told]).sum(0))
        return result

    def decide(self) -> None:
        """The step is decided: what these shards could not send is what they owe now."""
        closed, self._transfers = self._transfers, []
        for transfer in closed:
            transfer.close()
        self._step, self._known, self._sent = self._step + 1, frozenset(self._encoded), frozenset()
        if len(self._compression.residuals) > len(closed):
            # Those of shards that others compute by now, which have used what they were sent.
            self._compression.keep(self._of(self._known))

    # what the shards owe

    @property
    def keeps_residuals(self) -> bool:
        return self._compression.error_feedback

    @property
    def owed(self) -> Owed:
        """What this rank knows: now, and after the open step where others may have decided it."""
        if not self.keeps_residuals:
            return ()
        now = (self._step, tuple(sorted(self._known)))
        return (now, (self._step + 1, tuple(sorted(self._sent)))) if self._sent else (now,)

    @property
    def covers_all(self) -> bool:
        return not self.keeps_residuals or self._known >= set(range(self._team.shards))

    def settle(self, step: int) -> None:
        """The rank's state is that after `step` steps: so are the residuals, as far as they are known."""
        if self._sent and step == self._step + 1:
            self.decide()
        self.start()
        if step != self._step:
            self._step, self._known = step, frozenset()

    def residuals(self) -> dict[str, Tensor]:
        """What the shards of this rank still owe, by "<dtype>/<shard>"."""
        return {name: tensor.clone() for name, tensor in self._of(self._team.block).items()}

    def load(self, residuals: Mapping[str, Tensor], step: int) -> None:
        """Those of a checkpoint, of the shards that this rank computes from now on."""
        self.start()
        self._step, self._known = step, frozenset(self._team.block if step else range(self._team.shards))
        self._compression.keep(_of_shards(residuals, self._known) if self.keeps_residuals else {})

    def share(self) -> None:
        """All ranks together: each gets what the shards of its block owe, from the first rank that knows it.

        What is sent away stays here too, until a step is decided in this group: the exchange may fail after
        some ranks have ended it.
        """
        context, blocks = self._team.context, self._team.blocks
        told: list[list[Any]] = context.all_gather([self._step, sorted(self._known)])
        sources: dict[int, int] = {}
        for rank, (step, known) in enumerate(told):
            if step == self._step:
                sources |= {shard: rank for shard in known if shard not in sources}
        missing = sorted(set(range(self._team.shards)) - sources.keys())
        if missing or len({step for step, _ in told}) > 1:
            raise GroupInterruptedError(
                f"what shards {missing} owe after step {self._step} is known to no member of the group"
            )
        chunks = []
        for rank, block in enumerate(blocks):
            asked = [shard for shard in block if shard not in told[rank][1]]
            mine = [shard for shard in asked if sources[shard] == context.rank]
            chunks.append({name: tensor.cpu() for name, tensor in self._of(mine).items()})
        arrived: list[dict[str, Tensor]] = context.all_to_all(chunks)
        have = self._of(self._known)
        for part in arrived:
            have |= {name: torch.as_tensor(tensor).to(self._device) for name, tensor in part.items()}
        self._known |= set(self._team.block)
        self._compression.keep(have)

    def _of(self, shards: Iterable[int]) -> dict[str, Tensor]:
        return _of_shards(self._compression.residuals, frozenset(shards))

    def _gradients_end(self, dtype: torch.dtype, memory: Tensor) -> int:
        return self._layout.tail_start if dtype == torch.float32 else memory.numel()

    def _decode(self, encoded: Tensor, flat: Tensor) -> None:
        if flat.dtype == torch.float32:
            self._compression.codec.decode(encoded, flat)
            return
        single = torch.empty(flat.numel(), dtype=torch.float32, device=flat.device)
        self._compression.codec.decode(encoded, single)
        flat.copy_(single)


def _of_shards(residuals: Mapping[str, Tensor], shards: frozenset[int]) -> dict[str, Tensor]:
    return {name: value for name, value in residuals.items() if int(name.rpartition("/")[2]) in shards}


def _name(dtype: torch.dtype, shard: int) -> str:
    return f"{str(dtype).removeprefix('torch.')}/{shard}"
