"""What workers could not tell a supervisor that stayed away: files in the run's folder, for the next one.

    unheard/MEMBER-PID.jsonl    who it is; then its messages, one JSON line each, in the order they were said

A worker writes its file in one piece, as the last thing that it does. Whoever writes the journal next takes
the files in before anything else, and deletes them: leaving out what the journal has is their reader's part.
A file says whose secret its worker had: what a worker of an earlier start says is not part of this one. Must
not know what a message means.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, final

from paceline.core.control import address, messages
from paceline.core.control.messages import Message
from paceline.core.errors import PacelineError, WireError

_log = logging.getLogger(__name__)

SUPERVISOR_LOST_EXIT_CODE: Final = 76
START_OVER_EXIT_CODE: Final = 77  # there is no checkpoint to go back to, so the process is replaced
FOLDER: Final = "unheard"


@final
@dataclass(frozen=True)
class LastWords:
    """What one worker said when nobody heard it."""

    file: Path
    rank: int
    pid: int
    messages: tuple[Message, ...]


def write(folder: Path, secret: bytes, member: int, rank: int, said: Iterable[Message]) -> None:
    """Keeps the last words of this process; not where the folder belongs to a later start of the run."""
    try:
        if address.read_secret(folder) != secret:
            return
    except PacelineError:
        return
    header = {"rank": rank, "pid": os.getpid(), "of": _mark(secret)}
    lines = [json.dumps(header), *(json.dumps(messages.to_plain(message)) for message in said)]
    if len(lines) == 1:
        return
    file = folder / FOLDER / f"{member}-{os.getpid()}.jsonl"
    address.replace_file(file, "".join(f"{line}\n" for line in lines).encode(), durable=True)


def is_there(folder: Path) -> bool:
    """Whether somebody may have left something: cheap, for the usual case that nobody has."""
    return (folder / FOLDER).is_dir()


def read(folder: Path, secret: bytes) -> list[LastWords]:
    """What workers with this secret left, by rank. What others left is of no use to anybody: deleted."""
    found: list[LastWords] = []
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
        found.append(LastWords(file, rank, pid, tuple(_messages(file, rest))))
    return sorted(found, key=lambda one: (one.rank, one.pid))


def forget(folder: Path, taken: Sequence[LastWords]) -> None:
    """All of it is in the journal."""
    for one in taken:
        one.file.unlink(missing_ok=True)
    try:
        (folder / FOLDER).rmdir()
    except OSError:
        # Another worker is about to leave, or what nobody can read is still there.
        return


def _messages(file: Path, lines: Iterable[str]) -> Iterable[Message]:
    for line in lines:
        try:
            yield messages.from_plain(json.loads(line))
        except (ValueError, RecursionError, WireError) as error:
            _log.warning("%s: a damaged line is left out: %s", file, error)


def _mark(secret: bytes) -> str:
    """Tells secrets apart without giving them away."""
    return hashlib.blake2b(secret, digest_size=8, person=b"unheard").hexdigest()
