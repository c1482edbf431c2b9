"""Sign records, so that a command can tell whether this user wrote them: a tag by a key that only the user
has.

A folder from elsewhere belongs, once it is unpacked, to the user who unpacked it. The owner of a file is
no evidence of its author, so a record that names something to be run carries a tag. The key is in the user's
own folder for state (XDG_STATE_HOME, else ~/.local/state), never in a run's folder. Where there can be no key
nothing is tagged, and no command trusts such a record.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from paceline.core import untrusted
from paceline.core.atomic_file import create_once

TAG: Final = "tag"
_KEY_BYTES: Final = 32


def signed(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the record with its tag."""
    key = _key(make=True)
    return {**record, TAG: _tag(key, record)} if key else dict(record)


def is_signed_by_user(record: Mapping[str, Any]) -> bool:
    """Return whether this user made the record as it is."""
    key, tag = _key(make=False), record.get(TAG)
    body = {name: value for name, value in record.items() if name != TAG}
    return bool(key) and isinstance(tag, str) and hmac.compare_digest(tag.encode(), _tag(key, body).encode())


def _tag(key: bytes, record: Mapping[str, Any]) -> str:
    return hmac.digest(key, json.dumps(record, sort_keys=True).encode(), "sha256").hex()


def _key(*, make: bool) -> bytes:
    """Return the user's key; empty where there is none, or where another user can read it."""
    try:
        base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
        path = Path(base) / "paceline" / "records.key"
        if make and not path.exists():
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            create_once(path, secrets.token_bytes(_KEY_BYTES), mode=0o600)
        if not untrusted.is_owned_by_user(path) or os.lstat(path).st_mode & 0o077:
            return b""
        key = untrusted.read_regular(path)
        return key if len(key) == _KEY_BYTES else b""
    except (OSError, RuntimeError):
        return b""  # no home, or none that can be written to
