"""Creation of a group: its ranks meet in the store that torch hands over, and connect.

Each group has a prefix of its own in the store: its members, and how many times they have entered. What the
ranks exchange there is JSON; the key of their connections is made from what rank 0 draws and, where
PACELINE_SECRET_FILE is set, from the secret in that file, so that reading the store does not reveal it."""

from __future__ import annotations

import atexit
import os
import sys
import time
import weakref
from collections.abc import Sequence
from typing import Any

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from paceline.comm.call_status import signature_of
from paceline.comm.rendezvous.round import RendezvousRound
from paceline.comm.rendezvous.transport_setup import meet_in_store
from paceline.comm.torch_process_group import callback_order
from paceline.comm.torch_process_group.paceline_group import PacelineProcessGroup
from paceline.comm.torch_process_group.work import raise_for_torch
from paceline.core.errors import PacelineError
from paceline.core.freed_memory import keep_freed_memory

# With the process that is the rank: one that was forked from it has the groups too, and is not their rank.
_groups: weakref.WeakKeyDictionary[PacelineProcessGroup, int] = weakref.WeakKeyDictionary()


def create(options: Any) -> PacelineProcessGroup:
    """Make the group of this rank, when all of its ranks have come. `options` are torch's."""
    rank, size, name = options.group_rank, options.group_size, str(options.group_id)
    deadline = time.monotonic() + options.timeout.total_seconds()
    # In messages, ranks are called by their number in the whole job.
    labels = list(options.global_ranks_in_group) or range(size)
    store = _store_of_round(options.store, labels, rank)
    where = f"the store of group {name!r}"
    try:
        transport, links = meet_in_store(RendezvousRound(store, rank, size, deadline, where, labels=labels))
    except PacelineError as error:
        raise_for_torch(error)
    group = PacelineProcessGroup(transport, links, store, options.timeout, name)
    _groups[group] = os.getpid()
    callback_order.install()
    # A script that reduces gradients frees and allocates them in every step.
    keep_freed_memory()
    return group


def _store_of_round(store: Store, labels: Sequence[int], rank: int) -> Store:
    """Return the part of a store in which these ranks meet this time.

    torch gives a name again after its group was destroyed, also to other members; and a member may be a new
    process, or come from other groups. So the store counts how often each rank has entered a group of these
    members, which all of them have done equally often."""
    prefix = f"paceline/{len(labels)}/{signature_of(str(list(labels))):x}"
    return PrefixStore(f"{prefix}/{store.add(f'{prefix}/entered/{rank}', 1)}", store)


@atexit.register
def leave_groups() -> None:
    """Leave the groups that the script has not destroyed: a rank that ends in good order is not a lost one,
    and one that ends with an exception publishes it to the ranks that wait for it."""
    error = getattr(sys, "last_value", None)
    for group, process in list(_groups.items()):
        if process == os.getpid():
            group.leave(error)
