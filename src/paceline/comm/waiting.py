"""Whom a rank waits for right now, as another thread of it sees it: for heartbeats and verdicts.

A wait says so where its peers can read it once it lasts longer than a moment (transport/watch.py). Must not
know what is waited for.
"""

from __future__ import annotations

from paceline.comm.context import DistributedContext
from paceline.comm.transport.hybrid import HybridTransport
from paceline.comm.transport.mesh import Mesh
from paceline.comm.transport.shm.board import Board
from paceline.comm.transport.shm.transport import ShmTransport
from paceline.comm.transport.torchdist import TorchTransport
from paceline.core.errors import PacelineError


def waiting_for(context: DistributedContext) -> tuple[int, ...]:
    """The ranks that this one waits for; none while it does not wait, or has only just begun to."""
    transport = context.transport
    outlook: Board | Mesh
    if isinstance(transport, ShmTransport):
        outlook = transport.outlook
    elif isinstance(transport, HybridTransport | TorchTransport):
        outlook = transport.mesh
    else:
        return ()
    try:
        # What it has posted itself: to look at all the others costs more, and asks them where they are.
        status = outlook.posted()
    except PacelineError:
        return ()  # the group is over
    return () if status is None else status.waits_for
