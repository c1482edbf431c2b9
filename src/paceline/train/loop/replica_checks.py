"""Check that the ranks of a run hold the same state, and that memory holds what the last update left there.

Three moments: a sample of the weights with every step (step/replica_agreement.py), everything that a
checkpoint is written from, and the weights at the end. A rank that trains alone compares its weights with
what its own last update left (`WeightWatch`). What follows from a difference is up to `ReplicaHooks`.
"""

from __future__ import annotations

from typing import NoReturn, final

from paceline.core.errors import GROUP_FAILURES, GroupInterruptedError
from paceline.train.loop.run_hooks import RunParts
from paceline.train.state.run_state import RunState
from paceline.train.step import replica_agreement


@final
class ReplicaChecks:
    def __init__(self, parts: RunParts, state: RunState) -> None:
        self._parts, self._state = parts, state

    def compare(self, kind: str, digest: str) -> None:
        """Compare `digest` with all ranks: it is equal after this step, or none of them continues."""
        parts, state = self._parts, self._state
        hooks, vote = parts.replica_hooks, f"{kind}:{digest}"
        if parts.team.world_size == 1:
            if hooks.watches_weights:
                self._check_memory(None)
        else:
            try:
                digests = parts.team.context.all_gather(digest)
            except GROUP_FAILURES:
                # The first rank that sees a difference has all others interrupted, also those that are still
                # in this exchange. Buffers are in no report: without this vote the odd one of two ranks could
                # not be named.
                hooks.comparison_interrupted(state, vote)
                raise
            if len(set(digests)) > 1:
                self.differ(kind, digest)
        state.agreed_step = state.position.step
        hooks.replicas_agree(state, vote)

    def sample(self) -> int | None:
        """Return the sample of the weights that the open step was computed with.

        Taken after the shards are computed, so that weights that changed meanwhile are seen too. None: no
        other rank compares it, and a device would have to be waited for. In a group the device is waited for
        anyway, to exchange the gradients.
        """
        state, alone = self._state, self._parts.team.world_size == 1
        if alone and not state.sample.at_hand:
            return None
        sample = state.sample.of(state.position.step)
        if alone and self._parts.replica_hooks.watches_weights:
            self._check_memory(sample)
        return sample

    def sample_agreed(self, sample: int) -> str:
        """Note that all ranks hold this sample, as the exchange of the step has shown; return it as text."""
        parts, state, text = self._parts, self._state, replica_agreement.to_hex(sample)
        self._note_contribution(text)
        if parts.team.world_size > 1:
            state.watch.agreed(state.position.step, sample)
        parts.replica_hooks.replicas_agree(state, f"sample:{text}")
        return text

    def sample_differs(self, sample: int) -> NoReturn:
        """Raise because the exchange of the step has shown that not all ranks hold the same sample."""
        text = replica_agreement.to_hex(sample)
        self._note_contribution(text)
        self.differ("sample", text)

    def differ(self, kind: str, digest: str) -> NoReturn:
        # What was summed in the open step has been overwritten, with the gradients of an odd rank in it.
        self._parts.transaction.abandon()
        self._parts.replica_hooks.replicas_differ(self._state, f"{kind}:{digest}")

    def updated(self) -> None:
        """Remember what the update has left: for this rank to compare with, and for the other ranks should
        this one be gone by then."""
        parts, state = self._parts, self._state
        state.watch.leave(state.position.step, alone=parts.team.world_size == 1)
        left = state.watch.left(state.position.step)
        if left is not None:
            parts.phases.leave(state.position.step, left)

    def _check_memory(self, sample: int | None) -> None:
        """Check, on a rank that trains alone, that its weights are those its last update left."""
        step = self._state.position.step
        if not self._state.watch.has_changed(step, sample):
            return
        self._parts.transaction.abandon()
        raise GroupInterruptedError(f"the weights of this worker changed in its memory after step {step}")

    def _note_contribution(self, text: str) -> None:
        transaction, step = self._parts.transaction, self._state.position.step + 1
        self._state.hashes.add(step, transaction.counted, text, transaction.contribution_hash)
