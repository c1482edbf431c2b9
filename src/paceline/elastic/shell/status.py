"""What `paceline status` shows of a job. Must not change anything."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from paceline.core.control.messages import Answer

if TYPE_CHECKING:
    from paceline.elastic.supervisor import Supervisor


def status_of(supervisor: Supervisor) -> Answer:
    """Where the job is and what each worker does."""
    state, now = supervisor.state, time.monotonic()
    view = supervisor.views.latest
    dealt = dict(zip(view.members, view.shards, strict=True)) if view is not None else {}
    workers = [
        {
            "rank": seat.slot,
            "member": seat.member,
            "pid": seat.pid,
            "host": seat.hostname,
            "place": seat.place,
            "phase": seat.phase,
            "step": seat.progress[0] if seat.progress is not None else 0,
            "shards": list(dealt.get(seat.member, ())),
            "heard": round(now - seat.beat_at, 2) if seat.beat_at else None,
            "shard_seconds": seat.beat.shard_seconds if seat.beat is not None else 0.0,
            "rss": seat.beat.rss if seat.beat is not None else 0,
        }
        for seat in sorted(supervisor.staff.seats.values(), key=lambda seat: (seat.slot, seat.member))
    ]
    facts = {
        "phase": state.phase.value,
        "generation": state.generation,
        "step": supervisor.chronicle.journaled,
        "attempt": supervisor.spec.attempt,
        "refused": supervisor.gate.refused,
        "dropped": supervisor.dropped,
        "workers": workers,
    }
    return Answer(done=True, text=f"{state.phase.value}, step {supervisor.chronicle.journaled}", facts=facts)
