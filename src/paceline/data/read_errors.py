"""What becomes of an error that a dataset's own code raised.

Whether trying again may help is decided here, for every way to read: an OSError (a file system, a network
connection, a service) can be gone the next time, any other error is the program's own. Training treats the
first as it treats what an objective raises: the worker is replaced, and a second time in the same step is the
end. Must not know who tries again.
"""

from __future__ import annotations

from typing import final

from paceline.core.errors import UsageError


@final
class UnreadableDataError(UsageError):
    """Reading failed in a way that may be over the next time: the dataset raised an OSError."""

    fault = "platform"


def read_error(message: str, error: Exception, *, remedy: str, **facts: object) -> UsageError:
    """The error to raise from `error`, which is named at the end of the message."""
    kind = UnreadableDataError if isinstance(error, OSError) else UsageError
    return kind(f"{message}: {type(error).__name__}: {error}", remedy=remedy, **facts)
