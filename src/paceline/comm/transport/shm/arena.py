"""Memory for tensors that every rank of the group can reach: this rank's own part of the segment, handed out
and taken back.

First fit over a sorted list of free ranges; ranges given back return their pages to the system. One owner,
no locks between ranks.
"""

from __future__ import annotations

import bisect
import contextlib
import mmap
import threading
import weakref

import torch
from torch import Tensor

from paceline.core.errors import ResourceError

_ALIGN = 4096  # whole pages, so that a freed range can be returned


class Arena:
    def __init__(self, memory: memoryview, mapping: mmap.mmap, start: int, size: int) -> None:
        self._memory = memory
        self._mapping = mapping
        self._start = start
        self._size = size
        self._free: list[tuple[int, int]] = [(start, size)]  # (offset, length), sorted
        self._lock = threading.Lock()
        self._retired = False

    @property
    def free_ranges(self) -> tuple[tuple[int, int], ...]:
        """Return (offset, length) of what is not handed out, in order; neighbours are one range."""
        return tuple(self._free)

    def retire(self) -> None:
        """Keep pages until the segment itself goes: the group broke, and a peer may still read them."""
        self._retired = True

    def empty(self, nbytes: int) -> Tensor:
        """Return a uint8 tensor in the segment; its range is free again when the last view of it is gone."""
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        length = -(-nbytes // _ALIGN) * _ALIGN
        offset = self._take(length)
        block = self._memory[offset : offset + nbytes]
        weakref.finalize(block, self._give_back, offset, length).atexit = False
        return torch.frombuffer(block, dtype=torch.uint8)

    def _take(self, length: int) -> int:
        with self._lock:
            for index, (offset, room) in enumerate(self._free):
                if room >= length:
                    if room == length:
                        del self._free[index]
                    else:
                        self._free[index] = (offset + length, room - length)
                    return offset
        raise ResourceError(
            f"no room for {length} bytes of shared memory: {self._size} are set aside for this rank",
            remedy="raise the limit on address space where there is one (`ulimit -v`), use fewer workers, or "
            "free tensors of shared_empty()",
        )

    def _give_back(self, offset: int, length: int) -> None:
        # MADV_REMOVE frees the pages of the file behind the mapping; without it they stay until the group
        # ends.
        if not self._retired and not self._mapping.closed and hasattr(mmap, "MADV_REMOVE"):
            # A file that takes a memory file's place may be of a file system that cannot do it.
            with contextlib.suppress(OSError):
                self._mapping.madvise(mmap.MADV_REMOVE, offset, length)
        with self._lock:
            index = bisect.bisect(self._free, (offset, length))
            if index < len(self._free) and self._free[index][0] == offset + length:
                length += self._free.pop(index)[1]
            if index > 0 and sum(self._free[index - 1]) == offset:
                index -= 1
                before, room = self._free.pop(index)
                offset, length = before, room + length
            self._free.insert(index, (offset, length))


def map_segment(fd: int, size: int) -> mmap.mmap:
    """Map the whole segment into this process's address space; memory is used only where it is written."""
    try:
        mapping = mmap.mmap(fd, size, flags=mmap.MAP_SHARED | getattr(mmap, "MAP_NORESERVE", 0))
    except (OSError, ValueError, OverflowError) as error:
        raise ResourceError(
            f"cannot map {size >> 20} MiB of address space for the group's shared memory: {error}",
            remedy="lift or raise the limit on address space (`ulimit -v unlimited`), or use fewer workers",
        ) from error
    if hasattr(mmap, "MADV_DONTDUMP"):
        mapping.madvise(mmap.MADV_DONTDUMP)
    return mapping
