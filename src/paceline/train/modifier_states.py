"""Modifiers do the same on every rank: what shows that one did not.

States are compared as short digests. Must not know when in a run that is done.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import xxhash

from paceline.comm.context import DistributedContext
from paceline.core.errors import UsageError
from paceline.train.callbacks import Callbacks


def digests(callbacks: Callbacks) -> dict[str, str]:
    """The modifiers' states, each as a short digest."""
    states = callbacks.state_dict() if callbacks.modifiers else {}
    return {name: _digest(state) for name, state in states.items()}


def check_batch_changers(before: Mapping[str, str], callbacks: Callbacks) -> None:
    """After the first step of a rank: change_batch must not have changed any state."""
    changed = _different(before, digests(callbacks))
    if changed:
        raise UsageError(
            f"the state of the modifier {', '.join(changed)} changed in change_batch: that is called for "
            "the micro-batches of one worker, so the state would depend on how many workers there are",
            remedy="change state in change_gradients or stop, which are called once a step on every "
            "worker; randomness needs no state, it is seeded for every shard",
        )


def compare(context: DistributedContext, callbacks: Callbacks, step: int) -> None:
    """Where all ranks meet anyway: modifiers that did not do the same on each are found out."""
    if context.world_size == 1:
        return
    told = context.all_gather(digests(callbacks))
    for rank, theirs in enumerate(told):
        odd = _different(told[0], theirs)
        if odd:
            raise UsageError(
                f"the modifier {', '.join(odd)} has another state on rank {rank} than on rank 0 after "
                f"step {step}",
                remedy="a modifier must do the same on every rank: use nothing that depends on the rank, "
                "on time or on this rank's samples",
            )


def _digest(state: Any) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(state, sort_keys=True, default=repr).encode())


def _different(one: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    return sorted(name.partition(":")[2] for name in {**one, **other} if one.get(name) != other.get(name))
