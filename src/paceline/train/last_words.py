"""The end of a worker whose supervisor stayed away: what nobody heard is left in the run's folder.

Must not know who reads it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from paceline.core import events
from paceline.core.control import unheard
from paceline.core.control.messages import Message, Receipt, Told
from paceline.core.errors import PacelineError

if TYPE_CHECKING:
    from paceline.train.assembly import Assembled
    from paceline.train.membership import Membership

_log = logging.getLogger(__name__)


def leave(membership: Membership, assembled: Assembled) -> None:
    """Nothing more is sent after this. Without a folder that this machine sees, what was not heard is lost:
    the steps are others' to tell, and the audit counts this worker's shards as confirmed by commit."""
    link = membership.link
    if link is None:
        return
    # First: else a supervisor that comes back now might hear half of it.
    link.close()
    if membership.is_first_alive:
        # Whoever was to tell these steps may be gone, and its words with it.
        for event in assembled.recorder.events_after(0):
            membership.tell(event)
    membership.tell_rest()
    seat = membership.seat
    if seat.folder is None:
        return
    try:
        unheard.write(seat.folder, seat.secret, seat.member, seat.slot, _worth_keeping(link.undelivered()))
    except PacelineError as error:
        # It is saved, which counts more.
        _log.error("what the supervisor was not told is lost: %s", error)


def _worth_keeping(said: Sequence[Message]) -> Iterator[Message]:
    for message in said:
        if isinstance(message, Told):
            # The workers' end, not the run's: that goes on from what they saved.
            lines = tuple(line for line in message.lines if json.loads(line)["type"] != events.RunEnded.type)
            if lines:
                yield replace(message, lines=lines)
        elif isinstance(message, Receipt):
            yield message
