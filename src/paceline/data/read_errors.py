"""What becomes of an error that a dataset's own code raised.

Whether trying again may help is decided here, for every way to read: an error of the surroundings (a file
system, a network connection, a service and its client library, memory) can be gone the next time. An error
that Python raises for a mistake in the code is the program's own. Training treats the first as it treats what
an objective raises: the worker is replaced, and a second time in the same step is the end. Must not know who
tries again.
"""

from __future__ import annotations

from typing import Final, final

from paceline.core.errors import UsageError

_MISTAKES: Final = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    NameError,
    NotImplementedError,
    SyntaxError,
    TypeError,
    ValueError,
)


@final
class UnreadableDataError(UsageError):
    """Reading failed in a way that may be over the next time."""

    fault = "platform"


def read_error(message: str, error: Exception, *, remedy: str, **facts: object) -> UsageError:
    """The error to raise from `error`, which is named at the end of the message."""
    # Some errors are both: a certificate that cannot be verified is an OSError and a ValueError.
    is_mistake = isinstance(error, _MISTAKES) and not isinstance(error, OSError)
    kind = UsageError if is_mistake else UnreadableDataError
    return kind(f"{message}: {type(error).__name__}: {error}", remedy=remedy, **facts)
