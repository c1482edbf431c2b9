"""Messages that workers could not deliver to a lost supervisor: files in the run's folder, for the next one.

    unheard/MEMBER-PID.jsonl    the worker; then its messages, one JSON line each, in order

A worker writes its file in one piece, as the last thing that it does. The next supervisor
imports the files before anything else, leaves out what the journal has, and deletes them. A file names its
worker's secret by a hash: files of an earlier start of the run are not part of this one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, final

from paceline.control import message_codec, supervisor_address
from paceline.control.messages import ControlMessage
from paceline.core.atomic_file import replace_file
from paceline.core.errors import PacelineError, WireError

_log = logging.getLogger(__name__)

SUPERVISOR_LOST_EXIT_CODE: Final = 76
STOPPED_EXIT_CODE: Final = 75  # saved before the end of the run: start it again
START_OVER_EXIT_CODE: Final = 77  # there is no checkpoint to go back to, so the process is replaced
FOLDER: Final = "unheard"


@final
@dataclass(frozen=True)
class SpooledMessages:
    """The undelivered messages of one worker."""

    file: Path
    rank: int
    pid: int
    messages: tuple[ControlMessage, ...]


def write(folder: Path, secret: bytes, member: int, rank: int, undelivered: Iterable[ControlMessage]) -> None:
    """Spool the undelivered messages of this process, unless the folder belongs to a later start of the
    run."""
    try:
        if supervisor_address.read_secret(folder) != secret:
            return
    except PacelineError:
        return
    header = {"rank": rank, "pid": os.getpid(), "of": _mark(secret)}
    lines = [json.dumps(header), *(json.dumps(message_codec.to_plain(message)) for message in undelivered)]
    if len(lines) == 1:
        return
    file = folder / FOLDER / f"{member}-{os.getpid()}.jsonl"
    replace_file(file, "".join(f"{line}\n" for line in lines).encode(), durable=True)


def has_spool(folder: Path) -> bool:
    """Return whether there may be spooled messages: one cheap call, for the usual case that there are
    none."""
    return (folder / FOLDER).is_dir()


def read(folder: Path, secret: bytes) -> list[SpooledMessages]:
    """Return what workers with this secret spooled, by rank, and delete what others did."""
    found: list[SpooledMessages] = []
    for file in sorted((folder / FOLDER).glob("*.jsonl")):
        try:
            first, *rest = file.read_text(encoding="utf-8").splitlines()
            header = json.loads(first)
            rank, pid, of = int(header["rank"]), int(header["pid"]), header["of"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            _log.warning("%s cannot be read, and is left out: %s", file, error)
            continue
        if of != _mark(secret):
            file.unlink(missing_ok=True)
            continue
        found.append(SpooledMessages(file, rank, pid, tuple(_messages(file, rest))))
    return sorted(found, key=lambda one: (one.rank, one.pid))


def remove_spool(folder: Path, taken: Sequence[SpooledMessages]) -> None:
    """Delete what is in the journal now."""
    for one in taken:
        one.file.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        # Unless another worker is about to leave, or an unreadable file is still there.
        (folder / FOLDER).rmdir()


def _messages(file: Path, lines: Iterable[str]) -> Iterable[ControlMessage]:
    for line in lines:
        try:
            yield message_codec.from_plain(json.loads(line))
        except (ValueError, RecursionError, WireError) as error:
            _log.warning("%s: a damaged line is left out: %s", file, error)


def _mark(secret: bytes) -> str:
    """Return a hash that distinguishes secrets without revealing them."""
    return hashlib.blake2b(secret, digest_size=8, person=b"unheard").hexdigest()
