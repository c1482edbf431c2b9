"""Feed a rank the batches of its steps, reading ahead.

A feed is asked for the step at a position; it answers with how many samples the whole step has, and hands out
the micro-batches of this rank's shards. Map-style data is read by number, by the rank that computes it; a
stream is read by the first rank, in order, and sent to the others. Either way the batches of a step depend on
the position alone.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, final

import numpy as np
import torch

from paceline.core.errors import UsageError
from paceline.data.batch_plan import DataPosition, ShardSlice, slices_of_step
from paceline.data.containers import map_leaves, packed, unpacked
from paceline.data.orders import epoch_order
from paceline.data.sources import Batch, Request, Source, Stream, read
from paceline.train.settings.train_config import TrainConfig
from paceline.train.team import Team

_READING = 1  # marks keys of reading, apart from those of computing


class BatchFeed(ABC):
    full_step: int | None = None
    """Samples of a full step, where the feed decides it and not the settings."""

    @abstractmethod
    def step(self, position: DataPosition, batch: int, missing: Sequence[int] | None = None) -> int:
        """Turn to the step at `position` and return how many samples it takes; 0 at the end of an epoch.
        `missing`: the shards that this rank will ask for, where they are not all of its block."""

    @abstractmethod
    def batches(self, shard: int) -> Iterator[Batch]:
        """Yield the micro-batches of the next of this rank's shards, in order."""

    def state_dict(self) -> dict[str, Any]:
        """Return what the position lacks, for a checkpoint; the first rank's counts."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027 - samples by number need none
        """Restore what `state_dict` returned, before the first step of a resumed run."""

    @abstractmethod
    def close(self) -> None: ...


@final
class IndexedFeed(BatchFeed):
    """Samples by number, in a seeded order that is never written down."""

    def __init__(self, source: Source, config: TrainConfig, team: Team) -> None:
        assert source.size is not None
        self._size: int = source.size
        self._source, self._config, self._team = source, config, team
        self._reader: Iterator[Batch] | None = None
        self._ready_for: tuple[int, int, int, int] | None = None
        self._turned_to = (0, 0, 0, 0)
        self._read_for: tuple[int, tuple[int, ...]] = (0, ())  # the shards, and the block, of the reader
        self._slices: Sequence[ShardSlice] = ()
        self._wanted: list[int] = []
        self._next: tuple[int, int, int, int] | None = None

    def step(self, position: DataPosition, batch: int, missing: Sequence[int] | None = None) -> int:
        planned = self._planned(position.offset, batch)
        if planned == 0:
            return 0
        here = (position.epoch, position.offset, position.step, batch)
        wanted = list(self._team.block if missing is None else missing)
        if self._team.backup:
            self._turned_to = here
        elif self._ready_for != here or self._read_for != self._assigned or wanted != list(self._team.block):
            self.close()
            self._read_for = self._assigned
            self._reader = read(self._source, self._requests(*here, tuple(wanted)))
        self._ready_for = None
        self._slices = slices_of_step(position.offset, planned, batch, self._team.shards)
        self._wanted = wanted
        epoch, offset, step = position.epoch, position.offset + planned, position.step + 1
        if self._planned(offset, batch) == 0:
            epoch, offset = epoch + 1, 0
        self._next = (epoch, offset, step, batch)
        return planned

    def batches(self, shard: int) -> Iterator[Batch]:
        if self._team.backup:
            # Which shards this rank computes shows only in the course of the step.
            requests = itertools.islice(
                self._requests(*self._turned_to, (shard,)),
                len(self._slices[shard].pieces(self._config.micro_samples)),
            )
            yield from read(self._source, requests, here=True)
            return
        reader = self._reader
        assert reader is not None
        for _ in self._slices[shard].pieces(self._config.micro_samples):
            yield next(reader)
        self._wanted.remove(shard)
        if not self._wanted:
            self._ready_for = self._next

    def close(self) -> None:
        if isinstance(self._reader, Iterator) and hasattr(self._reader, "close"):
            self._reader.close()
        self._reader = self._ready_for = None

    def _planned(self, offset: int, batch: int) -> int:
        left = min(self._size, steps_limit(self._config, self._size)) - offset
        return 0 if self._config.drop_last and left < batch else max(0, min(batch, left))

    @property
    def _assigned(self) -> tuple[int, tuple[int, ...]]:
        return self._team.shards, self._team.block

    def _requests(
        self, epoch: int, offset: int, step: int, batch: int, wanted: Sequence[int]
    ) -> Iterator[Request]:
        """Yield the requests from a position on, across epochs, so that reading processes stay busy: of the
        first step the wanted shards, of later ones the whole block."""
        config = self._config
        shards, block = self._assigned
        while config.epochs is None or epoch < config.epochs:
            order = epoch_order(
                self._source,
                seed=config.seed,
                epoch=epoch,
                batch=config.first_batch,
                shuffle=config.shuffle,
            )
            while planned := self._planned(offset, batch):
                if config.max_steps is not None and step >= config.max_steps:
                    return
                slices = slices_of_step(offset, planned, batch, shards)
                for part in (slices[shard] for shard in wanted):
                    for number, (start, stop) in enumerate(part.pieces(config.micro_samples)):
                        key = (config.seed, epoch, step, part.shard, number, _READING)
                        yield Request(key, order.take(start, stop))
                offset, step, wanted = offset + planned, step + 1, block
            epoch, offset = epoch + 1, 0


@final
class StreamFeed(BatchFeed):
    """Samples in the order of a stream: the first rank reads and collates them and sends them to the
    others."""

    def __init__(self, stream: Stream, config: TrainConfig, team: Team) -> None:
        self._stream, self._config, self._team = stream, config, team
        # Of the step that was sent last: it may have to be sent again, to another group.
        self._taken: tuple[DataPosition, int, list[Any]] | None = None
        self._assigned: dict[int, list[Batch]] = {}
        self._opened = False
        self._saved: dict[str, Any] = {}
        self._end: tuple[int, int] | None = None  # the epoch that is read to its end, and where that is

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._saved = dict(state)
        end = self._saved.pop("end", None)
        self._end = None if end is None else (end[0], end[1])

    def step(self, position: DataPosition, batch: int, missing: Sequence[int] | None = None) -> int:
        parts = self._parts_by_rank(position, batch) if self._team.is_master else None
        planned, held = self._team.context.scatter(parts)
        self._assigned = {
            shard: [Batch(unpacked(data), count) for data, count in batches] for shard, batches in held
        }
        return int(planned)

    def batches(self, shard: int) -> Iterator[Batch]:
        yield from self._assigned[shard]

    def state_dict(self) -> dict[str, Any]:
        if not self._opened:
            return {}
        # Where a dataset stands after its end is its own business; many are at their beginning then.
        return {**self._stream.state_dict(), "end": None if self._end is None else list(self._end)}

    def close(self) -> None:
        self._assigned = {}

    def _parts_by_rank(self, position: DataPosition, batch: int) -> list[Any]:
        if self._taken is None or self._taken[:2] != (position, batch):
            self._taken = (position, batch, self._take(position, batch))
        samples = self._taken[2]
        collated: dict[int, list[list[Any]]] = {}
        for part in slices_of_step(0, len(samples), batch, self._team.shards):
            made = [
                self._stream.batch(samples[start:stop])
                for start, stop in part.pieces(self._config.micro_samples)
            ]
            collated[part.shard] = [[packed(batch.data), batch.count] for batch in made]
        blocks = self._team.blocks
        return [[len(samples), [[shard, collated[shard]] for shard in block]] for block in blocks]

    def _take(self, position: DataPosition, batch: int) -> list[Any]:
        if self._end == (position.epoch, position.offset):
            return []
        if position.offset >= steps_limit(self._config, position.offset + 1):
            return []  # the rest of the stream is not read
        self._seek(position)
        samples = self._stream.take(batch)
        if len(samples) < batch:
            self._end = (position.epoch, position.offset + len(samples))
            samples = [] if self._config.drop_last else samples
        return samples

    def _seek(self, position: DataPosition) -> None:
        stream, config = self._stream, self._config
        if self._opened and (stream.epoch, stream.position) == (position.epoch, position.offset):
            return
        self._opened = True
        saved, self._saved = self._saved, {}
        if saved:
            stream.begin_as(saved)
        if position.offset == 0:
            stream.start(position.epoch, config.seed)
            return
        here = {"epoch": position.epoch, "position": position.offset}
        if any(saved.get(key) != value for key, value in here.items()):
            saved = {**here, "seed": config.seed, "resume": None}
        stream.load_state_dict(saved)


def steps_limit(config: TrainConfig, samples: int) -> int:
    """Return how many of an epoch's samples its steps take at most: `samples` where there is no limit."""
    limit = 1 if config.dry_run else config.limit_batches
    return samples if limit is None else limit * config.first_batch


def open_feed(source: Source, config: TrainConfig, team: Team) -> BatchFeed:
    if isinstance(source, Stream):
        return StreamFeed(source, config, team)
    if source.size == 0:
        raise UsageError("the training data is empty", remedy="pass data with at least one sample")
    return IndexedFeed(source, config, team)


def to_device(data: Any, device: torch.device) -> Any:
    """Return `data` with every tensor on the device; what can move by itself (a PackedSequence) does."""

    def moved_object(thing: Any) -> Any:
        move = getattr(thing, "to", None)
        return move(device) if callable(move) and not isinstance(thing, np.ndarray) else thing

    return map_leaves(data, lambda tensor: tensor.to(device, non_blocking=True), moved_object)
