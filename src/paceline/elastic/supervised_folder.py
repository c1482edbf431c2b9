"""Name the files that supervisors leave in a run's folder, and complete its journal: all that a front door
may do with them.

The formats belong to `elastic/supervisor`, and no front door knows them.
"""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path
from typing import Final

from paceline.control import liveness_lock, spool, supervisor_address
from paceline.core.clock import MonotonicClock, WallClock
from paceline.core.errors import PacelineError
from paceline.elastic.supervisor.journal_writer import JOURNAL_FILE, JournalWriter
from paceline.elastic.supervisor.supervisor_recovery import STATE_FILE

SUPERVISOR_FILES: Final = (
    JOURNAL_FILE,
    supervisor_address.ADDRESS_FILE,
    supervisor_address.SECRET_FILE,
    liveness_lock.LOCK_FILE,
    liveness_lock.LEAVE_FILE,
    STATE_FILE,
)
"""Files of the supervisors of one start; the next start in the folder must not take them for its own."""

_log = logging.getLogger(__name__)


def recover_journal(folder: Path) -> None:
    """Complete the journal of a run that no process works on: write what its workers spooled when their
    supervisor stayed away."""
    if not spool.has_spool(folder):
        return
    try:
        secret = supervisor_address.read_secret(folder)
    except PacelineError as error:
        # Without the secret it is not known whether workers of this run wrote it; the run can continue.
        _log.warning("the journal lacks what workers left in %s: %s", folder / spool.FOLDER, error)
        return
    with contextlib.closing(JournalWriter(folder / JOURNAL_FILE, MonotonicClock(), WallClock())) as journal:
        journal.import_spool(folder, secret)
