"""Errors of reading, in the user's words: what could not be read, in which object, and whether to try again.

Whether trying again may help is decided here, for every way to read: an error of the surroundings (a file
system, a network connection, a service and its client library, memory) can be gone the next time. An error
that Python raises for a mistake in the code is the program's own. Training treats the first as it treats what
an objective raises: the worker is replaced, and a second time in the same step is the end.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Final, final

from paceline.core.errors import PacelineError, ResourceError, UsageError

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

_SHARED: Final = "/dev/shm"
# How torch and the kernel put it: no room for a new file, or a page of one that could not be had.
_SHARED_IS_FULL: Final = ("shared memory(shm)", "insufficient shared memory", "Bus error")


@final
class UnreadableDataError(UsageError):
    """Reading failed in a way that may be over the next time."""

    fault = "platform"


def read_error(message: str, error: Exception, *, remedy: str, **facts: object) -> UsageError:
    """Return the error to raise from `error`, which is named at the end of the message."""
    # Some errors are both: a certificate that cannot be verified is an OSError and a ValueError.
    is_mistake = isinstance(error, _MISTAKES) and not isinstance(error, OSError)
    kind = UsageError if is_mistake else UnreadableDataError
    return kind(f"{message}: {type(error).__name__}: {error}", remedy=remedy, **facts)


def collated(
    collate: Callable[[Any], Any], samples: Any, what: Callable[[], str], numbers: tuple[int, ...] = ()
) -> Any:
    """Return the samples as one batch; an error calls them `what()` and has their numbers as a fact."""
    try:
        return collate(samples)
    except PacelineError:
        raise
    except Exception as error:
        raise shared_memory_full(error) or read_error(
            f"{what()} cannot be put into one batch",
            error,
            remedy="give samples of equal shapes and types, or pass a DataLoader with a collate_fn",
            **({"samples": numbers} if numbers else {}),
        ) from error


def shared_memory_full(error: BaseException) -> ResourceError | None:
    """Return an error with a remedy if `error` is for want of shared memory, through which loader processes
    send their batches: a container has 64 MB of it by default."""
    if not any(words in str(error) for words in _SHARED_IS_FULL):
        return None
    try:
        found = os.statvfs(_SHARED)
        size = f" ({found.f_blocks * found.f_frsize / 2**20:.0f} MiB)"
    except OSError:
        size = ""
    return ResourceError(
        f"{_SHARED}{size} is full: the worker processes of a DataLoader hand their batches over there "
        f"({error})",
        remedy="make it larger (docker run --shm-size=2g, Kubernetes: an emptyDir with medium: Memory at "
        "/dev/shm), use fewer workers or a smaller prefetch_factor, or num_workers=0",
    )


def name_of(data: Any) -> str:
    """Return the name of a function or class, else the class of an object."""
    return getattr(data, "__qualname__", None) or type(data).__qualname__


def assigned_name(source: Any) -> str:
    """Return the class of what the user gave, not of the source that Paceline wraps it in."""
    for attribute in ("dataset", "_dataset"):
        inner = getattr(source, attribute, None)
        if inner is not None:
            return name_of(inner)
    columns = getattr(source, "columns", None)
    if columns is not None:
        return f"the data ({', '.join(sorted({type(column).__qualname__ for column in columns}))})"
    return type(source).__qualname__
