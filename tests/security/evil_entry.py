"""What an attacker wants a joined machine to run."""

from __future__ import annotations

from pathlib import Path

from paceline.engines.local import memfd_pickle
from paceline.engines.local.forked_rank import RankTask

ENTRY = "tests.security.evil_entry:main"


def main(task: RankTask) -> int:
    """Leaves a mark where the attacker said."""
    Path(memfd_pickle.load(task.payload)).write_text("code of the attacker ran here")
    return memfd_pickle.dump(None)
