"""Memory that begins on a page, so that the disk can read images of files by itself. Must not know torch."""

from __future__ import annotations

import mmap
from typing import Final

from paceline.core.errors import ResourceError

# Huge pages; and a state that grows a little does not need new memory each time.
STEP: Final = 2 << 20


def memory(nbytes: int) -> mmap.mmap:
    """At least `nbytes` of anonymous memory, in huge pages where the system gives them; untouched yet."""
    unit = STEP if nbytes >= STEP else mmap.PAGESIZE
    size = max(unit, -(-nbytes // unit) * unit)
    try:
        region = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, ValueError) as error:
        raise ResourceError(
            f"{size / 2**20:.0f} MiB of memory for a copy of the state cannot be had: {error}",
            remedy="give the job more memory: a rank keeps one copy of the share it saves",
        ) from error
    if unit == STEP:
        region.madvise(mmap.MADV_HUGEPAGE)
    return region
