"""One step as a transaction: compute shards, sum them, and only then change anything.

    open        weights of the shards are known; nothing of an abandoned attempt remains
    shard       each shard of this rank's block: same start, own randomness, gradients deposited
    reduce      the sum over all shards is the parameters' gradient on every rank
                  confer   what ranks must know of each other first: changes nothing, can be repeated
                  decide   the sum of the dense gradients with the ballot, the last exchange of the step
                  apply    what both brought becomes the model's; nothing here waits for another rank
    (commit)    what follows, the optimizer's step, is update.py's

The step has one point of decision. Until the deciding exchange has ended here, parameters, buffers, residuals
and optimizer are as they were, and the step can be done again with the shards dealt in another way: what this
rank has computed of it stays held, and only what it lacks is computed. Once it has ended, nothing that
another rank does can undo the step. An exchange after it would break this: see
docs/design/0017-one-point-of-decision.md. Must not know where batches come from, nor what is done with the
gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from paceline.aggregate.strategy import Aggregation
from paceline.comm.shards import Holdings
from paceline.data.randomness import seed_everything
from paceline.train import agreement, nonfinite, step_refusals
from paceline.train.carried_state import CarriedState
from paceline.train.claims import first_holders
from paceline.train.compressed_summation import CompressedSummation, Owed
from paceline.train.config import TrainConfig
from paceline.train.gradients import Layout, expose
from paceline.train.loop_guard import GradientWatch
from paceline.train.module_buffers import ModuleBuffers
from paceline.train.shard_hash import shard_hash
from paceline.train.shard_metrics import MOST_METRICS, ShardMetrics
from paceline.train.sparse_gradients import Rows, SparseGradients, sparse_parameters
from paceline.train.summation import Checks
from paceline.train.summation_choice import choose_summation
from paceline.train.team import Team
from paceline.train.update import total_norm

_LOSS, _FIRST_METRIC = 0, 1
_WISHES = 6  # numbers of a ballot before the parameters' marks


@dataclass(frozen=True)
class Wishes:
    """What one rank brings to the step besides gradients."""

    stop: bool = False
    saved: bool = False
    save_failed: bool = False
    pause: bool = False  # after this step, so that members can come and go
    sample: int = 0  # of the weights that the step is computed with: agreement.py


@dataclass(frozen=True)
class Reduced:
    """What all ranks know after the exchange. Loss and metrics may still be on the device."""

    numbers: Tensor  # the loss, then the metrics
    metrics: tuple[str, ...]
    applied: int  # samples
    unused: tuple[str, ...]
    stops: int
    saved: int
    saves_failed: int
    pauses: int
    shard_square_norms: Tensor | None


@dataclass(frozen=True)
class _Computed:
    """What the ballot says of a shard: samples that were really in it, samples that were left out for being
    damaged, and which parameters it used."""

    applied: int
    left_out: int
    used: tuple[bool, ...]


@final
class StepTransaction:
    """Computes and sums steps of one model on one rank; memory is kept from step to step."""

    def __init__(
        self,
        team: Team,
        module: nn.Module,
        config: TrainConfig,
        device: torch.device,
        *,
        checks: Checks | None = None,
        aggregation: Aggregation | None = None,
    ) -> None:
        self._team = team
        self._config = config
        # With loss scaling a step that is not finite is skipped, and training goes on.
        self._stops_at_nonfinite = config.nonfinite == "stop" and config.precision != "fp16"
        self._device = device
        self._checks = checks or Checks()
        self._aggregation = aggregation
        named = dict(module.named_parameters())
        self._all_names, self._all_parameters = list(named), list(named.values())
        self._learning = [p.requires_grad for p in self._all_parameters]
        trained = {name: p for name, p in named.items() if p.requires_grad}
        sparse = sparse_parameters(module)
        self._dense = {name: p for name, p in trained.items() if name not in sparse}
        self._names, self._parameters = list(self._dense), list(self._dense.values())
        self._sparse = SparseGradients({name: p for name, p in trained.items() if name in sparse})
        self.trained: dict[str, Parameter] = trained
        self._watch, self._carried = GradientWatch(trained), CarriedState(module)
        self._buffers = ModuleBuffers(module)
        self._noise = config.dynamic_batch is not None
        self._norms_start = _FIRST_METRIC + MOST_METRICS + self._buffers.size
        self._epoch = self._step = self._planned = self._shard_applied = self._shard_left_out = 0
        self._scale = 1.0
        self._loss: Tensor | None = None
        self._metrics = ShardMetrics(device)
        self._computed: dict[int, _Computed] = {}
        self.counted: tuple[int, ...] = ()  # the shards of this rank in the step that was reduced last
        self.shard_hashes: dict[int, str] = {}  # of this rank's shards, in steps that are audited
        self._open: tuple[int, int] | None = None
        self._touched = False  # whether a shard has moved the buffers since they were remembered
        self._first_filled = 0
        self._watched = False
        self._prepare()

    def _prepare(self) -> None:
        """What depends on how many shards and ranks there are."""
        team, config = self._team, self._config
        self._shape = self._shape_now()
        self._direct = self._shape[1]
        tail = self._norms_start + (team.shards if self._noise else 0)
        self._tail = torch.zeros(tail, device=self._device)
        layout = Layout(self._dense, tail, _WISHES + len(self.trained) + agreement.NUMBERS)
        self._summation = (
            None
            if self._direct
            else choose_summation(team, layout, config, self._device, self._checks, self._aggregation)
        )
        self._agreed = team.world_size == 1
        if self._summation is not None:
            self._summation.watched = self._watched

    def watch_contributions(self) -> None:
        """From now on what this rank gives to each sum is hashed: `contributed`."""
        self._watched = True
        if self._summation is not None:
            self._summation.watched = True

    @property
    def contributed(self) -> str:
        """The hash of what this rank gave to the last sum; empty where it is not watched."""
        return "" if self._summation is None else self._summation.contributed

    def _shape_now(self) -> tuple[int, bool]:
        """How many shards; and whether it is one on one worker: autograd's own gradients are the sum then,
        and nothing has to be copied."""
        team = self._team
        alone = team.shards == 1 and team.world_size == 1 and self._config.compression is None
        return team.shards, alone

    @property
    def shards(self) -> int:
        return self._team.shards

    @property
    def held(self) -> tuple[int, ...]:
        """The shards of the open step that need not be computed again, whoever is in the group."""
        if self._open is None or self._summation is None or not self._summation.keeps:
            return ()
        return tuple(sorted(self._computed))

    @property
    def missing(self) -> list[int]:
        """The shards of this rank that the open step still lacks."""
        return [shard for shard in self._team.block if shard not in self._computed]

    def has(self, shard: int) -> bool:
        return shard in self._computed

    def rebind(self) -> None:
        """The team has another group or another deal; an open step goes on with what is held."""
        if self._shape_now() != self._shape:
            self.abandon()
            self._prepare()
            return
        if not self.held or not set(self.held) <= set(self._team.block):
            self._forget()
        elif self._buffers.size:
            # Whoever takes the state over from here starts its shards from the same buffers as we did.
            self._buffers.restore()
        if self._summation is not None:
            self._summation.rebind()
        self._agreed = self._team.world_size == 1

    # one step

    def open(self, epoch: int, step: int, counts: Sequence[int], scale: float = 1.0) -> None:
        """Begins a step whose shards have so many samples; `scale` is what fp16 multiplies the loss by."""
        if [p.requires_grad for p in self._all_parameters] != self._learning:
            learns = zip(self._all_names, self._all_parameters, self._learning, strict=True)
            changed = [name for name, parameter, before in learns if parameter.requires_grad != before]
            step_refusals.freezing(changed, self._step + 1)
        self._watch.opened(step)
        if self._open == (epoch, step):
            return  # done again with another group
        self._open = (epoch, step)
        self._epoch, self._step, self._planned, self._scale = epoch, step, sum(counts), scale
        self._computed, self.shard_hashes, self._touched = {}, {}, False
        self._first_filled = next((shard for shard, count in enumerate(counts) if count), 0)
        self._sparse.start()
        if self._buffers.size:
            self._buffers.remember()
        if self._summation is not None:
            self._summation.start()
        if self._ledger is not None:
            self._ledger.begin(step, scale)

    def start_shard(self, shard: int) -> None:
        """The shard starts from the step's state, with randomness of its own."""
        if self._buffers.size and self._touched:
            self._buffers.restore()
        self._touched = True
        for parameter in self.trained.values():
            parameter.grad = None
        self._watch.start_shard()
        self._loss = None
        self._metrics.start()
        self._shard_applied = self._shard_left_out = 0
        seed_everything(self._config.seed, self._epoch, self._step, shard)

    def backward(self, loss: Tensor, count: int, metrics: Mapping[str, Any] | None = None) -> None:
        """Adds one micro-batch of `count` samples to the current shard; `loss` is their mean."""
        if not isinstance(loss, Tensor) or not loss.requires_grad or loss.numel() != 1:
            step_refusals.loss(loss)
        self._watch.check_gradients(self._step + 1)
        weight = count / self._planned
        factor = weight * self._scale
        (loss if factor == 1.0 else loss * factor).backward()  # type: ignore[no-untyped-call]
        self._watch.after_backward()
        self._carried.look(warn=self._team.is_master)
        self._shard_applied += count
        with torch.no_grad():
            weighted = loss.detach().reshape(()).float()
            if weight != 1.0:
                weighted = weighted * weight
            self._loss = weighted if self._loss is None else self._loss + weighted
            self._metrics.add(metrics or {}, weight)

    def leave_out(self, samples: int) -> None:
        """So many samples of the current shard cannot be read and count as not there."""
        self._shard_left_out += samples

    def finish_shard(self, shard: int) -> None:
        """Deposits the shard's gradients. A shard without samples counts as zeros."""
        self._watch.finish_shard(self._step + 1)
        computed = _Computed(
            self._shard_applied,
            self._shard_left_out,
            tuple(parameter.grad is not None for parameter in self.trained.values()),
        )
        audit = self._config.audit_every
        if audit and (self._step + 1) % audit == 0:
            self.shard_hashes[shard] = shard_hash([p.grad for p in self.trained.values()])
        self._sparse.collect(shard)
        if self._summation is not None:
            with torch.no_grad():
                self._summation.deposit(shard, [p.grad for p in self._parameters], self._shard_tail(shard))
        # Now that it is there: a group that is over gives no memory to deposit it in.
        self._computed[shard] = computed

    def reduce(self, wishes: Wishes | None = None) -> Reduced:
        """Sums all shards of all ranks; afterwards the parameters' `grad` is the gradient of the step."""
        wishes = wishes or Wishes()
        holdings, rows, idle = self._confer(wishes)
        self.counted = tuple(sorted(self._computed) if holdings is None else holdings.blocks[self._team.rank])
        computed = [self._computed[shard] for shard in self.counted]
        used = [any(marks) for marks in zip(*(one.used for one in computed), strict=True)]
        ballot = self._ballot(wishes, computed, used or [False] * len(self.trained))
        names = self._metrics.names
        if self._summation is None:
            # A step whose samples were all left out has no numbers.
            nothing = self._tail[_LOSS]
            loss = nothing if self._loss is None else self._loss
            tail = torch.stack([loss, *(self._metrics.values or [nothing] * len(names))])
        else:
            world = self._team.world_size
            ballot += agreement.ballot(wishes.sample, world)
            flat = self._summation.finish(torch.tensor(ballot, dtype=torch.float32), holdings)
            if world > 1:
                ballot = [round(number) for number in flat.ballot.tolist()]
            for theirs in idle:
                ballot = [one + other for one, other in zip(ballot, theirs, strict=True)]
            ballot, samples = ballot[: -agreement.NUMBERS], ballot[-agreement.NUMBERS :]
            if not agreement.are_equal(samples):
                raise agreement.DifferError  # all ranks do, before any of them has applied the step
            counts = dict(zip(self.trained, ballot[_WISHES:], strict=True))
            expose(self._parameters, flat, [counts[name] > 0 for name in self._names])
            tail = flat.tail
        if self._stops_at_nonfinite:
            nonfinite.check(tail[_LOSS], self._step + 1)
        # From here on nothing can fail because of another rank: the step is decided.
        self._sparse.apply(rows)
        applied, left_out, stops, saved, failed, pauses, *marks = ballot
        if applied + left_out != self._planned:
            step_refusals.lacking(self._step + 1, self._planned, applied, left_out)
        self._open = None
        if self._ledger is not None:
            self._ledger.decide()
        if self._buffers.size and self._summation is not None and applied:
            movement = tail[_FIRST_METRIC + MOST_METRICS : self._norms_start]
            self._buffers.move(movement, applied / self._planned)
        short = self._planned / applied if 0 < applied != self._planned else 1.0
        if short != 1.0:
            # Samples were skipped: what was weighted by the planned number is weighted by the real one.
            grads = [p.grad for p in self.trained.values() if p.grad is not None]
            torch._foreach_mul_(grads, short)
        return Reduced(
            # A copy: the next step writes over what was exchanged.
            tail[: _FIRST_METRIC + len(names)] * short,
            names,
            applied,
            () if all(marks) else tuple(n for n, mark in zip(self.trained, marks, strict=True) if not mark),
            stops,
            saved,
            failed,
            pauses,
            tail[self._norms_start :].clone() if self._noise else None,
        )

    def _ballot(self, wishes: Wishes, computed: Sequence[_Computed], used: Sequence[bool]) -> list[int]:
        return [
            sum(one.applied for one in computed),
            sum(one.left_out for one in computed),
            wishes.stop,
            wishes.saved,
            wishes.save_failed,
            wishes.pause,
            *used,
        ]

    def _confer(self, wishes: Wishes) -> tuple[Holdings | None, list[Rows], list[list[int]]]:
        """What ranks must know of each other before they sum: metric names, who has computed what, the rows
        of sparse gradients, and ballots of ranks of whose shards none counts: with no partial sum to travel
        with, theirs would be missing. In one exchange that changes nothing, so that it can be repeated;
        whose shards count (the first rank's: the bits are equal), all rows, and the ballots of the idle."""
        mine: dict[str, Any] = {}
        if not self._agreed:
            mine["metrics"] = [list(self._metrics.names), sum(one.applied for one in self._computed.values())]
        if self._team.backup:
            mine["computed"] = sorted(self._computed)
        if self._sparse.used:
            mine["rows"] = self._sparse.rows(sorted(self._computed))
        world = self._team.world_size
        some_idle = self._ledger is None and world > 1 and (self._team.backup or not all(self._team.blocks))
        if some_idle:
            nothing = self._ballot(wishes, (), [False] * len(self.trained))
            mine["ballot"] = [int(one) for one in (*nothing, *agreement.ballot(wishes.sample, world))]
        told: list[dict[str, Any]] = [mine]
        if mine and self._team.world_size > 1:
            told = self._team.context.all_gather(mine)
        holdings = None
        if self._team.backup:
            holdings = first_holders([one["computed"] for one in told], self._team.shards, self._step + 1)
        if not self._agreed:
            self._agreed = self._metrics.agree([one["metrics"] for one in told])
        blocks = self._team.blocks if holdings is None else holdings.blocks
        idle = (
            [one["ballot"] for one, block in zip(told, blocks, strict=True) if not block] if some_idle else []
        )
        return holdings, [one["rows"] for one in told] if self._sparse.used else [], idle

    def undo(self) -> None:
        """What follows `reduce` failed because of another rank: the model is as it was before `open`."""
        if self._buffers.size:
            self._buffers.restore()
        self.abandon()

    def abandon(self) -> None:
        """Gives the step up: the model is as it was before `open`."""
        self._forget()
        if self._summation is not None:
            self._summation.start()

    def _forget(self) -> None:
        """Nothing stays held. What compression owes is left as it is: whether the step was decided elsewhere
        shows only when the members have met (`settle`)."""
        if self._buffers.size and self._open is not None:
            self._buffers.restore()
        self._open, self._computed = None, {}
        if self._summation is not None and self._ledger is None:
            self._summation.start()
        for parameter in self.trained.values():
            parameter.grad = None

    def close(self) -> None:
        """The module keeps nothing of the memory that gradients were exchanged in."""
        for parameter in self.trained.values():
            parameter.grad = None

    # what compression still owes is part of the run's state

    @property
    def has_state_of_its_own(self) -> bool:
        """Whether this rank's shards have state that no other rank has a copy of."""
        return self._ledger is not None and self._ledger.keeps_residuals

    @property
    def owed(self) -> Owed:
        """Of which shards this rank has what is owed, by the number of committed steps; `elastic` decides by
        it whether the run can go on from there."""
        return () if self._ledger is None else self._ledger.owed

    @property
    def owes_all(self) -> bool:
        """Whether this rank alone has the whole state of the run."""
        return self._ledger is None or self._ledger.covers_all

    def settle(self, step: int) -> None:
        """The state of this rank is that after `step` steps, its own or one it took over: what its shards owe
        becomes that of the same moment."""
        if self._ledger is not None:
            self._ledger.settle(step)

    def residuals(self) -> dict[str, Tensor]:
        return {} if self._ledger is None else self._ledger.residuals()

    def load_residuals(self, residuals: Mapping[str, Tensor], step: int) -> None:
        """Those of a checkpoint of `step`; a shard that has none there owes nothing."""
        if self._ledger is not None:
            self._ledger.load(residuals, step)

    def share_residuals(self) -> None:
        """The shards were dealt anew: what each of them owes goes to the rank that computes it now."""
        if self._ledger is not None and self._ledger.keeps_residuals:
            self._ledger.share()

    @property
    def _ledger(self) -> CompressedSummation | None:
        return self._summation if isinstance(self._summation, CompressedSummation) else None

    # the shard's numbers

    def _shard_tail(self, shard: int) -> Tensor:
        tail = self._tail.zero_()
        if self._buffers.size:
            # A negative zero is no movement at all; see module_buffers.py.
            tail[_FIRST_METRIC + MOST_METRICS : self._norms_start] = -0.0
        if self._shard_applied and self._loss is not None:
            tail[_LOSS] = self._loss
            for position, value in enumerate(self._metrics.values):
                tail[_FIRST_METRIC + position] = value
            if self._buffers.size:
                self._buffers.movement(
                    self._shard_applied / self._planned,
                    counters=shard == self._first_filled,
                    out=tail[_FIRST_METRIC + MOST_METRICS : self._norms_start],
                )
            if self._noise:
                tail[self._norms_start + shard] = self._square_norm(shard)
        return tail

    def _square_norm(self, shard: int) -> Tensor:
        grads = [p.grad for p in self._parameters if p.grad is not None] + self._sparse.values(shard)
        return total_norm(grads).square().to(self._device) / self._scale**2
