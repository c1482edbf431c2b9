"""Recovery of a supervisor that takes over: from the snapshot of its predecessor, else from the journal.

The snapshot is a small file in the run's folder, replaced whole. Where it is lost, the workers of this
machine train on all the same, and the parent kept their sockets. The journal tells which rank each process is
and which generations had views. What is not known begins anew: budgets, weights, workers of other hosts
(their agents offer them again).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final, final

from paceline.core import journal, type_conversion
from paceline.core.atomic_file import replace_file
from paceline.core.errors import PacelineError, PlatformError
from paceline.core.events import SupervisorStarted, ViewChanged, WorkerStarted
from paceline.core.wording import counted
from paceline.elastic.machine.machine_events import SupervisorBegan
from paceline.elastic.machine.settings import LOCAL_AGENT
from paceline.elastic.supervisor.parent_messages import KeptWorkers
from paceline.engines.local.worker_handle import WorkerProcess

STATE_FILE: Final = "supervisor.json"


@dataclass(frozen=True)
class SupervisorSnapshot:
    """Snapshot for the next supervisor.

    began        the machine's state
    fingerprint, model   of the first member; in exact mode all others must match them
    processes    pid and host name of each worker, by member
    injected     faults that were injected on demand, see member_handler.py
    """

    began: SupervisorBegan = field(default_factory=SupervisorBegan)
    port: int = 0
    fingerprint: dict[str, str] | None = None
    model: str = ""
    processes: dict[int, tuple[int, str]] = field(default_factory=dict)
    injected: tuple[tuple[int, int, int, int], ...] = ()


@final
class SnapshotFile:
    """The file. `trouble` is why nothing could be loaded."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / STATE_FILE
        self._written: SupervisorSnapshot | None = None
        self.trouble = ""

    def load(self) -> SupervisorSnapshot | None:
        """Read the snapshot of the supervisor before this one."""
        try:
            plain = json.loads(self._path.read_text())
            snapshot = type_conversion.convert(plain, SupervisorSnapshot, STATE_FILE)
        except FileNotFoundError:
            self.trouble = f"{self._path} is missing"
            return None
        except OSError as error:
            self.trouble = f"{self._path} cannot be read: {error.strerror}"
            return None
        except (ValueError, type_conversion.ConversionError) as error:
            self.trouble = f"{self._path} is damaged: {error}"
            return None
        assert isinstance(snapshot, SupervisorSnapshot)
        return snapshot

    def save(self, snapshot: SupervisorSnapshot) -> None:
        """Write the snapshot if it has changed."""
        if snapshot == self._written:
            return
        # Disk full: training continues; a supervisor that took over now would know a little less.
        with suppress(PlatformError):
            replace_file(self._path, json.dumps(asdict(snapshot)).encode())
            self._written = snapshot

    def remove(self) -> None:
        """Delete the file: the job is over, or begins."""
        self._path.unlink(missing_ok=True)


SKIPPED_NUMBERS: Final = 1000
"""More generations and members than a supervisor can use while it cannot write."""


def recover(
    path: Path, kept: KeptWorkers, trouble: str, report: Callable[[PacelineError], None]
) -> SupervisorBegan:
    """Recover what the lost snapshot held from the journal at `path` and the `kept` workers. Workers whose
    rank the journal does not tell are killed, and removed from `kept`: others are started in their place."""
    began = recover_from_journal(path, kept)
    if began is None:
        return SupervisorBegan()
    report(
        PlatformError(
            f"what the supervisor before this one knew is lost: {trouble}. "
            f"{counted(len(began.members), 'worker', 'is', 'are')} known from the journal and training on; "
            "failures and speeds are counted anew, and workers of other hosts start again",
            remedy="see who removes or changes files in the run's folder while it is used, and whether "
            "its disk is full",
        )
    )
    # A worker without a rank would train on beside its replacement, and hold its memory and its devices.
    for member in kept.keys() - began.members.keys():
        process = WorkerProcess.adopt(*kept.pop(member))
        process.receive()
        process.kill()
        process.close()
    return began


def recover_from_journal(path: Path, kept: KeptWorkers) -> SupervisorBegan | None:
    """Return what journal and kept workers tell; None: no worker had started."""
    generation, rank_of = _read(path)
    if not kept and not generation and not rank_of:
        return None
    # Only workers whose sockets the parent kept, whose pid tells the rank. Those of other hosts are
    # offered again by their agents.
    members = {member: (rank_of[pid], LOCAL_AGENT) for member, (pid, _) in kept.items() if pid in rank_of}
    # A generation stands for one view and a member number for one worker, for ever. The lost supervisor may
    # have sent some that it did not write down, so this one begins beyond all that it can have come to: no
    # member takes an old message for a new one. No `view`: all members report, and form one view.
    return SupervisorBegan(
        generation=generation + SKIPPED_NUMBERS,
        members=members,
        next_member=max([0, *kept]) + SKIPPED_NUMBERS,
        # A view was sent, so a step may have been committed in it. To assume none would grant every phase
        # the time of a first step, and end the job after two failures of each slot.
        committed=generation > 0,
    )


def _read(path: Path) -> tuple[int, dict[int, int]]:
    """Return the highest generation of this run in the journal, and the rank of each process."""
    generation, rank_of = 0, dict[int, int]()
    if not path.exists():
        return generation, rank_of
    for event in journal.iterate(path):
        if isinstance(event, SupervisorStarted) and event.attempt == 1:
            # An earlier run in this folder: its pids may be used again by now.
            generation, rank_of = 0, {}
        elif isinstance(event, WorkerStarted):
            rank_of[event.pid] = event.rank
        elif isinstance(event, ViewChanged):
            generation = max(generation, event.generation)
            rank_of.update(zip(event.pids, event.members, strict=False))
    return generation, rank_of
