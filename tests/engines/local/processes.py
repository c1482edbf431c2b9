"""Waiting for what the operating system does in its own time, with a deadline and safe against reused ids."""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections.abc import Iterator, Sequence


@contextlib.contextmanager
def watch(pids: Sequence[int]) -> Iterator[list[int]]:
    """Descriptors that become readable when these processes end; those that have already are left out."""
    descriptors: list[int] = []
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            descriptors.append(os.pidfd_open(pid))
    try:
        yield descriptors
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def all_gone(descriptors: Sequence[int], seconds: float) -> bool:
    """Whether all watched processes ended within `seconds`."""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    left = len(descriptors)
    limit = time.monotonic() + seconds
    while left and (ended := poll.poll(max(0.0, limit - time.monotonic()) * 1000)):
        for descriptor, _ in ended:
            poll.unregister(descriptor)
        left -= len(ended)
    return left == 0
