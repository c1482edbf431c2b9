"""Asking a job's supervisor something from outside: `paceline scale`, `stop` and `status` of a run's folder.

Must not know how answers are shown.
"""

from __future__ import annotations

import select
import time
from pathlib import Path

from paceline.core.control import address, auth, channel
from paceline.core.control.auth import Tls
from paceline.core.control.channel import Channel
from paceline.core.control.messages import Answer, Ask
from paceline.core.errors import PeerLostError, RendezvousError

_SECONDS = 10.0


def ask(folder: Path, question: Ask, seconds: float = _SECONDS) -> Answer:
    """The answer of the supervisor that is at work in this run's folder."""
    where = address.read(folder)
    opened = open_channel(where.address, address.read_secret(folder, where.secret), where.tls, seconds)
    try:
        opened.send(question)
        limit = time.monotonic() + seconds
        while (left := limit - time.monotonic()) > 0 and not opened.closed:
            poll = select.poll()
            poll.register(opened, select.POLLIN)
            poll.poll(left * 1000)
            for _, message in opened.receive():
                if isinstance(message, Answer):
                    return message
    finally:
        opened.close()
    raise PeerLostError(
        f"the supervisor of {folder} did not answer: {opened.closed}",
        remedy="it may be restarting: try again in a moment",
    )


def open_channel(where: tuple[str, int], secret: bytes, tls: Tls | None, seconds: float) -> Channel:
    """A connection to a supervisor, after both ends have proved themselves: what is sent on it is tagged."""
    try:
        sock = channel.dial(where, seconds)
    except OSError as error:
        raise RendezvousError(
            f"there is no supervisor at {where[0]}:{where[1]}: {error.strerror or error}",
            remedy="check the address and that the job runs; it listens on loopback unless told otherwise",
        ) from error
    try:
        end = tls.client() if tls is not None else None
        if end is not None:
            sock = end.wrap(sock)
        return Channel(sock, auth.connect(sock, secret, seconds, end))
    except OSError as error:
        sock.close()
        raise RendezvousError(
            f"the supervisor at {where[0]}:{where[1]} refused the connection: {error}",
            remedy="give the token file of this very job; a job with TLS wants a certificate too",
        ) from error
    except BaseException:
        sock.close()
        raise
