"""Files that workers of other hosts leave, on their way from agent to supervisor: results, failure reports,
exceptions. In chunks, one behind the other; a chunk is sent when the one before it has left this process, so
that heartbeats of the same connection wait for a megabyte at most.

What arrives is unpickled by the caller of the run, as the files of local workers are: each chunk carries the
tag of a session that was keyed by the job's secret.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, final

from paceline.control.channel import Channel
from paceline.control.messages import WorkerFileChunk
from paceline.core import fd_messages
from paceline.core.errors import WireError
from paceline.core.sandbox_fallbacks import memory_file

CHUNK_BYTES: Final = 1 << 20
RESULT: Final = 0
_PARTS: Final = 3


@final
@dataclass
class _Sending:
    member: int
    part: int
    descriptor: int
    size: int
    offset: int = 0


@final
@dataclass
class SentFiles:
    """The agent's end. Files are the sender's until they are sent or `close` is called."""

    _files: deque[_Sending] = field(default_factory=deque)

    def add(self, member: int, returned: Sequence[int], failed: Sequence[int]) -> None:
        """Queue the files of a worker that has ended."""
        for part, descriptor in [*enumerate(returned[:1]), *enumerate(failed[: _PARTS - 1], 1)]:
            self._files.append(_Sending(member, part, descriptor, os.fstat(descriptor).st_size))
        fd_messages.close_all([*returned[1:], *failed[_PARTS - 1 :]])

    def restart(self) -> None:
        """Send from the beginning: what was sent on a connection that broke may not have arrived."""
        for file in self._files:
            file.offset = 0

    def holds(self, member: int) -> bool:
        """Return whether files of this worker are still to be sent."""
        return any(file.member == member for file in self._files)

    def send(self, channel: Channel) -> None:
        """Send as much as the connection takes now."""
        while self._files and not channel.wants_write and not channel.closed:
            file = self._files[0]
            data = os.pread(file.descriptor, CHUNK_BYTES, file.offset)
            channel.send(
                WorkerFileChunk(
                    member=file.member, part=file.part, size=file.size, offset=file.offset, data=data
                )
            )
            file.offset += len(data)
            if file.offset >= file.size:
                self._files.popleft()
                os.close(file.descriptor)

    def close(self) -> None:
        """Close what was not sent."""
        fd_messages.close_all([file.descriptor for file in self._files])
        self._files.clear()


@final
@dataclass
class ReceivedFiles:
    """The supervisor's end: memory files, by member and part, and the size that was announced."""

    _files: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)

    def add(self, chunk: WorkerFileChunk) -> None:
        """Append a chunk; the first one begins the file anew."""
        key = chunk.member, chunk.part
        if chunk.offset == 0:
            self._drop(key)
            self._files[key] = memory_file("paceline-result"), chunk.size
        descriptor, size = self._files.get(key, (-1, 0))
        have = os.fstat(descriptor).st_size if descriptor >= 0 else -1
        if chunk.part >= _PARTS or chunk.offset != have or have + len(chunk.data) > size:
            raise WireError(f"a chunk of worker {chunk.member}'s files that does not continue them")
        os.pwrite(descriptor, chunk.data, chunk.offset)

    def release(self, member: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the complete files of a worker's result and of its failure, which are the caller's then."""
        whole = {}
        for key in [key for key in self._files if key[0] == member]:
            descriptor, size = self._files[key]
            if os.fstat(descriptor).st_size == size:
                whole[key[1]] = descriptor
                del self._files[key]
            else:
                self._drop(key)
        returned = (whole.pop(RESULT),) if RESULT in whole else ()
        return returned, tuple(whole[part] for part in sorted(whole))

    def close(self) -> None:
        """Close all files."""
        for key in list(self._files):
            self._drop(key)

    def _drop(self, key: tuple[int, int]) -> None:
        if key in self._files:
            os.close(self._files.pop(key)[0])
