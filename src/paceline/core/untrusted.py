"""Folders and text that may come from elsewhere: what is one's own, what may be read, shown and recorded.

A run's folder is sent around, unpacked and published. What lies in it is data of unknown origin: a link in it
leads outside, a pipe under a file's name blocks its reader for ever, its names and notes reach the terminal,
and what it names (hosts, secrets, scripts) is another person's instruction.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Final

from paceline.core.errors import UsageError

_SMALL: Final = 16 << 20
# Control characters (escape sequences begin with one), and those that change the order of what is shown.
# Compiled when they are first used, which most commands never do.
_NOT_SHOWN: Final = r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
# Up to the last @ before the path; and keys with a slash in them, which is not a port's.
_USER: Final = (
    r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*://)(?:[^/?#\s'\"]*|[^/@:\[\s'\"]*:(?!\d*[/?#])[^@\s'\"]*)@"
)
_KEY: Final = (
    r"(?:[A-Za-z0-9_.-]*(?:password|passwd|passphrase|secret|token|api[_-]?key|access[_-]?key|credential|"
    r"signature|private[_-]?key)[A-Za-z0-9_.-]*|sig|pwd|pw|pass|passcode|auth|authorization)"
)
_QUERY: Final = rf"(?i)(?P<key>[?&;]{_KEY}=)[^&#;\s'\"]+"
_ASSIGNED: Final = rf"(?is)(?P<key>(?<![A-Za-z0-9_.-])-{{0,2}}{_KEY}=).+"
# As JSON and as headers have it: "password": "X", Authorization: Bearer X.
_PAIR: Final = (
    rf"(?i)(?P<key>(?<![A-Za-z0-9_.-]){_KEY}[\"']?\s*:\s*[\"']?(?:(?:Bearer|Basic)\s+)?)[^\"',}}\s]+"
)
_OPTION: Final = rf"(?i)-{{1,2}}{_KEY}"
REDACTED: Final = "***"


def is_owned_by_user(path: Path) -> bool:
    """Return whether the file or folder itself, not what a link leads to, belongs to this user."""
    try:
        return os.lstat(path).st_uid == os.geteuid()
    except OSError:
        return False


def open_regular(path: str | os.PathLike[str], *, links: bool = False) -> int:
    """Return a descriptor to read a plain file by; OSError for a pipe, a device and, but with `links`, a
    link. Never blocks."""
    nofollow = 0 if links else os.O_NOFOLLOW
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | nofollow)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.ENXIO, "it is not a regular file", os.fspath(path))
    return descriptor


def read_regular(path: str | os.PathLike[str], most: int = _SMALL) -> bytes:
    """Return a small plain file, at most `most` bytes of it; OSError for anything else."""
    with os.fdopen(open_regular(path), "rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise OSError(errno.EFBIG, f"it has more than {most} bytes", os.fspath(path))
    return data


def check_no_links(folder: Path, names: Collection[str] | None = None) -> None:
    """Refuse a folder in which a file of these names (None: any) leads elsewhere; call before writing to
    it."""
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError:
        return  # what cannot be listed cannot be written to either, and fails then
    for entry in entries:
        ours = names is None or entry.name in names
        if ours and not (entry.is_file(follow_symlinks=False) or entry.is_dir(follow_symlinks=False)):
            what = "a link" if entry.is_symlink() else "not a file or a folder"
            raise UsageError(
                f"{folder / entry.name} is {what}, and a run would write to where it leads",
                remedy="remove it, or put a copy of what it leads to in its place",
            )


def printable(text: object) -> str:
    """Return text for a terminal: without control characters, which could move the cursor, set the title or
    write to the clipboard. Lines and tabs stay."""
    return re.sub(_NOT_SHOWN, "\N{REPLACEMENT CHARACTER}", str(text))


def redact_credentials(text: str) -> str:
    """Return the text without user:password@ of URLs and without the values of query keys of secrets."""
    return re.sub(_QUERY, rf"\g<key>{REDACTED}", re.sub(_USER, rf"\g<scheme>{REDACTED}@", text))


def redact_secrets(arguments: Iterable[str]) -> tuple[str, ...]:
    """Return the arguments of a command for a record: without the values of options that name a secret."""
    found: list[str] = []
    hide = False
    for argument in arguments:
        if hide and not argument.startswith("-"):
            found.append(REDACTED)
            hide = False
            continue
        hide = re.fullmatch(_OPTION, argument) is not None
        redacted = re.sub(_PAIR, rf"\g<key>{REDACTED}", redact_credentials(argument))
        found.append(re.sub(_ASSIGNED, rf"\g<key>{REDACTED}", redacted))
    return tuple(found)
