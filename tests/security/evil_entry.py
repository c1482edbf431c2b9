"""What an attacker wants a joined machine to run."""

from __future__ import annotations

from pathlib import Path

from paceline.engines.local import payload
from paceline.engines.local.child import Task

ENTRY = "tests.security.evil_entry:main"


def main(task: Task) -> int:
    """Leaves a mark where the attacker said."""
    Path(str(task.options["mark"])).write_text("code of the attacker ran here")
    return payload.dump(None)
