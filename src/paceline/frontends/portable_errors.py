"""Errors of one rank that the others raise too. Imports no torch."""

from __future__ import annotations

import contextlib
import os

from paceline.core.errors import RankFailedError
from paceline.engines.local import memfd_pickle


def portable(error: BaseException) -> BaseException:
    """Return the error as it can travel to the other ranks."""
    if isinstance(error, SystemExit):
        return SystemExit(error.code)  # a run that was asked to stop
    if isinstance(error, KeyboardInterrupt):
        return KeyboardInterrupt(*error.args)
    with contextlib.suppress(Exception):
        file = memfd_pickle.dump(error)
        try:
            memfd_pickle.load(file)
        finally:
            os.close(file)
        return error
    return RankFailedError(f"rank 0 raised {type(error).__name__}: {error}", rank=0)
