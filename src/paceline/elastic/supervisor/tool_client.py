"""Requests of tools to a job's supervisor: `paceline scale`, `stop` and `status` of a run's folder."""

from __future__ import annotations

import select
from pathlib import Path
from typing import Final, final

from paceline.control import channel, liveness_lock, supervisor_address
from paceline.control.channel import Channel
from paceline.control.messages import ToolReply, ToolRequest
from paceline.core import journal
from paceline.core.clock import Clock, MonotonicClock
from paceline.core.errors import PeerLostError, RendezvousError, UsageError
from paceline.core.events import RunEnded, RunFailed, RunResumed, RunStarted, SupervisorStarted
from paceline.core.tls import Tls
from paceline.core.untrusted import printable
from paceline.elastic.supervisor.journal_writer import JOURNAL_FILE

_SECONDS = 10.0
_PAUSES: Final = (0.02, 0.05, 0.1, 0.2)  # between two connections
ENDED_EXIT_CODE: Final = 3
KILLED_EXIT_CODE: Final = 4
NO_RUN_EXIT_CODE: Final = 5
NO_FOLDER_EXIT_CODE: Final = 6
_BOUNDS = (RunStarted, RunResumed, SupervisorStarted, RunEnded, RunFailed)


@final
class NotRunningError(UsageError):
    """There is no run here to ask; `exit_code` tells the cases apart."""

    def __init__(self, message: str, *, remedy: str = "", exit_code: int = 2, **facts: object) -> None:
        super().__init__(message, remedy=remedy, **facts)
        self.exit_code = exit_code


def ask(
    folder: Path, request: ToolRequest, seconds: float = _SECONDS, token: Path | None = None
) -> ToolReply:
    """Return the reply of the supervisor of the run in this folder; NotRunningError where it has none.
    `token` names the secret where the folder belongs to another user."""
    clock = MonotonicClock()
    opened = _reach(folder, seconds, token)
    try:
        opened.send(request)
        deadline = clock.now() + seconds
        while (left := deadline - clock.now()) > 0 and not opened.closed:
            poll = select.poll()
            poll.register(opened, select.POLLIN)
            poll.poll(left * 1000)
            for _, message in opened.receive():
                if isinstance(message, ToolReply):
                    return message
    finally:
        opened.close()
    raise PeerLostError(
        f"the supervisor of {folder} did not answer: {opened.closed}",
        remedy="it may be restarting: try again in a moment",
    )


def _reach(folder: Path, seconds: float, token: Path | None) -> Channel:
    if token is None:
        supervisor_address.check_owned_by_user(folder)
    if not (folder / supervisor_address.ADDRESS_FILE).exists():
        raise _not_running(folder)
    where = supervisor_address.read(folder)
    try:
        secret = (
            supervisor_address.read_secret(folder) if token is None else supervisor_address.read_token(token)
        )
        return open_channel(where.address, secret, where.tls, seconds)
    except (RendezvousError, UsageError) as error:
        if token is None and liveness_lock.is_free(folder):
            raise _not_running(folder) from error
        raise


def _not_running(folder: Path) -> NotRunningError:
    """Tell the cases apart: no folder, no run, a run that ended, a run that was killed."""
    if not folder.is_dir():
        return NotRunningError(
            f"there is no folder {folder}",
            remedy="give the folder of a run; its name is printed when the run starts",
            exit_code=NO_FOLDER_EXIT_CODE,
        )
    path = folder / JOURNAL_FILE
    try:
        bounds = [event for event in journal.last_events(path) if isinstance(event, _BOUNDS)]
    except OSError:
        bounds = []
    if not bounds:
        return NotRunningError(
            f"{folder} is not the folder of a run that was started: no supervisor runs there and there "
            "is no journal",
            remedy="give the folder of a run; its name is printed when the run starts",
            exit_code=NO_RUN_EXIT_CODE,
        )
    last = bounds[-1]
    if isinstance(last, RunEnded | RunFailed):
        return NotRunningError(
            f"the run in {folder} has ended after step {last.step}: {printable(last.reason)}",
            remedy='see `paceline audit`; resume="auto" continues it where there is more to do',
            exit_code=ENDED_EXIT_CODE,
        )
    return NotRunningError(
        f"the run in {folder} was killed: no supervisor runs there and the journal has no end",
        remedy='start it again with resume="auto": it continues from its newest checkpoint',
        exit_code=KILLED_EXIT_CODE,
    )


def open_channel(
    where: tuple[str, int], secret: bytes, tls: Tls | None, seconds: float, clock: Clock | None = None
) -> Channel:
    """Connect to a supervisor; both ends prove the secret, and what follows is authenticated.

    A connection that is closed before the proof is tried again: unauthenticated peers may have taken all
    places at the port for a moment. The port gives no reason to a peer without proof, so that a wrong secret
    is tried as often.
    """
    clock = clock or MonotonicClock()
    deadline = clock.now() + seconds
    pauses = iter(_PAUSES)
    while True:
        try:
            return _open_once(where, secret, tls, max(deadline - clock.now(), 0.1))
        except OSError as error:
            pause = next(pauses, float("inf"))
            if not isinstance(error, ConnectionError) or clock.now() + pause >= deadline:
                raise RendezvousError(
                    f"the supervisor at {where[0]}:{where[1]} refused the connection: {error}",
                    remedy="give the token file of this very job; a job with TLS wants a certificate too; "
                    "where others overrun the port with connections, try again",
                ) from error
        clock.sleep(pause)


def _open_once(where: tuple[str, int], secret: bytes, tls: Tls | None, seconds: float) -> Channel:
    try:
        sock = channel.connect(where, seconds)
    except OSError as error:
        raise RendezvousError(
            f"there is no supervisor at {where[0]}:{where[1]}: {error.strerror or error}",
            remedy="check the address and that the job runs; it listens on loopback unless told otherwise",
            absent=True,
        ) from error
    try:
        end = tls.client() if tls is not None else None
        if end is not None:
            sock = end.wrap(sock)
        return Channel(sock, channel.authenticate(sock, secret, seconds, end))
    except BaseException:
        sock.close()
        raise
