"""The invariants of a simulated run, their violations, and the checkpoints.

The state after a step stands for the weights: a number made from the state before and from the shards that
were summed, each with the state its gradient was computed from. A shard that is missing, doubled, or computed
from something else gives another number.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import final

from paceline.control.messages import View

GENESIS = 1
Part = tuple[int, int]
"""A shard, and the state that its gradient was computed from."""


@final
@dataclass
class RunInvariants:
    """The one history that all members must share.

    chain     the right state after each step
    tainted   states that a corrupted member has had a part in: allowed until an audit finds it
    bad       members whose weights went wrong; `judged` are those of them that an audit found
    stays     no audit can find it: the corrupted member is gone, or was the only one
    halt      ends the simulation at the first violation
    """

    shards: int
    halt: Callable[[], None]
    violations: list[str] = field(default_factory=list)
    chain: dict[int, int] = field(default_factory=lambda: {0: GENESIS})
    tainted: set[int] = field(default_factory=set)
    corrupted: bool = False
    bad: set[int] = field(default_factory=set)
    judged: set[int] = field(default_factory=set)
    stays: bool = False
    steps: int = 0

    def violation(self, what: str) -> None:
        if len(self.violations) < 20:
            self.violations.append(what)
        self.halt()

    def summed(self, step: int, parts: list[Part], who: str) -> int:
        """Return the state that a step makes of these parts. Only the right parts make the right state."""
        before = self.chain.get(step - 1)
        right = [(shard, before) for shard in range(self.shards)]
        if sorted(parts) == right and before is not None:
            state = hash((before, step))
            self.chain.setdefault(step, state)
            self.steps = max(self.steps, step)
            return state
        state = hash((step, *sorted(parts)))
        if self.corrupted and self._only_tainted(parts, before):
            self.tainted.add(state)
            return state
        shards = sorted(shard for shard, _ in parts)
        if shards != list(range(self.shards)):
            self.violation(f"step {step} in {who} sums shards {shards} of {self.shards}")
        else:
            self.violation(f"step {step} in {who} sums gradients of different states")
        return state

    def _only_tainted(self, parts: list[Part], before: int | None) -> bool:
        shards = sorted(shard for shard, _ in parts)
        return shards == list(range(self.shards)) and all(
            state == before or state in self.tainted for _, state in parts
        )

    def committed(self, member: int, step: int, state: int) -> None:
        """Check a step that a member has applied."""
        if state != self.chain.get(step) and state not in self.tainted:
            self.violation(f"member {member} commits another content of step {step} than the others")

    def restores(self, step: int, state: int) -> None:
        """Check the checkpoint that a view goes back to."""
        if state in self.tainted:
            if self.bad <= self.judged and not self.stays:
                self.violation(f"a view restores step {step} as a member left it that was found to be wrong")
            self.stays = True

    def cured(self, member: int) -> None:
        """Note that a wrong member is gone or has received another state: no audit can find it now."""
        if member not in self.judged:
            self.stays = True

    def begins(self, member: int, step: int, state: int | None) -> None:
        """Check the state with which a member begins in a view."""
        if state is None:
            self.violation(f"member {member} begins with no state")
        elif state != self.chain.get(step) and state not in self.tainted:
            self.violation(f"member {member} begins with a state of step {step} that was never committed")


@final
@dataclass
class SimulatedStorage:
    """The checkpoints: the states that members save by step, and what the view of a generation restores."""

    invariants: RunInvariants
    versions: dict[int, int] = field(default_factory=dict)
    _restored: dict[int, tuple[int, int]] = field(default_factory=dict)

    def save(self, step: int, state: int) -> None:
        self.versions[step] = state

    def restore(self, view: View) -> tuple[int, int]:
        """Return the step and the state that a view restores: the same for all of its members."""
        if view.generation not in self._restored:
            if view.restore_before >= 0:
                # Members that restore an earlier state remove the later ones: they are wrong.
                kept = {step: state for step, state in self.versions.items() if step <= view.restore_before}
                self.versions = kept
            step = max(self.versions, default=0)
            state = self.versions.get(step, GENESIS)
            self._restored[view.generation] = (step, state)
            self.invariants.restores(step, state)
        return self._restored[view.generation]
