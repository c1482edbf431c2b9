"""What the journal says when a run begins or goes on: who trains, from where, and what it lacked so far.

A checkpoint holds the last steps' records: where all were killed before the journal had them, they are
written when the run goes on from it. Must not know how state is put back.
"""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

from paceline.core import events, journal
from paceline.data.plan import Position
from paceline.train.config import TrainConfig, definition
from paceline.train.recorder import Recorder
from paceline.train.team import Team


def note_workers(recorder: Recorder, team: Team) -> None:
    """All ranks together, where nobody looks after them."""
    for rank, (pid, host) in enumerate(team.context.all_gather([os.getpid(), socket.gethostname()])):
        recorder.note(events.WorkerStarted(time=time.time(), rank=rank, pid=pid, host=host))


def note_resumed(
    recorder: Recorder,
    team: Team,
    version: int,
    position: Position,
    file: Path | None,
    *,
    disowned: bool = False,
) -> None:
    """The run goes on from a version, whose state the recorder has. `file`: the journal, where this process
    writes it; a supervisor leaves out by itself what its journal has."""
    recalled = recorder.recall()
    if file is not None and team.is_master:
        # Written as they happened: only the end may be missing.
        known = journaled(file)
        recalled = [
            event for event in recalled if event.step > known and event.type != events.RunResumed.type
        ]
    for event in recalled:
        if team.is_master:
            recorder.note_here(event)
    recorder.note(
        events.RunResumed(
            time=time.time(),
            version=version,
            step=position.step,
            epoch=position.epoch,
            workers=team.world_size,
            disowned=disowned,
        )
    )


def note_started(
    recorder: Recorder,
    team: Team,
    config: TrainConfig,
    samples: int | None,
    fingerprint: dict[str, str],
    *,
    disowned: bool = False,
) -> None:
    """The run begins."""
    recorder.note(
        events.RunStarted(
            time=time.time(),
            workers=team.world_size,
            shards=team.shards,
            samples=samples,
            definition=definition(config),
            fingerprint=fingerprint,
            disowned=disowned,
        )
    )


def journaled(file: Path) -> int:
    """The last step that the journal has, of those that count."""
    last = 0
    for event in journal.last_events(file):
        if isinstance(event, events.StepCommitted | events.RunResumed):
            last = event.step
        elif isinstance(event, events.RunStarted):
            last = 0
    return last
