"""Which records this user wrote: a tag that is made with a key that only the user has.

A folder from elsewhere belongs, once it is unpacked, to the user who unpacked it. The owner of a file says
nothing about who made it, so a record that names something to be run carries a tag. The key is in the user's
own folder for state (XDG_STATE_HOME, else ~/.local/state), never in a run's folder. Where there can be no key
nothing is tagged, and such a record is believed by no command. Must not know what records say.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from paceline.core import foreign

TAG: Final = "tag"
_KEY_BYTES: Final = 32


def tagged(record: Mapping[str, Any]) -> dict[str, Any]:
    """The record with its tag."""
    key = _key(make=True)
    return {**record, TAG: _tag(key, record)} if key else dict(record)


def is_own(record: Mapping[str, Any]) -> bool:
    """Whether this user made the record as it is."""
    key, tag = _key(make=False), record.get(TAG)
    body = {name: value for name, value in record.items() if name != TAG}
    return bool(key) and isinstance(tag, str) and hmac.compare_digest(tag.encode(), _tag(key, body).encode())


def _tag(key: bytes, record: Mapping[str, Any]) -> str:
    return hmac.digest(key, json.dumps(record, sort_keys=True).encode(), "sha256").hex()


def _key(*, make: bool) -> bytes:
    """The user's key; empty where there is none, or where another user can read it."""
    try:
        base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
        path = Path(base) / "paceline" / "records.key"
        if make and not path.exists():
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            new = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
            with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(secrets.token_bytes(_KEY_BYTES))
            try:
                os.link(new, path)  # of two processes that make one, the first wins
            finally:
                new.unlink()
        if not foreign.is_own(path) or os.lstat(path).st_mode & 0o077:
            return b""
        key = foreign.read_regular(path)
        return key if len(key) == _KEY_BYTES else b""
    except FileExistsError:
        return _key(make=False)
    except (OSError, RuntimeError):
        return b""  # no home, or none that can be written to
