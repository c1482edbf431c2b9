"""What a supervisor begins with whose predecessor's memory is gone: what the journal and the caller know.

The workers of this machine train on, and the caller kept what belongs to them. The journal says which rank
each process is and which generations had views. Generations and member numbers mean one view and one worker
each, for ever, and the predecessor may have used some that it did not write down: so this one begins with
numbers that it cannot have come to. All members regroup once, and no step is lost. What is not known begins
anew: budgets, weights, workers of other machines (their agents offer them again). Must not know what follows.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from paceline.core import journal
from paceline.core.events import SupervisorStarted, ViewChanged, WorkerStarted
from paceline.elastic.model import HOME, Began
from paceline.engines.local.worker import Worker

UNUSED: Final = 1000
"""More generations and members than a supervisor can use while it cannot write."""


def from_journal(path: Path, kept: Mapping[int, tuple[int, tuple[int, ...]]]) -> Began | None:
    """`kept` are pid and descriptors of workers, by member; None: nothing had happened yet."""
    generation, rank_of = _known(path)
    if not kept and not generation and not rank_of:
        return None
    members = {member: (rank_of[pid], HOME) for member, (pid, _) in kept.items() if pid in rank_of}
    return Began(
        generation=generation + UNUSED,
        members=members,
        next_member=max([0, *kept]) + UNUSED,
        committed=generation > 0,
    )


def end_unknown(kept: dict[int, tuple[int, tuple[int, ...]]], members: Mapping[int, object]) -> None:
    """Workers of which nobody knows which rank they are to be: others are started in their place."""
    for member in kept.keys() - members.keys():
        worker = Worker.adopt(*kept.pop(member))
        worker.take()
        worker.kill()
        worker.close()


def _known(path: Path) -> tuple[int, dict[int, int]]:
    """The highest generation of this session in the journal, and the rank of each process."""
    generation, rank_of = 0, dict[int, int]()
    if not path.exists():
        return generation, rank_of
    for event in journal.iterate(path):
        if isinstance(event, SupervisorStarted) and event.attempt == 1:
            generation, rank_of = 0, {}
        elif isinstance(event, WorkerStarted):
            rank_of[event.pid] = event.rank
        elif isinstance(event, ViewChanged):
            generation = max(generation, event.generation)
            rank_of.update(zip(event.pids, event.members, strict=False))
    return generation, rank_of
