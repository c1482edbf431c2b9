"""Layout of a group's shared segment. Plain arithmetic; must not import torch, the launcher uses it.

    header | a board row per rank | message rings (2 lanes, one per ordered pair) | small slots | staging |
    results | an arena per rank

The file is sparse: address space is generous, memory is used only where something was written.
"""

from __future__ import annotations

import os
import resource
import struct
from dataclasses import dataclass

from paceline.core.errors import ResourceError, UsageError
from paceline.core.sandbox_fallbacks import memory_file
from paceline.core.wording import counted

MAGIC = b"PACELINE"
VERSION = 1
PAGE = 4096
ROW_BYTES = 8192
LANES = 2
RING_HEADER = 128
MAX_WORLD = 4096
LEAST_ARENA = 16 << 20
_SHARE_OF_LIMIT = 4
_HEADER = struct.Struct("<8sIIQ")


@dataclass(frozen=True)
class SegmentLayout:
    """Offsets into a segment for `world_size` ranks, each with an arena of `arena_bytes`."""

    world_size: int
    arena_bytes: int

    @property
    def ring_bytes(self) -> int:
        return 256 * 1024 if self.world_size <= 8 else 64 * 1024

    @property
    def small_bytes(self) -> int:
        """The size up to which every rank folds everything: more than its share of work, one barrier less."""
        return max(64 * 1024, min(1 << 20, _power_below((4 << 20) // self.world_size)))

    @property
    def stage_bytes(self) -> int:
        """The size of one rank's staging slot; all slots together should stay in a shared cache."""
        return max(64 * 1024, min(1 << 20, _power_below((8 << 20) // self.world_size)))

    def row(self, rank: int) -> int:
        return PAGE + rank * ROW_BYTES

    def ring(self, lane: int, source: int, dest: int) -> int:
        pair = (lane * self.world_size + source) * self.world_size + dest
        return self._rings + pair * (RING_HEADER + self.ring_bytes)

    @property
    def _rings(self) -> int:
        return self.row(self.world_size)

    @property
    def small(self) -> int:
        return _page_up(self._rings + LANES * self.world_size**2 * (RING_HEADER + self.ring_bytes))

    @property
    def staging(self) -> int:
        return _page_up(self.small + 2 * self.world_size * self.small_bytes)

    @property
    def results(self) -> int:
        return _page_up(self.staging + 3 * self.world_size * self.stage_bytes)

    def arena(self, rank: int) -> int:
        return _page_up(self.results + 3 * self.stage_bytes) + rank * self.arena_bytes

    @property
    def total(self) -> int:
        return self.arena(self.world_size)


def create_segment(world_size: int, arena_bytes: int | None = None) -> int:
    """Return the descriptor of a new segment for a group; the caller passes it to the ranks and closes it."""
    check_world_size(world_size)
    layout = SegmentLayout(world_size, usual_arena(world_size) if arena_bytes is None else arena_bytes)
    fd = -1
    try:
        fd = memory_file("paceline")
        os.ftruncate(fd, layout.total)
    except (AttributeError, OSError) as error:
        if fd >= 0:
            os.close(fd)
        raise ResourceError(
            f"no shared memory for {counted(world_size, 'rank')}: {error}",
            remedy="shared memory needs Linux, a free file descriptor and no limit on the size of files (see "
            "`ulimit -n`, `ulimit -f`)",
        ) from error
    os.pwrite(fd, _HEADER.pack(MAGIC, VERSION, world_size, layout.total), 0)
    return fd


def read_segment(fd: int, world_size: int) -> SegmentLayout:
    """Return the layout of an existing segment, after checking that it is one and for how many ranks."""
    raw = os.pread(fd, _HEADER.size, 0)
    if len(raw) < _HEADER.size or raw[:8] != MAGIC:
        raise UsageError(
            "this file descriptor is not a Paceline segment",
            remedy="pass the descriptor made by create_segment()",
        )
    _, version, ranks, total = _HEADER.unpack(raw)
    if (version, ranks) != (VERSION, world_size):
        raise UsageError(
            f"the segment was made for {counted(ranks, 'rank')} (layout {version}), not for {world_size} "
            f"(layout {VERSION})",
            remedy="start all ranks of a group with the same world_size and the same Paceline version",
        )
    return SegmentLayout(world_size, (total - SegmentLayout(world_size, 0).total) // world_size)


def usual_arena(world_size: int) -> int:
    """Return the bytes of address space for one rank's tensors: more than there is memory, since only what is
    written costs any; a part of what is allowed where the address space is limited (`ulimit -v`)."""
    most = 256 << 30 if world_size <= 64 else 16 << 30
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return most
    # Every rank maps the arenas of all, and while a group is replaced those of two groups.
    return max(LEAST_ARENA, min(most, limit // _SHARE_OF_LIMIT // world_size // PAGE * PAGE))


def check_world_size(world_size: object) -> None:
    if not isinstance(world_size, int) or isinstance(world_size, bool) or not 1 <= world_size <= MAX_WORLD:
        raise UsageError(
            f"world_size={world_size!r}", remedy=f"world_size is a whole number from 1 to {MAX_WORLD}"
        )


def _page_up(offset: int) -> int:
    return -(-offset // PAGE) * PAGE


def _power_below(number: int) -> int:
    return 1 << (max(number, 1).bit_length() - 1)
