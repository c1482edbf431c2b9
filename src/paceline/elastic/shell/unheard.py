"""Takes into the journal what workers left for it when no supervisor heard them.

The chronicle treats it like what members say again after a reconnect: steps, receipts and lines that the
journal has are left out. Must not know why the workers left.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

from paceline.core.control import unheard
from paceline.core.control.messages import Receipt, Told
from paceline.core.errors import WireError
from paceline.elastic.shell.chronicle import Chronicle

_log = logging.getLogger(__name__)


@contextlib.contextmanager
def _left_out(file: Path) -> Iterator[None]:
    """A damaged file must not keep a supervisor from starting."""
    try:
        yield
    except WireError as error:
        _log.warning("%s: a message is left out: %s", file, error.message)


def take_in(chronicle: Chronicle, folder: Path, secret: bytes) -> None:
    """Writes what is new of it, and deletes the files when it is written."""
    if not unheard.is_there(folder):
        return
    left = unheard.read(folder, secret)
    # Steps first: a receipt is about a step that the journal has.
    for one in left:
        for message in one.messages:
            if isinstance(message, Told):
                with _left_out(one.file):
                    chronicle.tell(message.lines)
    for one in left:
        for message in one.messages:
            if isinstance(message, Receipt):
                with _left_out(one.file):
                    chronicle.receive(one.rank, one.pid, message)
    chronicle.flush(over=True)
    if chronicle.complete:
        unheard.forget(folder, left)
