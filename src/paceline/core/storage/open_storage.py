"""Choose the storage for a path or URL."""

from __future__ import annotations

import os

from paceline.core import atomic_file
from paceline.core.atomic_file import SystemCall
from paceline.core.errors import UsageError
from paceline.core.storage.local_storage import LocalStorage
from paceline.core.storage.remote_storage import open_remote
from paceline.core.storage.storage import Storage


def open_storage(
    url: str | os.PathLike[str], *, call: SystemCall | None = None, follow_links: bool = False
) -> Storage:
    """Return the storage behind a path or an fsspec URL (`file://`, `memory://`, `s3://bucket/folder`, ...).

    `follow_links`: files of a local disk may be links, as those of a dataset often are.
    """
    text = os.fspath(url)
    if not text:
        raise UsageError("a folder has no name", remedy="give a path or a URL such as s3://bucket/run")
    call = call or atomic_file.direct
    scheme, separator, rest = text.partition("://")
    if not separator or scheme in ("file", "local"):
        return LocalStorage(rest if separator else text, call=call, follow_links=follow_links)
    return open_remote(text, call=call)
