"""The canonical sum of compressed shards: few bytes travel, and the bits still do not depend on the workers.

Idea: compression and its error feedback belong to the shard. Each shard's gradients are encoded with what
that shard could not send in earlier steps; every rank gets every shard's bytes, decodes them and sums the
whole tree by itself.
What travels: the encoded bytes of the own shards to every peer. What it costs: decoding all shards on every
rank. What survives: the residuals, one per shard, are part of the run's state and follow the shard to the
rank that computes it next. They are in the unit of the loss itself, so that a loss scale (fp16) may change
between steps.

Residuals are the one state of a run that a rank has alone, so they carry the number of committed steps that
they belong to. A step that others have decided had this rank's bytes in it; its residual after that step
follows from its own gradients and its own bytes alone. So a rank that was late, and gets the others' state,
moves its residuals one step on by itself (`settle`); and one that had not sent its bytes cannot be late
by a decided step. Residuals that went to another rank are kept until a step was decided in the new group:
then all of that group have what they were sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor

from paceline.comm.collectives.shard_sums import ShardOwnership
from paceline.comm.compression import cast_gradients, quantize_gradients, sparsify_gradients
from paceline.comm.compression.error_feedback import Compression, EncodedTransfer
from paceline.core.errors import GroupInterruptedError, InternalError
from paceline.train.settings.train_config import GradientCompression, TrainConfig
from paceline.train.step.aggregation_registry import Aggregation
from paceline.train.step.gradient_memory import FlatGradients, GradientLayout
from paceline.train.step.gradient_reducer import (
    CanonicalReducer,
    GradientChecks,
    GradientReducer,
    PlainReducer,
    PrivateShards,
    Residuals,
)
from paceline.train.step.partial_sums import PartialSums
from paceline.train.step.step_hashes import contribution
from paceline.train.team import Team


@final
class CompressedReducer(GradientReducer, Residuals):
    # Does not survive a failure: what is encoded belongs to residuals that may move with their shards.
    idle_ranks_take_part = True

    def __init__(
        self, team: Team, layout: GradientLayout, device: torch.device, compression: Compression
    ) -> None:
        super().__init__(team, layout, device)
        self._compression = compression
        self._leaf = self._flat()
        self._sums = PartialSums(self._flat)
        self._encoded: dict[int, list[Tensor]] = {}
        self._transfers: list[EncodedTransfer] = []
        self._scale = 1.0  # what the gradients of this step are multiplied by
        self._step = 0  # committed steps that the residuals belong to
        # The shards whose residuals at that step are known here: at the beginning they are zero.
        self._known = frozenset(range(team.shards))
        self._sent: frozenset[int] = frozenset()  # shards whose bytes may be in a sum that others have

    def _flat(self) -> FlatGradients:
        return FlatGradients(
            self._layout, lambda n, dtype, where: torch.empty(n, dtype=dtype, device=where), self._device
        )

    def start(self) -> None:
        for transfer in self._transfers:
            transfer.abort()
        self._transfers, self._encoded, self._sent = [], {}, frozenset()

    def begin(self, step: int, scale: float) -> None:
        """Begin the step after `step` committed ones, with gradients that are multiplied by `scale`."""
        self._scale = scale
        if self.kept and (step != self._step or not self._known >= set(self._team.block)):
            raise InternalError(
                f"step {step + 1} needs the residuals of shards {list(self._team.block)}, and this rank has "
                f"those of shards {sorted(self._known)} after step {self._step}: the step was not computed",
                remedy="report this with the run's journal; the run can be resumed from its last checkpoint",
            )

    @property
    def residuals(self) -> Residuals:
        return self

    def rebind(self, *, keep: bool) -> None:
        """Do nothing: what is held lies in this process's own memory, and whether another rank has decided
        the step with the bytes that were sent shows only later (`settle`)."""

    def add_shard(self, shard: int, gradients: Sequence[Tensor | None], scalars: Tensor) -> None:
        # Decoding wrote between the gradients as well, where a NaN of an earlier step would spoil blocks.
        self._leaf.clear()
        self._leaf.store(gradients, scalars)
        parts = []
        for dtype, flat in self._leaf.gradients.items():
            if self._scale != 1.0:
                flat.mul_(1.0 / self._scale)
            transfer = self._compression.open(flat, f"{str(dtype).removeprefix('torch.')}/{shard}")
            self._transfers.append(transfer)
            parts.append(transfer.encode(0, flat.numel()).cpu())
        parts.append(self._leaf.scalars.detach().clone().cpu())
        self._encoded[shard] = parts

    def reduce(self, counters: Tensor, ownership: ShardOwnership | None = None) -> FlatGradients:
        if self.watched:
            encoded = (part for shard in sorted(self._encoded) for part in self._encoded[shard])
            self.contribution_hash = contribution(encoded)
        # From here on the others may have all that they need to decide the step.
        self._sent = frozenset(self._encoded)
        gathered: list[Any] = self._team.context.all_gather(
            [sorted(self._encoded), [self._encoded[shard] for shard in sorted(self._encoded)], counters.cpu()]
        )
        shards = {
            shard: parts
            for held, all_parts, _ in gathered
            for shard, parts in zip(held, all_parts, strict=True)
        }
        self._sums.start(self._team.shards)
        for shard in range(self._team.shards):
            *encoded, scalars = shards[shard]
            for flat, part in zip(self._leaf.gradients.values(), encoded, strict=True):
                single = flat if flat.dtype == torch.float32 else torch.empty_like(flat, dtype=torch.float32)
                self._compression.codec.decode(part.to(self._device), single)
                if single is not flat:
                    flat.copy_(single)
                if self._scale != 1.0:
                    flat.mul_(self._scale)
            self._sums.add_shard(shard, list(self._leaf.views), scalars.to(self._device))
        (result,) = self._sums.partials
        result.counters.copy_(torch.stack([their_counters for _, _, their_counters in gathered]).sum(0))
        return result

    def decide(self) -> None:
        """Commit the step's residuals: what these shards could not send is added to their next
        contribution."""
        closed, self._transfers = self._transfers, []
        for transfer in closed:
            transfer.close()
        self._step, self._known, self._sent = self._step + 1, frozenset(self._encoded), frozenset()
        if len(self._compression.residuals) > len(closed):
            # Those of shards that others compute by now, which have used what they were sent.
            self._compression.keep(self._of(self._known))

    # residuals

    @property
    def kept(self) -> bool:
        return self._compression.error_feedback

    @property
    def private_shards(self) -> PrivateShards:
        """The shards whose residuals this rank holds: after the last committed step and, if its data was
        sent, after the open one."""
        if not self.kept:
            return ()
        now = (self._step, tuple(sorted(self._known)))
        return (now, (self._step + 1, tuple(sorted(self._sent)))) if self._sent else (now,)

    @property
    def covers_all(self) -> bool:
        return not self.kept or self._known >= set(range(self._team.shards))

    def settle(self, step: int) -> None:
        """Set the residuals to those after `step` steps, as far as this rank knows them."""
        if self._sent and step == self._step + 1:
            self.decide()
        self.start()
        if step != self._step:
            self._step, self._known = step, frozenset()

    def export(self) -> dict[str, Tensor]:
        """Return the residuals of the shards of this rank, by "<dtype>/<shard>"."""
        return {name: tensor.clone() for name, tensor in self._of(self._team.block).items()}

    def load(self, residuals: Mapping[str, Tensor], step: int) -> None:
        """Load a checkpoint's residuals of the shards that this rank computes."""
        self.start()
        self._step, self._known = step, frozenset(self._team.block if step else range(self._team.shards))
        self._compression.keep(_of_shards(residuals, self._known) if self.kept else {})

    def share(self) -> None:
        """Exchange residuals between all ranks: each receives those of the shards of its block, from the
        first rank that knows them.

        What is sent stays here too, until a step is decided in this group: the exchange may fail after some
        ranks have ended it.
        """
        if not self.kept:
            return
        context, blocks = self._team.context, self._team.blocks
        gathered: list[list[Any]] = context.all_gather([self._step, sorted(self._known)])
        sources: dict[int, int] = {}
        for rank, (step, known) in enumerate(gathered):
            if step == self._step:
                sources |= {shard: rank for shard in known if shard not in sources}
        missing = sorted(set(range(self._team.shards)) - sources.keys())
        if missing or len({step for step, _ in gathered}) > 1:
            raise GroupInterruptedError(
                f"no member of the group has the residuals of shards {missing} after step {self._step}"
            )
        chunks = []
        for rank, block in enumerate(blocks):
            asked = [shard for shard in block if shard not in gathered[rank][1]]
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


def _of_shards(residuals: Mapping[str, Tensor], shards: frozenset[int]) -> dict[str, Tensor]:
    return {name: value for name, value in residuals.items() if int(name.rpartition("/")[2]) in shards}


def choose_reducer(
    team: Team,
    layout: GradientLayout,
    config: TrainConfig,
    device: torch.device,
    checks: GradientChecks,
    aggregation: Aggregation | None,
) -> GradientReducer:
    """Return the reducer that the settings ask for."""
    compression = _compression(config.compression)
    if config.mode == "fast":
        return PlainReducer(team, layout, device, compression, config.algorithm, aggregation)
    if compression is not None:
        return CompressedReducer(team, layout, device, compression)
    return CanonicalReducer(team, layout, device, checks)


def _compression(settings: GradientCompression | None) -> Compression | None:
    if settings is None:
        return None
    if settings.kind in ("fp16", "bf16"):
        made = cast_gradients(settings.kind)
    elif settings.kind == "top-k":
        made = sparsify_gradients(1.0 - settings.keep)
    else:
        made = quantize_gradients(int(settings.kind.removeprefix("int")))
    return Compression(made.codec, error_feedback=settings.error_feedback)
