"""A step whose shards are computed together, for models with `nn.SyncBatchNorm`.

Elsewhere a step is made of shards that know nothing of each other. Here the forward passes of all shards, on
all ranks, meet at every such layer, and one backward pass goes through all shards of a rank:

    forward     each shard of this rank up to its next layer; then the ranks gather the statistics of all
                shards, and all continue; at last they gather that all passes have ended
    backward    at each layer the ranks gather what the gradients of all shards sum up to
    take        shard by shard, the gradients become the parameters': from here on the step is as any other

What is gathered is one small row for each shard, combined in the order of the shards on every rank. All of it
comes before the step's point of decision and changes nothing that stays: a rank that is lost in the middle
leaves the model as it was. No shard of such a step can be computed alone, so that a repair computes all of
them again.

A rank without samples takes part in what is gathered, without a row. Ranks whose passes do not call the same
layers in the same order find that in what they gather, and all refuse it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn, final

import torch
from torch import Tensor, nn

from paceline.core.clock import Clock, MonotonicClock
from paceline.core.errors import InternalError, UsageError
from paceline.core.wording import listed
from paceline.data.seeding import set_aside
from paceline.train.objective import ObjectiveResult
from paceline.train.phases import BACKWARD, COLLECTIVE, Phases
from paceline.train.step import sync_batch_norm
from paceline.train.step.gradient_memory import clear_gradients
from paceline.train.step.shard_turns import ModelSlots, ShardModel, ShardTurn, align
from paceline.train.step.sync_batch_norm import GlobalStatistics, JointNorm, NormCall
from paceline.train.step.transaction import StepTransaction
from paceline.train.team import Team

_IDLE, _NORM, _ENDED, _GRADIENT = "idle", "norm", "ended", "gradient"
_FOREIGN = "of another model"  # a layer that is no part of the model, a copy say


@final
@dataclass(frozen=True)
class ShardWork:
    """A shard to compute: its samples, and the forward pass and loss of them."""

    shard: int
    count: int
    score: Callable[[], ObjectiveResult]


@final
@dataclass(frozen=True)
class _Passed:
    """A shard that is computed."""

    scored: ObjectiveResult
    gradients: list[Tensor | None]
    buffers: list[Tensor | None]


@final
class Lockstep:
    """Computes the shards of this rank together with those of all others; the model's layers of SyncBatchNorm
    wait for each other until `close`."""

    def __init__(
        self,
        team: Team,
        module: nn.Module,
        transaction: StepTransaction,
        device: torch.device,
        seed: int,
        phases: Phases,
        clock: Clock | None = None,
    ) -> None:
        self._team, self._transaction, self._device = team, transaction, device
        self._seed, self._phases = seed, phases
        self._clock: Clock = clock or MonotonicClock()
        layers = sync_batch_norm.synced_layers(module)
        self._layers = list(layers.values())
        self._names = {id(layer): name or "only layer" for name, layer in layers.items()}
        self._slots = ModelSlots(module)
        self._step = 0
        self._passed: dict[int, _Passed] = {}
        self._needed: list[bool] = []  # of the calls so far: whether a shard of some rank needs a gradient
        self._order: Tensor | None = None
        self._waited = 0.0
        self.shard_seconds = 0.0  # of this rank in the last step, without the time in which it waited
        self._closing = ExitStack()
        self._closing.enter_context(sync_batch_norm.over_all_shards(self._layers))

    def close(self) -> None:
        self._closing.close()

    def compute(self, epoch: int, step: int, work: Sequence[ShardWork]) -> None:
        """Compute these shards, in their order; `take` has the results. All ranks call it, also without
        shards."""
        self._step, self._passed, self._needed, self._waited = step, {}, [], 0.0
        self._order = torch.zeros((), device=self._device, requires_grad=True)
        started = self._clock.now()
        clear_gradients(self._transaction.trained.values())  # of the step before
        with set_aside(), sync_batch_norm.in_step(self._layers), self._slots.lent(), ExitStack() as stack:
            stack.callback(self._forget_graph)
            models = [ShardModel(self._slots, self._seed, epoch, step, one.shard) for one in work]
            turns = [
                ShardTurn(one.shard, partial(self._pass, one), model, self._device)
                for one, model in zip(work, models, strict=True)
            ]
            for turn in turns:
                stack.callback(turn.stop)
            if turns:
                self._forward(turns)
            else:
                self._follow()
            self._backward(turns)
            if self._slots.current is not None:
                self._slots.current.leave()
            parameters = list(self._transaction.trained.values())
            for turn in turns:
                gradients = turn.model.gradients(parameters)
                self._passed[turn.shard] = _Passed(_detached(turn.result[0]), gradients, turn.model.buffers)
        self.shard_seconds = (self._clock.now() - started - self._waited) / max(1, len(work))

    def _forget_graph(self) -> None:
        """Let go of the step's graph, and so of its activations."""
        self._order = None

    @torch.no_grad()
    def take(self, shard: int) -> ObjectiveResult:
        """Make a computed shard's gradients and buffers the model's; return what its pass gave."""
        passed = self._passed.pop(shard)
        for parameter, gradient in zip(self._transaction.trained.values(), passed.gradients, strict=True):
            parameter.grad = gradient
        for (owner, key), buffer in zip(self._slots.buffers, passed.buffers, strict=True):
            now = owner[key]
            if now is None or buffer is None or now.shape != buffer.shape:
                owner[key] = buffer  # what changes its size is refused where buffers are averaged
            else:
                now.copy_(buffer)
        return passed.scored

    def _pass(self, work: ShardWork) -> tuple[ObjectiveResult, Tensor]:
        """Compute a shard's loss, on its thread: also what it is multiplied by has to be counted there."""
        scored = work.score()
        return scored, self._transaction.weighted(scored.loss, work.count)

    # forward

    def _forward(self, turns: Sequence[ShardTurn]) -> None:
        answers: list[Callable[[], Any] | None] = [None] * len(turns)
        while True:
            for turn, answer in zip(turns, answers, strict=True):
                turn.resume(answer)
            heads = [self._head(turn) for turn in turns]
            if len(set(map(str, heads))) > 1:
                self._refuse([[*head, [[turn.shard, 0]]] for head, turn in zip(heads, turns, strict=True)])
            if turns[0].has_ended:
                self._gather([*heads[0], [[turn.shard, 0] for turn in turns]])
                return
            answers = self._normalise(turns, heads[0])

    def _head(self, turn: ShardTurn) -> list[Any]:
        """Return what has to be equal on all shards when they meet."""
        if turn.has_ended:
            return [_ENDED, "", 0]
        call: NormCall = turn.call
        return [_NORM, self._names.get(id(call.layer), _FOREIGN), call.x.shape[1]]

    def _normalise(self, turns: Sequence[ShardTurn], head: list[Any]) -> list[Callable[[], Any] | None]:
        """Gather the statistics of a call; return what gives each shard its normalised input."""
        calls: list[NormCall] = [turn.call for turn in turns]
        rows = torch.stack([sync_batch_norm.shard_row(call.x) for call in calls]).double().cpu()
        counts = [[turn.shard, turn.call.x.numel() // head[2]] for turn in turns]
        needed = any(call.needs_gradient for call in calls)
        gathered = self._gather([*head, counts, rows, needed])
        by_shard = _by_shard(gathered)
        found = sync_batch_norm.combined(
            [count for _, count, _ in by_shard], [torch.as_tensor(row) for _, _, row in by_shard]
        )
        if found.count < 2:
            raise UsageError(
                f"step {self._step + 1}: the SyncBatchNorm {head[1]!r} got one value per channel from the "
                "global batch, which has no variance",
                remedy="use drop_last=True or another global_batch, so that no step holds a single sample",
            )
        needed = any(one[5] for one in gathered)
        self._needed.append(needed)
        made: list[Tensor] = []
        after = max(turn.nodes for turn in turns)

        def join() -> tuple[Tensor, GlobalStatistics]:
            """Make the node of all shards, on the thread of the first, which is resumed before the others."""
            nonlocal after
            align(after)
            given = [getattr(call, name) for name in ("x", "weight", "bias") for call in calls]
            # Weakly: no collector sees through autograd, and an error may keep both the graph and this rank.
            total = partial(_sum_gradients, weakref.ref(self), head[1], [turn.shard for turn in turns])
            with torch.set_grad_enabled(needed), torch.autocast(self._device.type, enabled=False):
                order, *outputs = JointNorm.apply(  # type: ignore[no-untyped-call]
                    self._order, found, total, calls[0].layer.eps, *given
                )
            self._order = order if needed else self._order
            made.extend(outputs)
            after = align(after)
            return made[0], found

        def follow(place: int) -> tuple[Tensor, GlobalStatistics]:
            align(after)
            return made[place], found

        return [join, *(partial(follow, place) for place in range(1, len(turns)))]

    def _follow(self) -> None:
        """Take part in the forward passes of the others, where this rank has no samples."""
        while True:
            gathered = self._gather([_IDLE])
            if not gathered or gathered[0][0] == _ENDED:
                return
            self._needed.append(any(one[5] for one in gathered))

    # backward

    def _backward(self, turns: Sequence[ShardTurn]) -> None:
        self._phases.enter(BACKWARD)
        if not turns:
            for _ in range(sum(self._needed)):
                self._gather([_IDLE])
            return
        self._check_leaves(turns)
        losses = [turn.result[1] for turn in turns]
        assert self._order is not None
        if any(self._needed):
            torch.autograd.backward(
                [*losses, self._order], [None] * len(losses) + [torch.zeros_like(self._order)]
            )
        else:
            torch.autograd.backward(losses)
        astray = [name for name, one in self._transaction.trained.items() if one.grad is not None]
        if astray:
            raise UsageError(
                f"step {self._step + 1}: the gradient of {', '.join(astray[:3])} did not reach the shard "
                "that it belongs to: the model keeps the parameter in a second place (a list, a closure)",
                remedy="read parameters from the module that holds them, in forward",
            )

    def _check_leaves(self, turns: Sequence[ShardTurn]) -> None:
        for turn in turns:
            if any(leaf.grad is not None for leaf in turn.model.leaves.values()):
                raise UsageError(
                    f"step {self._step + 1}: shard {turn.shard} has gradients before the run's own backward",
                    remedy="delete loss.backward() from the objective; for gradients of your own use "
                    "torch.autograd.grad, on a part of the model without SyncBatchNorm",
                )

    def sum_gradients(self, name: str, shards: Sequence[int], rows: Tensor) -> Tensor:
        """Sum what the backward pass has at a layer over the shards of all ranks."""
        if self._phases.name != BACKWARD:
            raise UsageError(
                f"step {self._step + 1}: a gradient through the SyncBatchNorm {name!r} was asked for in a "
                "forward pass, where the gradients of the other shards are not there yet",
                remedy="use torch.autograd.grad on a part of the model without SyncBatchNorm (the critic of "
                "a gradient penalty, say), or GroupNorm in it",
            )
        gathered = self._gather(
            [_GRADIENT, name, rows.shape[1], [[one, 0] for one in shards], rows.double().cpu()]
        )
        return sync_batch_norm.in_order([torch.as_tensor(row) for _, _, row in _by_shard(gathered)])

    # what the ranks tell each other

    def _gather(self, mine: list[Any]) -> list[Any]:
        """Return what the ranks with samples send: kind, layer and channels, shards, rows. All ranks are at
        the same layer, or all refuse."""
        gathered = [mine]
        if self._team.world_size > 1:
            phase, started = self._phases.name, self._clock.now()
            self._phases.enter(COLLECTIVE)
            gathered = self._team.context.all_gather(mine)
            self._phases.enter(phase)
            self._waited += self._clock.now() - started
        taking_part = [one for one in gathered if one[0] != _IDLE]
        if len({str(one[:3]) for one in taking_part}) > 1:
            self._refuse(taking_part)
        return taking_part

    def _refuse(self, found: Sequence[Sequence[Any]]) -> NoReturn:
        where: dict[str, list[int]] = {}
        for kind, name, channels, shards, *_ in found:
            text = (
                f"at {name!r} with {channels} channels"
                if kind != _ENDED
                else "at the end of the forward pass"
            )
            where.setdefault(text, []).extend(shard for shard, _ in shards)
        places = "; ".join(
            f"{'shard' if len(shards) == 1 else 'shards'} {listed(sorted(shards))} {text}"
            for text, shards in where.items()
        )
        raise UsageError(
            f"step {self._step + 1}: the shards do not call the same layers of SyncBatchNorm in the same "
            f"order: {places}",
            remedy="call these layers in every forward pass, whatever the samples are; or use BatchNorm or "
            "GroupNorm where a pass depends on its samples",
        )


def _sum_gradients(step: weakref.ref[Lockstep], name: str, shards: Sequence[int], rows: Tensor) -> Tensor:
    computing = step()
    if computing is None:
        raise InternalError("a step that is over was asked for gradients")
    return computing.sum_gradients(name, shards, rows)


def _detached(scored: ObjectiveResult) -> ObjectiveResult:
    """Return the numbers alone: the graph behind them is used up."""
    metrics = {
        name: value.detach() if isinstance(value, Tensor) else value for name, value in scored.metrics.items()
    }
    return ObjectiveResult(scored.loss.detach(), metrics)


def _by_shard(gathered: Sequence[Sequence[Any]]) -> list[tuple[int, int, Any]]:
    """Return shard, count and row of all ranks, in the order of the shards."""
    return sorted(
        ((shard, count, row) for one in gathered for (shard, count), row in zip(one[3], one[4], strict=True)),
        key=lambda found: found[0],
    )
