"""A sampler for the user's DataLoaders: torch's DistributedSampler, with nothing repeated, nothing lost,
and a position from which another number of replicas can continue.

Replica r of n reads positions s + r, s + r + n, ... of the epoch's order, where s is where the iteration
starts (0 at first). Replicas that have trained on k samples each have together trained on positions s to
s + k n - 1: one number that does not depend on n, s + k n, is the whole state.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sized
from dataclasses import dataclass
from typing import Any, cast, final

import numpy as np
import torch.distributed as dist
from torch.utils.data import Sampler

from paceline.comm import default_group
from paceline.core.errors import UsageError
from paceline.core.wording import counted, with_article
from paceline.data.permutation import LARGEST_SEED, LARGEST_SIZE, InOrder, Order, Permutation
from paceline.data.whole_numbers import whole

_log = logging.getLogger("paceline.data")

_BLOCK = 1024
_FORMAT = 1


@dataclass
class _Pass:
    """One iteration over what is left of an epoch: where it started, what it has handed out."""

    start: int
    share: int
    again: bool = False  # the same epoch as the iteration before, and no set_epoch in between
    handed_out: int = 0


@final
class DistributedSampler(Sampler[int]):
    """Replacement of torch.utils.data.DistributedSampler: same arguments, `len`, `set_epoch`, attributes.

    What is different:
      - No padding: replicas differ by at most one sample, each sample is read once. `pad=True` repeats
        samples from the epoch's beginning as torch does, `drop_last=True` leaves out the last few.
      - The order takes no memory and is a function of (dataset size, seed, epoch).
      - `state_dict` and `load_state_dict` resume in the middle of an epoch, on any number of replicas.
      - A forgotten `set_epoch` is logged, once.

    Without `num_replicas` or `rank`, they are those of Paceline's process group, else of torch's.
    """

    def __init__(
        self,
        dataset: Sized,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        *,
        pad: bool = False,
    ) -> None:
        if num_replicas is None or rank is None:
            group_size, group_rank = _group()
            num_replicas = group_size if num_replicas is None else num_replicas
            rank = group_rank if rank is None else rank
        if pad and drop_last:
            raise UsageError(
                "DistributedSampler(pad=True, drop_last=True): one adds samples, the other drops them",
                remedy="choose one of them, or none to read every sample exactly once",
            )
        self.dataset = dataset
        self.num_replicas = whole("num_replicas", num_replicas, 1)
        self.rank = whole("rank", rank, 0, self.num_replicas - 1)
        self.shuffle = bool(shuffle)
        self.seed = whole("seed", seed, 0, LARGEST_SEED)
        self.drop_last = bool(drop_last)
        self.pad = bool(pad)
        self.epoch = 0
        self._size = _length(dataset)
        self._start = 0
        self._pass: _Pass | None = None
        self._resumed = False
        self._warned = False
        self._set_epoch_called = False  # set_epoch was called, ever

    @property
    def num_samples(self) -> int:
        """This replica's samples in a whole epoch; `len(sampler)` is what the next iteration has of them."""
        return self._share(0, self.rank)

    @property
    def total_size(self) -> int:
        """All replicas' samples in a whole epoch, with padding or without the dropped ones."""
        return self._end(0)

    def __len__(self) -> int:
        return self._share(self._start, self.rank)

    def __iter__(self) -> Iterator[int]:
        last = self._pass
        again = last is not None and (last.handed_out > 0 or not last.share)
        # A look at the first batch before set_epoch is no epoch: what follows decides.
        if last is not None and again and last.again:
            self._say_forgotten()
        self._resumed = False
        self._pass = _Pass(self._start, len(self), again)
        if not self._pass.share:
            self._start = 0
        order: Order = Permutation(self._size, self.seed, self.epoch) if self.shuffle else InOrder(self._size)
        return self._walk(self._pass, order)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, and with it the order; call it before each epoch's iteration.

        The epoch that a loaded state is in continues from the state; any other starts at its beginning.
        """
        epoch = whole("epoch", epoch, 0, LARGEST_SEED)
        self._set_epoch_called = True
        if epoch != self.epoch:
            if self._resumed and self._share(self._start, 0):
                _log.warning(
                    "DistributedSampler.set_epoch(%d): the loaded state is in epoch %d at sample %d of %d "
                    "and is dropped; start the loop at `sampler.epoch` to continue from it",
                    epoch,
                    self.epoch,
                    self._start,
                    self._size,
                )
            self.epoch = epoch
            self._start = 0
        self._resumed = False
        self._pass = None

    def state_dict(self, consumed: int | None = None) -> dict[str, Any]:
        """Return where the epoch stands, as plain numbers: for any number of replicas to continue from.

        `consumed`: the samples that this replica has trained on in the iteration now running. Without it, all
        that the sampler has handed out count: right for a DataLoader with num_workers=0, too many with
        workers, which read ahead. Take it when every replica has finished the same step. At an epoch's uneven
        end, where some replicas have a sample more than others, rank 0 always has the most: save its state.
        """
        now = self._pass
        if now is None:
            if consumed:
                raise UsageError(
                    f"state_dict(consumed={consumed!r}) before an iteration has started",
                    remedy="count from 0 when an epoch starts and after load_state_dict",
                )
            position = self._start
        else:
            used = now.handed_out if consumed is None else self._checked_consumed(consumed, now)
            # Who has it all is through with the epoch, also with what drop_last leaves out.
            done = used == self._share(now.start, 0)
            position = self._size if done else now.start + used * self.num_replicas
        return {
            "format": _FORMAT,
            "size": self._size,
            "shuffle": self.shuffle,
            "seed": self.seed,
            "epoch": self.epoch,
            "position": position,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Have the next iteration read what that state's epoch has left, shared among these replicas."""
        state = _checked_state(state_dict)
        mine = {"size": self._size, "shuffle": self.shuffle, "seed": self.seed}
        for name, value in mine.items():
            if state[name] != value:
                raise UsageError(
                    f"DistributedSampler.load_state_dict: the state was saved with {name}={state[name]!r}, "
                    f"this sampler has {value!r}: the same position would mean other samples",
                    remedy="use the same dataset, shuffle and seed as the run that saved the state",
                )
        epoch = whole("epoch", state["epoch"], 0, LARGEST_SEED)
        self._start = whole("position", state["position"], 0, self._size)
        self.epoch = epoch
        self._pass = None
        self._resumed = True

    def _walk(self, current: _Pass, order: Order) -> Iterator[int]:
        replicas, size = self.num_replicas, self._size
        for done in range(0, current.share, _BLOCK):
            numbers = np.arange(done, min(done + _BLOCK, current.share), dtype=np.int64)
            # Padding continues at the beginning of the order.
            positions = (current.start + self.rank + numbers * replicas) % size
            for sample in order.at(positions).tolist():
                current.handed_out += 1
                if current.handed_out == current.share and current is self._pass:
                    # The epoch is handed out: iterating again means all of it.
                    self._start = 0
                    if current.again and not self._set_epoch_called:
                        self._say_forgotten()
                yield sample

    def _end(self, start: int) -> int:
        """Return the end of the positions that replicas which start at `start` read."""
        rest = (self._size - start) % self.num_replicas
        if self.drop_last:
            return self._size - rest
        return self._size + (self.num_replicas - rest if self.pad and rest else 0)

    def _share(self, start: int, rank: int) -> int:
        return -(-max(0, self._end(start) - start - rank) // self.num_replicas)

    def _checked_consumed(self, consumed: int, now: _Pass) -> int:
        used = whole("consumed", consumed, 0)
        # Who has all of a shorter share may count as many as rank 0 has.
        most = self._share(now.start, 0) if now.handed_out == now.share else now.handed_out
        if used > most:
            raise UsageError(
                f"state_dict(consumed={used}): replica {self.rank} of {self.num_replicas} was handed "
                f"{now.handed_out} of its {counted(now.share, 'sample')} since the iteration started",
                remedy="pass this replica's samples, not all replicas', counted since the iteration started",
            )
        return used

    def _say_forgotten(self) -> None:
        if self._warned or not self.shuffle or not self._size:
            return
        self._warned = True
        _log.warning(
            "DistributedSampler: iterated again without set_epoch, so epoch %d's order comes again; call "
            "sampler.set_epoch(epoch) before each epoch",
            self.epoch,
        )


def _group() -> tuple[int, int]:
    context = default_group.current()
    if context is not None:
        return context.world_size, context.rank
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size(), dist.get_rank()
    raise UsageError(
        "DistributedSampler: no num_replicas and rank were given, and this process belongs to no group",
        remedy="pass num_replicas= and rank=, call paceline.init_process_group(), or use paceline.spawn(...)",
    )


def _length(dataset: object) -> int:
    try:
        return whole("len(dataset)", len(cast("Sized", dataset)), 0, LARGEST_SIZE)
    except TypeError as error:
        raise UsageError(
            f"DistributedSampler: {with_article(dataset)} has no length",
            remedy="pass a map-style dataset with __len__; an iterable dataset cannot be sampled",
        ) from error


def _checked_state(state: object) -> Mapping[str, Any]:
    names = {"format", "size", "shuffle", "seed", "epoch", "position"}
    if not isinstance(state, Mapping) or set(state) != names or state["format"] != _FORMAT:
        raise UsageError(
            f"DistributedSampler.load_state_dict: {str(state)[:200]} is not a state of this sampler",
            remedy=f"pass what state_dict() returned: a mapping with {', '.join(sorted(names))}",
        )
    return state
