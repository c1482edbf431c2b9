"""Takes into the journal what workers left for it when no supervisor heard them.

The chronicle treats it like what members say again after a reconnect: steps, receipts and lines that the
journal has are left out. Must not know why the workers left.
"""

from __future__ import annotations

from pathlib import Path

from paceline.core.control import unheard
from paceline.core.control.messages import Receipt, Told
from paceline.elastic.shell.chronicle import Chronicle


def take_in(chronicle: Chronicle, folder: Path, secret: bytes) -> None:
    """Writes what is new of it, and deletes the files when it is written."""
    if not unheard.is_there(folder):
        return
    left = unheard.read(folder, secret)
    # Steps first: a receipt is about a step that the journal has.
    for one in left:
        for message in one.messages:
            if isinstance(message, Told):
                chronicle.tell(message.lines)
    for one in left:
        for message in one.messages:
            if isinstance(message, Receipt):
                chronicle.receive(one.rank, one.pid, message)
    chronicle.flush(over=True)
    if chronicle.complete:
        unheard.forget(folder, left)
