"""Address and secret of a run's supervisor: control.json and control.secret in the run's folder.

Written by the supervisor, read by workers that look for a restarted one and by `paceline scale`, `stop` and
`status`. The secret's file can be read by its owner only. A folder of another user may name any host, and any
secret that the reader can read: to prove the secret to that host lends it the secret. So the secret is
a bare name in the same folder, and tools use it only where folder and files are the caller's own.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, final

from paceline.core import type_conversion, untrusted
from paceline.core.atomic_file import replace_file
from paceline.core.errors import UsageError
from paceline.core.tls import Tls

ADDRESS_FILE: Final = "control.json"
SECRET_FILE: Final = "control.secret"
SECRET_BYTES: Final = 32


@final
class ForeignRunError(UsageError):
    """The folder belongs to another user."""


@dataclass(frozen=True)
class SupervisorAddress:
    """The content of control.json. `secret` is a file's name, in the same folder."""

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
                untrusted.read_regular(os.path.realpath(name))
            except (OSError, ValueError) as error:
                raise UsageError(
                    f"{ADDRESS_FILE} names {name!r} for TLS, which cannot be read: {error}",
                    remedy="ask where the certificate, its key and the authority are: on the machine on "
                    "which the run was started",
                ) from error
        return Tls(Path(self.certificate), Path(self.key), Path(self.authority))


def read(folder: Path) -> SupervisorAddress:
    """Return where the supervisor of this run listens; UsageError where there is none."""
    path = folder / ADDRESS_FILE
    try:
        plain = json.loads(untrusted.read_regular(path))
        found: SupervisorAddress = type_conversion.convert(plain, SupervisorAddress, ADDRESS_FILE)
    except FileNotFoundError:
        raise UsageError(
            f"no supervisor runs in {folder}",
            remedy="give the folder of a run that trains now; its name is printed when it starts",
        ) from None
    except (OSError, ValueError, type_conversion.ConversionError) as error:
        raise UsageError(f"{path} cannot be read: {error}", remedy="give the run's own folder") from error
    if found.secret != SECRET_FILE:
        raise UsageError(
            f"{path} names {found.secret!r} as the job's secret, and it can only be {SECRET_FILE}",
            remedy="this was not written by a supervisor: give the run's own folder",
        )
    return found


def lookup(folder: Path) -> tuple[str, int] | None:
    """Return where the supervisor listens now, for ControlClient; None where the file is missing."""
    try:
        return read(folder).address
    except UsageError:
        return None


def write(folder: Path, whereabouts: SupervisorAddress) -> None:
    """Write where the supervisor listens."""
    replace_file(folder / ADDRESS_FILE, json.dumps(vars(whereabouts)).encode())


def new_secret() -> bytes:
    """Return a job's secret."""
    return secrets.token_bytes(SECRET_BYTES)


def write_secret(folder: Path, secret: bytes) -> None:
    """Keep the secret where only the owner can read it."""
    replace_file(folder / SECRET_FILE, secret.hex().encode() + b"\n", mode=0o600)


def read_secret(folder: Path) -> bytes:
    """Return the run's secret."""
    return _secret(folder / SECRET_FILE, untrusted.read_regular)


def read_token(path: Path) -> bytes:
    """Return the secret in a file that the caller names, which may also be a pipe: a run's control.secret, or
    a copy of it."""
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


def check_owned_by_user(folder: Path) -> None:
    """Raise UsageError where the folder, the address or the secret belongs to another user."""
    for path in (folder, folder / ADDRESS_FILE, folder / SECRET_FILE):
        if os.path.lexists(path) and not untrusted.is_owned_by_user(path):
            raise ForeignRunError(
                f"{path} belongs to another user, who may have it lead anywhere: no token is lent to it",
                remedy="run the command as that user, or name the token yourself: --token-file FILE",
            )


def remove(folder: Path) -> None:
    """Remove address and secret: the run has no supervisor."""
    for name in (ADDRESS_FILE, SECRET_FILE):
        (folder / name).unlink(missing_ok=True)
