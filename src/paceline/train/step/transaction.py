"""One step as a transaction: compute shards, sum them, and only then change anything.

    open        the weights of the shards are known; nothing of an abandoned attempt remains
    shard       each shard of this rank: same start, own randomness; its gradients go to the reducer
    reduce      the sum over all shards is the parameters' gradient on every rank
                  confer   what ranks must know of each other first: changes nothing, can be repeated
                  decide   the sum of the dense gradients with the counters, the last exchange of the step
                  apply    what both brought becomes the model's; nothing here waits for another rank
    (commit)    what follows, the optimizer's step, is in weight_update.py

The step has one point of decision. Until the deciding exchange has ended here, parameters, buffers, residuals
and optimizer are as they were, and the step can be repeated with the shards assigned in another way: what
this rank has computed of it stays held, and only what it lacks is computed. Once it has ended, nothing that
another rank does can undo the step. An exchange after it would break this: see
docs/design/0017-one-point-of-decision.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from paceline.comm.collectives.shard_sums import ShardOwnership
from paceline.control.member_shell_rules import kept_shards
from paceline.data.seeding import seed_everything
from paceline.train.settings.train_config import TrainConfig
from paceline.train.step import misuse_guard, replica_agreement
from paceline.train.step.aggregation_registry import Aggregation
from paceline.train.step.carried_state_check import CarriedState
from paceline.train.step.compressed_reducer import choose_reducer
from paceline.train.step.gradient_memory import (
    GradientLayout,
    Rows,
    SparseGradients,
    clear_gradients,
    expose,
    sparse_parameters,
)
from paceline.train.step.gradient_reducer import NO_RESIDUALS, GradientChecks, Residuals
from paceline.train.step.misuse_guard import GradientWatch
from paceline.train.step.module_buffers import ModuleBuffers
from paceline.train.step.step_counters import (
    MOST_METRICS,
    STEP_COUNTERS,
    ComputedShard,
    ReducedStep,
    ShardMetrics,
    StepRequests,
    pack_counters,
)
from paceline.train.step.step_hashes import shard_hash
from paceline.train.step.unfreezing import Unfreezing
from paceline.train.step.weight_update import sum_is_finite, total_norm
from paceline.train.team import Team, first_owners

_LOSS, _FIRST_METRIC = 0, 1
_SAMPLE = replica_agreement.SAMPLE_COUNTERS


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
        checks: GradientChecks | None = None,
        aggregation: Aggregation | None = None,
        unfreezing: Unfreezing | None = None,
    ) -> None:
        self._team = team
        self._config = config
        # With loss scaling a step that is not finite is skipped, and training continues.
        self._stops_at_nonfinite = config.nonfinite == "stop" and config.precision != "fp16"
        self._skips_nonfinite = config.nonfinite == "skip"
        self._device = device
        self._checks = checks or GradientChecks()
        self._aggregation = aggregation
        named = dict(module.named_parameters())
        self._unfreezing = unfreezing or Unfreezing(module, config.unfreeze)
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
        self._scale, self._first_filled = 1.0, 0
        self.resting: Sequence[Parameter] = ()  # get no gradient: it is another optimizer's turn
        self._loss: Tensor | None = None
        self._metrics = ShardMetrics(device)
        self._computed: dict[int, ComputedShard] = {}
        self.counted: tuple[int, ...] = ()  # the shards of this rank in the step that was reduced last
        self.shard_hashes: dict[int, str] = {}  # of this rank's shards, in steps that are audited
        self._open: tuple[int, int] | None = None
        self._touched = False  # whether a shard has moved the buffers since they were remembered
        self._watched = self.is_lockstep = False  # lock-step: no shard can be computed alone
        self._prepare()

    def _prepare(self) -> None:
        """Make everything that depends on the number of shards and ranks."""
        team, config = self._team, self._config
        self._shape = self._shape_now()
        scalars = self._norms_start + (team.shards if self._noise else 0)
        self._scalars = torch.zeros(scalars, device=self._device)
        layout = GradientLayout(self._dense, scalars, STEP_COUNTERS + len(self.trained) + _SAMPLE)
        self._reducer = None
        if not self._shape[1]:
            self._reducer = choose_reducer(
                team, layout, config, self._device, self._checks, self._aggregation
            )
            self._reducer.watched = self._watched
        self._agreed = team.world_size == 1

    def watch_contributions(self) -> None:
        """Hash what this rank gives to each sum from now on: `contribution_hash`."""
        self._watched = True
        if self._reducer is not None:
            self._reducer.watched = True

    @property
    def contribution_hash(self) -> str:
        """The hash of what this rank gave to the last sum; empty where it is not watched."""
        return "" if self._reducer is None else self._reducer.contribution_hash

    def _shape_now(self) -> tuple[int, bool]:
        """Return the number of shards, and whether it is one shard on one worker: then autograd's own
        gradients are the sum, and nothing is copied."""
        team = self._team
        return team.shards, team.shards == team.world_size == 1 and self._config.compression is None

    @property
    def held(self) -> tuple[int, ...]:
        """The shards of the open step that need not be computed again, whichever ranks are in the group."""
        keeps = self._reducer is not None and self._reducer.survives_failure and not self.is_lockstep
        return tuple(sorted(self._computed)) if keeps and self._open is not None else ()

    @property
    def learning(self) -> Mapping[str, Parameter]:
        """The parameters that learn in the step that was opened last."""
        still = self._unfreezing.frozen
        return {name: parameter for name, parameter in self.trained.items() if name not in still}

    @property
    def missing(self) -> list[int]:
        """The shards of this rank that the open step still lacks."""
        return [shard for shard in self._team.block if shard not in self._computed]

    def rebind(self) -> None:
        """Adapt to the team's new group or assignment; an open step continues with what is held."""
        if self._shape_now() != self._shape:
            self.abandon()
            self._prepare()
            return
        keep = bool(kept_shards(self.held, self._team.block))
        if not keep:
            self._forget()
        elif self._buffers.size:
            # A rank that gets the state from this one starts its shards from the same buffers.
            self._buffers.restore()
        if self._reducer is not None:
            self._reducer.rebind(keep=keep)
        self._agreed = self._team.world_size == 1

    # one step

    def open(self, epoch: int, step: int, counts: Sequence[int], scale: float = 1.0) -> None:
        """Begin a step; `counts` are the samples by shard, `scale` is what fp16 multiplies the loss by."""
        self._unfreezing.turn_to(step)
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
        if self._reducer is not None:
            self._reducer.start()
        self.residuals.begin(step, scale)

    def start_shard(self, shard: int) -> None:
        """Start a shard from the step's state, with its own randomness."""
        if self._buffers.size and self._touched:
            self._buffers.restore()
        self._touched = True
        clear_gradients(self.trained.values())
        self._watch.start_shard()
        self._loss = None
        self._metrics.start()
        self._shard_applied = self._shard_left_out = 0
        seed_everything(self._config.seed, self._epoch, self._step, shard)

    def backward(self, loss: Tensor, count: int, metrics: Mapping[str, Any] | None = None) -> None:
        """Add one micro-batch of `count` samples to the current shard; `loss` is their mean."""
        part = self.weighted(loss, count)
        self._watch.check_gradients(self._step + 1)
        part.backward()  # type: ignore[no-untyped-call]
        self.count(loss, count, metrics)

    def weighted(self, loss: Tensor, count: int) -> Tensor:
        """Return the part of the step's loss, scaled, that `count` samples with this mean are."""
        misuse_guard.check_loss(loss)
        factor = count / self._planned * self._scale
        return loss if factor == 1.0 else loss * factor

    def count(self, loss: Tensor, count: int, metrics: Mapping[str, Any] | None = None) -> None:
        """Count a micro-batch whose gradients are the parameters' in the current shard."""
        weight = count / self._planned
        clear_gradients(self.resting)
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
        """Count samples of the current shard that cannot be read as not there."""
        self._shard_left_out += samples

    def finish_shard(self, shard: int) -> None:
        """Give the shard's gradients to the reducer. A shard without samples counts as zeros."""
        self._watch.finish_shard(self._step + 1)
        computed = ComputedShard(
            self._shard_applied,
            self._shard_left_out,
            tuple(parameter.grad is not None for parameter in self.trained.values()),
        )
        audit = self._config.audit_every
        if audit and (self._step + 1) % audit == 0:
            self.shard_hashes[shard] = shard_hash([p.grad for p in self.trained.values()])
        self._sparse.collect(shard)
        if self._reducer is not None:
            with torch.no_grad():
                self._reducer.add_shard(shard, [p.grad for p in self._parameters], self._shard_scalars(shard))
        # Only now: the memory of a group that is over cannot take the shard.
        self._computed[shard] = computed

    def reduce(self, requests: StepRequests | None = None) -> ReducedStep:
        """Sum all shards of all ranks; afterwards the parameters' `grad` is the gradient of the step.

        A failure before the end of `_decide` leaves the step undecided on this rank: it can be repeated in
        another group with what is held. After it only this rank's own mistakes can fail.
        """
        requests = requests or StepRequests()
        # Before the sum, because what it exchanges can be exchanged again: a group that fails here, or
        # between the two exchanges, has decided nothing on any rank.
        ownership, rows, idle_counters = self._confer(requests)
        # The last exchange. A rank comes out of it only with the contributions of all ranks, and can apply
        # the step alone; a rank that fails in it takes the step over from one that came out (state transfer).
        scalars, counters = self._decide(requests, ownership, idle_counters)
        if self._stops_at_nonfinite:
            # The loss is part of the sum: all ranks see the same bits, and none of them applies the step.
            misuse_guard.check_finite(scalars[_LOSS], self._step + 1)
        return self._apply(scalars, counters, rows)

    def _confer(self, requests: StepRequests) -> tuple[ShardOwnership | None, list[Rows], list[list[int]]]:
        """Exchange what the ranks have to know of each other before they sum; most steps need none of it.

        Repeatable: it changes nothing. Returns, with backups, whose shards count; the rows of sparse
        gradients by rank; the counters of ranks without a shard that counts, which have no partial sum for
        their counters to travel with. Once per group also the names of metrics are exchanged.
        """
        team, mine = self._team, dict[str, Any]()
        # Which keys `mine` has follows from what all ranks know alike: the view, the settings, the model, and
        # `_agreed`, which `rebind` resets on every member. So all ranks gather, or none does.
        if not self._agreed:
            # The samples too: a rank whose shards are empty has computed no metric, and follows the others.
            mine["metrics"] = [list(self._metrics.names), sum(one.applied for one in self._computed.values())]
        if team.backup:
            # Speculation: which ranks have computed a shard is known only now, and not from the view.
            mine["computed"] = sorted(self._computed)
        if self._sparse.used:
            # Here and not in the sum: rows of different ranks differ in number. They stay apart until
            # `_apply`, so a step that is repeated in another group finds the parameters untouched.
            mine["rows"] = self._sparse.rows(sorted(self._computed))
        # Counters travel in partial sums, and a rank without a shard that counts has none: without this its
        # request to stop or to pause, and its saved part of a checkpoint, would have no vote. With backups
        # any rank may turn out to be idle, so all send them; only those of idle ranks are added.
        apart = self._reducer is None or not self._reducer.idle_ranks_take_part
        if apart and team.world_size > 1 and (team.backup or not all(team.blocks)):
            own = pack_counters(requests, (), len(self.trained))
            mine["counters"] = [
                int(one) for one in (*own, *replica_agreement.counters(requests.sample, team.world_size))
            ]
        all_facts: list[dict[str, Any]] = [mine]
        if mine and team.world_size > 1:
            all_facts = team.context.all_gather(mine)
        ownership = None
        if team.backup:
            # A shard that several ranks have computed has the same bits on each: the first rank's counts, and
            # all ranks find the same one in the same lists. A shard that no rank has (it was claimed by a
            # member that is gone) fails the group here, before the sum could lack it.
            computed = [facts["computed"] for facts in all_facts]
            ownership = first_owners(computed, team.shards, self._step + 1)
        if not self._agreed:
            # Once per group: the names give the metrics their places in the summed scalars.
            self._agreed = self._metrics.agree([facts["metrics"] for facts in all_facts])
        idle: list[list[int]] = []
        if "counters" in mine:
            blocks = team.blocks if ownership is None else ownership.blocks
            idle = [facts["counters"] for facts, block in zip(all_facts, blocks, strict=True) if not block]
        rows = [facts["rows"] for facts in all_facts] if self._sparse.used else []
        return ownership, rows, idle

    def _decide(
        self, requests: StepRequests, ownership: ShardOwnership | None, idle_counters: list[list[int]]
    ) -> tuple[Tensor, list[int]]:
        """Run the exchange that decides the step; return the summed scalars and counters of all ranks."""
        world = self._team.world_size
        self.counted = tuple(
            sorted(self._computed) if ownership is None else ownership.blocks[self._team.rank]
        )
        computed = [self._computed[shard] for shard in self.counted]
        counters = pack_counters(requests, computed, len(self.trained))
        if self._reducer is None:
            # A step whose samples were all left out has no numbers.
            nothing = self._scalars[_LOSS]
            loss = nothing if self._loss is None else self._loss
            values = self._metrics.values or [nothing] * len(self._metrics.names)
            return torch.stack([loss, *values]), counters
        # In the same sum as the gradients, not in an exchange of their own: whether to stop, to pause or to
        # commit a checkpoint is decided with the step, on all ranks or on none.
        counters += replica_agreement.counters(requests.sample, world)
        flat = self._reducer.reduce(torch.tensor(counters, dtype=torch.float32), ownership)
        if world > 1:
            counters = [round(number) for number in flat.counters.tolist()]
        # Of ranks without a shard in the sum: every rank got them in `_confer`, and adds the same ones.
        for theirs in idle_counters:
            counters = [one + other for one, other in zip(counters, theirs, strict=True)]
        counters, samples = counters[:-_SAMPLE], counters[-_SAMPLE:]
        if not replica_agreement.are_equal(samples):
            # On every rank, because all have the same sums: none of them applies the step.
            raise replica_agreement.WeightsDifferError
        uses = dict(zip(self.trained, counters[STEP_COUNTERS:], strict=True))
        expose(self._parameters, flat, [uses[name] > 0 for name in self._names])
        return flat.scalars, counters

    def _apply(self, scalars: Tensor, counters: list[int], rows: list[Rows]) -> ReducedStep:
        """Make what was exchanged the model's. Nothing here waits for another rank."""
        self._sparse.apply(rows)
        applied, left_out, stops, written, failed, pauses, *marks = counters
        # Before the model changes: the last check that every sample is in the sum exactly once.
        misuse_guard.check_applied(self._step + 1, self._planned, applied, left_out)
        self._open = None
        watched = () if self._config.precision == "fp16" else self.trained.values()
        spoiled = self._skips_nonfinite and not sum_is_finite(scalars[_LOSS], watched)
        if spoiled and self._buffers.size:
            self._buffers.restore()
        elif self._buffers.size and self._reducer is not None and applied:
            movement = scalars[_FIRST_METRIC + MOST_METRICS : self._norms_start]
            self._buffers.move(movement, applied / self._planned)
        short = self._planned / applied if 0 < applied != self._planned else 1.0
        if short != 1.0:
            # Samples were skipped: what was weighted by the planned number is weighted by the real one.
            grads = [p.grad for p in self.trained.values() if p.grad is not None]
            torch._foreach_mul_(grads, short)
        names, still = self._metrics.names, self._unfreezing.frozen
        marked = zip(self.trained, marks, strict=True)
        return ReducedStep(
            # A copy: the next step writes over what was exchanged.
            scalars[: _FIRST_METRIC + len(names)] * short,
            names,
            applied,
            () if all(marks) else tuple(name for name, mark in marked if not mark and name not in still),
            stops,
            written,
            failed,
            pauses,
            scalars[self._norms_start :].clone() if self._noise else None,
            spoiled,
        )

    def updated(self) -> None:
        """Note that the update of this step is through, or that it was skipped: nothing undoes it. In both
        cases what its shards could not send follows from their own bytes, so a rank that was late comes to
        the same, without knowing what the others have seen."""
        self.residuals.decide()

    def undo(self) -> None:
        """Undo a decided step whose update failed because of another rank: the model is as before `open`.
        Another rank may have come through it: what this one's shards could not send stays (`settle`)."""
        if self._buffers.size:
            self._buffers.restore()
        self._forget()

    def abandon(self) -> None:
        """Give the step up: the model is as it was before `open`."""
        self._forget()
        if self._reducer is not None:
            self._reducer.start()

    def _forget(self) -> None:
        """Drop the held shards and restore the buffers. Residuals stay: whether the step was decided
        elsewhere shows only when the members have met (`settle`)."""
        if self._buffers.size and self._open is not None:
            self._buffers.restore()
        self._open, self._computed = None, {}
        clear_gradients(self.trained.values())

    def close(self) -> None:
        """Release the memory that gradients were exchanged in, and leave the module as it was given."""
        self._unfreezing.close()
        clear_gradients(self.trained.values())

    @property
    def residuals(self) -> Residuals:
        """The residuals of compression: part of the run's state."""
        return NO_RESIDUALS if self._reducer is None else self._reducer.residuals

    # the shard's numbers

    def _shard_scalars(self, shard: int) -> Tensor:
        scalars = self._scalars.zero_()
        if self._buffers.size:
            # A negative zero is no movement at all; see module_buffers.py.
            scalars[_FIRST_METRIC + MOST_METRICS : self._norms_start] = -0.0
        if self._shard_applied and self._loss is not None:
            scalars[_LOSS] = self._loss
            for position, value in enumerate(self._metrics.values):
                scalars[_FIRST_METRIC + position] = value
            if self._buffers.size:
                self._buffers.movement(
                    self._shard_applied / self._planned,
                    counters=shard == self._first_filled,
                    out=scalars[_FIRST_METRIC + MOST_METRICS : self._norms_start],
                )
            if self._noise:
                grads = [p.grad for p in self._parameters if p.grad is not None] + self._sparse.values(shard)
                square_norm = total_norm(grads).square().to(self._device) / self._scale**2
                scalars[self._norms_start + shard] = square_norm
        return scalars
