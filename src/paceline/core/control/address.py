"""Where a run's supervisor is and where its secret lies: control.json and control.secret in its folder.

Written by the supervisor, read by workers that look for a restarted one and by `paceline scale`, `stop` and
`status`. The secret's file can be read by its owner only. A folder of another user may name any host, and any
secret that the reader can read: to prove to that host that one has the secret is to lend it. So the secret is
a bare name in the same folder, and tools use it only where folder and files are the caller's own. Must not
know sockets.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, final

from paceline.core import foreign, typed
from paceline.core.errors import PlatformError, UsageError
from paceline.core.tls import Tls

ADDRESS_FILE: Final = "control.json"
SECRET_FILE: Final = "control.secret"
SECRET_BYTES: Final = 32


@final
class ForeignRunError(UsageError):
    """The folder belongs to another user."""


@dataclass(frozen=True)
class Whereabouts:
    """What control.json says. `secret` is a file's name, in the same folder."""

    host: str
    port: int
    pid: int
    attempt: int = 1
    secret: str = SECRET_FILE
    certificate: str = ""
    key: str = ""
    authority: str = ""

    @property
    def address(self) -> tuple[str, int]:
        return self.host, self.port

    @property
    def tls(self) -> Tls | None:
        if not self.authority:
            return None
        for name in (self.certificate, self.key, self.authority):
            try:
                # The folder may come from elsewhere, and TLS would wait for ever for a pipe to be written to.
                foreign.read_regular(os.path.realpath(name))
            except (OSError, ValueError) as error:
                raise UsageError(
                    f"{ADDRESS_FILE} names {name!r} for TLS, which cannot be read: {error}",
                    remedy="ask where the certificate, its key and the authority are: on the machine on "
                    "which the run was started",
                ) from error
        return Tls(Path(self.certificate), Path(self.key), Path(self.authority))


def read(folder: Path) -> Whereabouts:
    """Where the supervisor of this run is; UsageError where none is at work."""
    path = folder / ADDRESS_FILE
    try:
        found = typed.convert(json.loads(foreign.read_regular(path)), Whereabouts, ADDRESS_FILE)
    except FileNotFoundError:
        raise UsageError(
            f"no supervisor is at work in {folder}",
            remedy="give the folder of a run that trains now; its name is printed when it starts",
        ) from None
    except (OSError, ValueError, typed.MismatchError, typed.MissingKeyError, typed.UnknownKeyError) as error:
        raise UsageError(f"{path} cannot be read: {error}", remedy="give the run's own folder") from error
    assert isinstance(found, Whereabouts)
    if found.secret != SECRET_FILE:
        raise UsageError(
            f"{path} names {found.secret!r} as the job's secret, and it can only be {SECRET_FILE}",
            remedy="this was not written by a supervisor: give the run's own folder",
        )
    return found


def lookup(folder: Path) -> tuple[str, int] | None:
    """For MemberLink: where the supervisor is now, None where nobody says."""
    try:
        return read(folder).address
    except UsageError:
        return None


def write(folder: Path, whereabouts: Whereabouts) -> None:
    """Say where the supervisor is."""
    replace_file(folder / ADDRESS_FILE, json.dumps(vars(whereabouts)).encode())


def new_secret() -> bytes:
    """A job's secret."""
    return secrets.token_bytes(SECRET_BYTES)


def write_secret(folder: Path, secret: bytes) -> None:
    """Keep the secret where only the owner can read it."""
    replace_file(folder / SECRET_FILE, secret.hex().encode() + b"\n", mode=0o600)


def read_secret(folder: Path) -> bytes:
    """The run's secret."""
    return _secret(folder / SECRET_FILE, foreign.read_regular)


def read_token(path: Path) -> bytes:
    """The secret in a file that the caller names, which may also be a pipe: a run's control.secret, or a
    copy of it."""
    return _secret(path, Path.read_bytes)


def _secret(path: Path, read: Callable[[Path], bytes]) -> bytes:
    try:
        secret = bytes.fromhex(read(path).decode().strip())
        if len(secret) != SECRET_BYTES:
            raise ValueError(f"it has {len(secret)} bytes instead of {SECRET_BYTES}")
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{path} holds no job secret: {error}",
            remedy="give the control.secret file of the run's folder, or a copy of it",
        ) from error
    return secret


def check_own(folder: Path) -> None:
    """UsageError where the folder, or what says where its supervisor is, belongs to another user."""
    for path in (folder, folder / ADDRESS_FILE, folder / SECRET_FILE):
        if os.path.lexists(path) and not foreign.is_own(path):
            raise ForeignRunError(
                f"{path} belongs to another user, who may have it lead anywhere: no token is lent to it",
                remedy="run the command as that user, or name the token yourself: --token-file FILE",
            )


def remove(folder: Path) -> None:
    """Nobody is at work here any more."""
    for name in (ADDRESS_FILE, SECRET_FILE):
        (folder / name).unlink(missing_ok=True)


def replace_file(path: Path, data: bytes, *, mode: int = 0o644, durable: bool = False) -> None:
    """Write a small file so that readers see the old one or the new one, never half of one. `durable`: its
    content is on the disk before it has its name."""
    new = path.with_name(f".{path.name}.new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        new.unlink(missing_ok=True)
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(new, path)
    except OSError as error:
        raise PlatformError(
            f"{path} cannot be written: {error.strerror}",
            remedy="free space on its disk, or put the run's folder where it can be written",
        ) from error
