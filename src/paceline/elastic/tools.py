"""Asking a job's supervisor something from outside: `paceline scale`, `stop` and `status` of a run's folder.

Must not know how answers are shown.
"""

from __future__ import annotations

import select
import time
from pathlib import Path
from typing import Final, final

from paceline.core import journal
from paceline.core.control import address, channel, crew
from paceline.core.control.channel import Channel
from paceline.core.control.messages import Answer, Ask
from paceline.core.errors import PeerLostError, RendezvousError, UsageError
from paceline.core.events import RunEnded, RunFailed, RunResumed, RunStarted, SupervisorStarted
from paceline.core.foreign import shown
from paceline.core.tls import Tls

JOURNAL_FILE: Final = "journal.jsonl"

_SECONDS = 10.0
_PAUSES: Final = (0.02, 0.05, 0.1, 0.2)  # between two connections
ENDED_EXIT_CODE: Final = 3
KILLED_EXIT_CODE: Final = 4
NO_RUN_EXIT_CODE: Final = 5
NO_FOLDER_EXIT_CODE: Final = 6
_BOUNDS = (RunStarted, RunResumed, SupervisorStarted, RunEnded, RunFailed)


@final
class NotRunningError(UsageError):
    """There is no run here to ask; `exit_code` says which case it is."""

    def __init__(self, message: str, *, remedy: str = "", exit_code: int = 2, **facts: object) -> None:
        super().__init__(message, remedy=remedy, **facts)
        self.exit_code = exit_code


def ask(folder: Path, question: Ask, seconds: float = _SECONDS, token: Path | None = None) -> Answer:
    """The answer of the supervisor of the run in this folder; NotRunningError where it has none. `token`
    names the secret where the folder is not the caller's own."""
    opened = _reach(folder, seconds, token)
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


def _reach(folder: Path, seconds: float, token: Path | None) -> Channel:
    if token is None:
        address.check_own(folder)
    if not (folder / address.ADDRESS_FILE).exists():
        raise _not_running(folder)
    where = address.read(folder)
    try:
        secret = address.read_secret(folder) if token is None else address.read_token(token)
        return open_channel(where.address, secret, where.tls, seconds)
    except (RendezvousError, UsageError) as error:
        if token is None and crew.is_free(folder):
            raise _not_running(folder) from error
        raise


def _not_running(folder: Path) -> NotRunningError:
    """Which it is: no folder, no run, one that ended, one that was killed."""
    if not folder.is_dir():
        return NotRunningError(
            f"there is no folder {folder}",
            remedy="give the folder of a run; its name is printed when the run starts",
            exit_code=NO_FOLDER_EXIT_CODE,
        )
    path = folder / JOURNAL_FILE
    try:
        told = (
            [event for event in journal.last_events(path) if isinstance(event, _BOUNDS)]
            if path.exists()
            else []
        )
    except OSError:
        told = []
    if not told:
        return NotRunningError(
            f"{folder} is not the folder of a run that was started: no supervisor is at work there and there "
            "is no journal",
            remedy="give the folder of a run; its name is printed when the run starts",
            exit_code=NO_RUN_EXIT_CODE,
        )
    last = told[-1]
    if isinstance(last, RunEnded | RunFailed):
        return NotRunningError(
            f"the run in {folder} has ended after step {last.step}: {shown(last.reason)}",
            remedy='see `paceline audit`; resume="auto" goes on with it where there is more to do',
            exit_code=ENDED_EXIT_CODE,
        )
    return NotRunningError(
        f"the run in {folder} was killed: no supervisor is at work there and the journal has no end",
        remedy='start it again with resume="auto": it goes on from its newest checkpoint',
        exit_code=KILLED_EXIT_CODE,
    )


def open_channel(where: tuple[str, int], secret: bytes, tls: Tls | None, seconds: float) -> Channel:
    """A connection to a supervisor, after both ends have proved themselves: what is sent on it is tagged.
    Calls again where it is closed before that: strangers may have taken all places at the port for a moment.
    A port gives no reason to who has not proved itself, so another secret is tried as often."""
    limit = time.monotonic() + seconds
    pauses = iter(_PAUSES)
    while True:
        try:
            return _open_once(where, secret, tls, max(limit - time.monotonic(), 0.1))
        except OSError as error:
            pause = next(pauses, float("inf"))
            if not isinstance(error, ConnectionError) or time.monotonic() + pause >= limit:
                raise RendezvousError(
                    f"the supervisor at {where[0]}:{where[1]} refused the connection: {error}",
                    remedy="give the token file of this very job; a job with TLS wants a certificate too; "
                    "where others overrun the port with connections, try again",
                ) from error
        time.sleep(pause)


def _open_once(where: tuple[str, int], secret: bytes, tls: Tls | None, seconds: float) -> Channel:
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
        return Channel(sock, channel.prove(sock, secret, seconds, end))
    except BaseException:
        sock.close()
        raise
