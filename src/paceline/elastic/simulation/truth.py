"""What must be true of every run, and what was found not to be.

The state after a step stands for the weights: a number made from the state before and from the shards that
were summed, each with the state its gradient was computed from. A shard that is missing, doubled, or computed
from something else gives another number. Must not know the machine.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import final

GENESIS = 1
Part = tuple[int, int]
"""A shard, and the state that its gradient was computed from."""


@final
@dataclass
class Truth:
    """The one history that all members must share.

    chain     the right state after each step
    tainted   states that a corrupted member has had a part in: allowed until an audit finds it
    bad       members whose weights went wrong; `judged` are those of them that an audit found
    stays     nobody can find it any more: the corrupted member is gone, or was the only one
    """

    shards: int
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

    def summed(self, step: int, parts: list[Part], who: str) -> int:
        """What step `step` makes of these parts. Only the right parts make the right state."""
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
        """A member has applied a step."""
        if state != self.chain.get(step) and state not in self.tainted:
            self.violation(f"member {member} commits another content of step {step} than the others")

    def restores(self, step: int, state: int) -> None:
        """A view goes back to a checkpoint."""
        if state in self.tainted:
            if self.bad <= self.judged and not self.stays:
                self.violation(f"a view restores step {step} as a member left it that was found to be wrong")
            self.stays = True

    def cured(self, member: int) -> None:
        """A wrong member is gone or has taken over another state. Who had not noticed will not."""
        if member not in self.judged:
            self.stays = True

    def begins(self, member: int, step: int, state: int | None) -> None:
        """A member begins in a view with this state."""
        if state is None:
            self.violation(f"member {member} begins with no state")
        elif state != self.chain.get(step) and state not in self.tainted:
            self.violation(f"member {member} begins with a state of step {step} that was never committed")
