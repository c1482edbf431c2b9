"""Creation of a group: its ranks meet in the store that torch hands over, and connect.

Each group has a prefix of its own in the store. What the ranks exchange there is JSON; the key of their
connections is made from what rank 0 draws and, where PACELINE_SECRET_FILE is set, from the secret in that
file, so that reading the store does not reveal it."""

from __future__ import annotations

import atexit
import itertools
import sys
import time
import weakref
from collections import defaultdict
from typing import Any

from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from paceline.comm.rendezvous.round import RendezvousRound
from paceline.comm.rendezvous.transport_setup import meet_in_store
from paceline.comm.torch_process_group.paceline_group import PacelineProcessGroup
from paceline.comm.torch_process_group.work import torch_error
from paceline.core.errors import PacelineError

# A group of one name may be made again in the same store, after it was destroyed.
_rounds: defaultdict[str, itertools.count[int]] = defaultdict(itertools.count)
_groups: weakref.WeakSet[PacelineProcessGroup] = weakref.WeakSet()


def create(options: Any) -> PacelineProcessGroup:
    """Make the group of this rank, when all of its ranks have come. `options` are torch's."""
    rank, size, name = options.group_rank, options.group_size, str(options.group_id)
    store = PrefixStore(f"paceline/{next(_rounds[name])}", options.store)
    deadline = time.monotonic() + options.timeout.total_seconds()
    # In messages, ranks are called by their number in the whole job.
    labels = list(options.global_ranks_in_group) or range(size)
    where = f"the store of group {name!r}"
    try:
        transport, links = meet_in_store(RendezvousRound(store, rank, size, deadline, where, labels=labels))
    except PacelineError as error:
        raise torch_error(error) from error
    group = PacelineProcessGroup(transport, links, options.store, options.timeout, name)
    _groups.add(group)
    return group


@atexit.register
def _leave_all() -> None:
    """Leave the groups that the script has not destroyed: a rank that ends in good order is not a lost one,
    and one that ends with an exception publishes it to the ranks that wait for it."""
    error = getattr(sys, "last_value", None)
    for group in list(_groups):
        group.leave(error)
