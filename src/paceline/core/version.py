"""Version of Paceline, and of the control protocol that it speaks.

PROTOCOL grows with every change of a control message: two numbers that differ do not talk. (Handshake and
frames have a number for each protocol, see `handshake`, and are refused before a message is read.) Workers
and agents of another version are refused too, as their arithmetic may differ. The shape of the first
messages' two fields and of the refusals (`Dismissed`, `AgentEnd`, `ToolReply` in control/messages.py) is for
ever.
"""

from __future__ import annotations

from typing import Final

VERSION = "0.1.0"
PROTOCOL: Final = 3
