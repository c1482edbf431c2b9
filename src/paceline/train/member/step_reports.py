"""Hooks of a run that computes steps under a supervisor (loop/run_hooks.py): what it asks and reports.

Speculative execution (the backup policy): a rank that has computed its own shards waits a moment for those of
the others, then computes the last of the missing ones; a slow rank skips what another has computed. Two ranks
may compute the same shard: the bits are equal, and the step decides whose counts.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import NoReturn, final

from paceline.control.control_client import ControlClient
from paceline.control.member_shell_rules import running_mean
from paceline.control.messages import ShardComputed, StepReceipt
from paceline.core.clock import Clock, MonotonicClock
from paceline.core.errors import GroupInterruptedError
from paceline.core.events import StepCommitted
from paceline.train.member.fault_injection import FaultInjector
from paceline.train.member.machine_shell import MachineShell
from paceline.train.member.outbox import Outbox
from paceline.train.state.run_state import RunState
from paceline.train.team import Team

_PATIENCE = 0.5  # of the time for a shard, before a missing one is taken over
_LEAST_SECONDS = 0.005
_POLL_SECONDS = 0.05


@final
class ShardClaims:
    """The shards of the current step that some member has computed. A claim belongs to one attempt at a step,
    that of one generation: after another view its gradients are gone, or their member is."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock: Clock = clock or MonotonicClock()
        self._changed = threading.Condition()
        self._attempt = (0, 0)  # generation and step; a later view may go back to an earlier step
        self._done: set[int] = set()

    def add(self, generation: int, step: int, shard: int) -> None:
        """Note that a member has computed a shard; from any thread. The member may be ahead of this one, in
        the next view or step."""
        with self._changed:
            if (generation, step) > self._attempt:
                self._attempt, self._done = (generation, step), set()
            if (generation, step) == self._attempt:
                self._done.add(shard)
                self._changed.notify_all()

    def has(self, generation: int, step: int, shard: int) -> bool:
        with self._changed:
            return (generation, step) == self._attempt and shard in self._done

    def wait_for_spare(
        self, step: int, team: Team, shard_seconds: float, check: Callable[[], None]
    ) -> int | None:
        """Return a shard that this rank may compute instead of a slow one; None when all are computed.

        Each rank begins elsewhere in the list, so that idle ranks rarely choose the same shard.
        """
        until = self._clock.now() + max(_LEAST_SECONDS, _PATIENCE * shard_seconds)
        while True:
            check()
            with self._changed:
                done = self._done if (team.generation, step) == self._attempt else set()
                missing = [shard for shard in range(team.shards) if shard not in done]
                if not missing:
                    return None
                left = until - self._clock.now()
                if left > 0:
                    self._changed.wait(min(left, _POLL_SECONDS))
                    continue
            return missing[-1 - team.rank % len(missing)]


@final
class StepReports:
    """The StepHooks and ReplicaHooks of one worker: report its steps and votes to the supervisor."""

    def __init__(
        self,
        shell: MachineShell,
        client: ControlClient,
        outbox: Outbox,
        team: Team,
        injector: FaultInjector,
        clock: Clock | None = None,
    ) -> None:
        self._clock: Clock = clock or MonotonicClock()
        self._shell, self._client, self._outbox = shell, client, outbox
        self._team, self._injector = team, injector
        self.claims = ShardClaims(self._clock)
        self.shard_seconds = self.step_seconds = 0.0  # running means
        self._committed_at = self._clock.now()
        self.watches_weights = True

    def start_clock(self) -> None:
        """Count the time of the next step from now."""
        self._committed_at = self._clock.now()

    @property
    def wants_pause(self) -> bool:
        self._shell.tick()
        return self._shell.state.wants_pause

    def shards_to_compute(
        self, step: int, missing: Sequence[int], lasted: float | None = None
    ) -> Iterator[int]:
        team = self._team
        for shard in chain(missing, self._spares(step)) if team.backup else missing:
            self._shell.check()
            if team.backup and self.claims.has(team.generation, step, shard):
                continue
            started = self._clock.now()
            yield shard
            seconds = self._clock.now() - started if lasted is None else lasted
            self.shard_seconds = running_mean(self.shard_seconds, seconds + self._injector.slow(seconds))
            if team.backup:
                self.claims.add(team.generation, step, shard)
                self._client.send(ShardComputed(generation=team.generation, step=step, shard=shard))

    def _spares(self, step: int) -> Iterator[int]:
        """Yield shards to compute instead of slow ranks, until all are computed."""
        team, check = self._team, self._shell.check
        while (spare := self.claims.wait_for_spare(step, team, self.shard_seconds, check)) is not None:
            yield spare

    def committed(
        self, state: RunState, step: StepCommitted, shards: tuple[int, ...], hashes: Mapping[int, str]
    ) -> None:
        now = self._clock.now()
        self.step_seconds = running_mean(self.step_seconds, now - self._committed_at)
        self._committed_at = now
        self._outbox.committed(step, shards, hashes)
        if self._is_disputed(state):
            # Before the receipts: with their hashes the dispute may be decided.
            self._vote(state, f"report:{state.hash()}")
        if step.hash is not None:
            # A member that differs spoils every step that follows: the sooner it is found, the fewer steps
            # have to be computed again.
            self._outbox.send_receipts()

    def replicas_agree(self, state: RunState, digest: str) -> None:
        if self._is_disputed(state):
            self._vote(state, digest)

    def replicas_differ(self, state: RunState, digest: str) -> NoReturn:
        self._vote(state, digest, state.agreed_step)
        step = state.position.step
        raise GroupInterruptedError(f"the weights after step {step} are not the same on all members")

    def comparison_interrupted(self, state: RunState, digest: str) -> None:
        self._vote(state, digest)

    def _is_disputed(self, state: RunState) -> bool:
        """Return whether a step is computed again because members differed after it without a majority."""
        view = self._shell.state.view
        return view is not None and view.disputed == state.position.step

    def _vote(self, state: RunState, digest: str, agreed: int = -1) -> None:
        receipt = StepReceipt(
            generation=self._team.generation,
            first=1,
            last=0,
            shards=(),
            hashes={str(state.position.step): digest},
            agreed=agreed,
            trail=state.hashes.recent,
        )
        self._client.send(receipt)
