"""Save a checkpoint from one process, and return when it is valid: for callers that wait for it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from torch import Tensor

from paceline.checkpoint.manifest import CheckpointInfo
from paceline.checkpoint.store import CheckpointStore
from paceline.checkpoint.writer import BackgroundWriter, WriteResult
from paceline.core.errors import InternalError, PacelineError


def save_whole(
    store: CheckpointStore, tensors: Mapping[str, Tensor], state: dict[str, Any], info: CheckpointInfo
) -> int:
    """Write and commit a version that holds all of `tensors` and the plain state; return its number."""
    version = store.next_version(info.run)
    with BackgroundWriter(store) as writer:
        try:
            writer.save(version, tensors, state)
            records = _finished(writer).records
            writer.commit(version, records, info)
            _finished(writer)
        except BaseException:
            # The error itself is the one to show; what is left of the version is no version.
            with suppress(PacelineError, OSError):
                store.discard(version)
            raise
    return version


def _finished(writer: BackgroundWriter) -> WriteResult:
    done = writer.wait()
    if done is None:
        raise InternalError("the writer of a checkpoint has nothing under way")
    if done.error is not None:
        raise done.error
    return done
