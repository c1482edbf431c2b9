"""Default time limits that several layers share."""

from __future__ import annotations

from typing import Final

COLLECTIVE_SECONDS: Final = 300.0
"""How long a rank waits for its peers in one collective or state transfer."""
START_SECONDS: Final = 300.0
"""From the request for a process to the first message of it: imports on a cold disk take minutes."""
CONNECT_SECONDS: Final = 5.0
"""Of a dial between two workers, until a connection that is not refused counts as lost on the way."""
