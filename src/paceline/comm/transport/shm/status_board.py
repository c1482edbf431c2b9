"""Status board: one row per rank, written by that rank alone and read by all.

A row holds the rank's tick and bells (words to wait on), its process, its state, and, while it waits, its
status as text. Reading a row never blocks; a row that changes while it is read is read again.
"""

from __future__ import annotations

import copy
import json
import os
import select
import threading
from collections.abc import Sequence
from typing import Any

from paceline.comm.call_status import PeerState, RankState, Status
from paceline.comm.transport.shm import futex
from paceline.comm.transport.wait_watch import LOOK_SECONDS, OpenWaits, StatusChannel
from paceline.core.errors import GroupInterruptedError
from paceline.core.process_state import is_stopped, start_time
from paceline.core.shm_segment_layout import SegmentLayout

# 32-bit words of a row; words that others wait on have a cache line of their own.
TICK, BELL = 0, 16  # BELL + 16 * lane
STATE, PID, STATUS_VERSION, STATUS_LENGTH, FAILURE_LENGTH, REACHES = 64, 65, 66, 67, 68, 69
# 64-bit words.
START_TIME, WORD = 35, 36  # WORD: an address in the rank's memory, what stands there, another address
SIGNATURES = 40  # two entries of four, one per parity of the window call, see window.py
_STATUS_AT, _STATUS_MAX = 1024, 3072
_FAILURE_AT, _FAILURE_MAX = 4096, 4096


class StatusBoard:
    """This rank's row, and the rows of all ranks to read."""

    def __init__(
        self,
        memory: memoryview,
        address: int,
        layout: SegmentLayout,
        rank: int,
        labels: Sequence[int],
        *,
        same_process: bool = False,
    ) -> None:
        self.rank = rank
        self.labels = labels
        self.enclosing: StatusChannel | None = None
        self.world_size = layout.world_size
        self._memory = memory
        self._layout = layout
        self._same_process = same_process
        rows = memory[layout.row(0) : layout.row(layout.world_size)]
        self.words = rows.cast("I")
        self.longs = rows.cast("Q")
        self._row_words = (layout.row(1) - layout.row(0)) // 4
        self._address = address + layout.row(0)
        self._pidfds: dict[int, int | None] = {}
        self._ends = select.poll()  # becomes ready when the process behind a pidfd ends
        self._gone: set[int] = set()  # ranks whose process was never found, or is another one now
        # Every rank that waits looks at all others: in a large group less often.
        crowd = max(layout.world_size / 16, 1.0)
        self._naps = 4 if crowd == 1.0 else 1
        self._nap_seconds = LOOK_SECONDS / self._naps * min(crowd * crowd, 25.0)
        self._known: dict[int, tuple[int, Status | None]] = {}
        self._life = threading.RLock()  # one thread may leave while another looks around
        self._left = False
        self._waits = OpenWaits()
        self.interrupted: GroupInterruptedError | None = None

    def check_open(self) -> None:
        """Raise if another thread has ended this rank's waits."""
        if self.interrupted is not None:
            raise copy.copy(self.interrupted)

    def sleep(self, rank: int, index: int, value: int) -> None:
        """Return when a rank's word no longer holds `value`, when woken, when a rank's process ends, or
        when it is time to look around."""
        address, at = self.address(rank, index), self.word(rank, index)
        # `value` is what the caller saw before it decided to sleep: a store since then ends the first nap at
        # once. A peer that is killed stores nothing, hence short naps with a look at the pidfds in between.
        for _ in range(self._naps):
            futex.wait(address, value, self._nap_seconds)
            if self.words[at] != value or self.interrupted is not None or self._some_rank_died():
                return

    def _some_rank_died(self) -> bool:
        if self._same_process:
            return False
        with self._life:
            if self._left:
                return True
            # Ranks that have entered since the last look; then one poll for all processes.
            for rank in range(self.world_size):
                if rank not in self._pidfds and rank != self.rank and self._runs(rank):
                    self._alive(rank, self.words[self.word(rank, PID)])
            ended = {pidfd for pidfd, _ in self._ends.poll(0)}
            if not ended and not self._gone:
                return False
            # The pidfd of a rank that left in good order stays ready for good. Only a process that ended
            # while its row says RUNNING was lost.
            gone = self._gone | {rank for rank, pidfd in self._pidfds.items() if pidfd in ended}
            return any(self._runs(rank) for rank in gone)

    def _runs(self, rank: int) -> bool:
        return self.words[self.word(rank, STATE)] == RankState.RUNNING.value

    def word(self, rank: int, index: int) -> int:
        """Return the position in `words` of a rank's word."""
        return rank * self._row_words + index

    def long(self, rank: int, index: int) -> int:
        return rank * self._row_words // 2 + index

    def address(self, rank: int, index: int) -> int:
        return self._address + self.word(rank, index) * 4

    def enter(self) -> None:
        # The state last (`_set_state` puts a fence before it): a peer that sees RUNNING looks for the process
        # by its number and start time, and would take this rank for dead without them.
        pid = os.getpid()
        self.longs[self.long(self.rank, START_TIME)] = start_time(pid)
        self.words[self.word(self.rank, PID)] = pid
        self._set_state(RankState.RUNNING)

    def leave(self, failure: dict[str, Any] | None) -> None:
        """Publish that this rank is gone, or why it fails; a second call does nothing."""
        with self._life:
            if self._left:
                return
            # The state comes last: a peer that sees FAILED finds the reason, and no status of a rank that has
            # left. `_left` keeps other threads of this rank from posting again and from the closed pidfds.
            if failure is not None:
                self._write(_FAILURE_AT, _FAILURE_MAX, FAILURE_LENGTH, failure)
            self._post(None)
            self._left = True
            self._set_state(RankState.LEFT if failure is None else RankState.FAILED)
            for pidfd in self._pidfds.values():
                if pidfd is not None:
                    self._ends.unregister(pidfd)
                    os.close(pidfd)
            self._pidfds.clear()
        # Peers sleep on this rank's tick or on their own bells, its other threads on its bells: a wake-up
        # cuts their nap short.
        for index in (TICK, BELL, BELL + 16):
            futex.wake(self.address(self.rank, index))
        for peer in range(self.world_size):
            for index in (BELL, BELL + 16):
                futex.wake(self.address(peer, index))

    def post(self, wait: object, status: Status | None) -> None:
        with self._life:
            shown = self._waits.put(wait, status)
            if not self._left:
                self._post(shown)

    def forget(self, wait: object) -> None:
        with self._life:
            self._waits.drop(wait)

    def _post(self, status: Status | None) -> None:
        # A sequence lock with one writer: the version is odd while the status changes. A peer reads at any
        # moment and never blocks this rank; it believes what it read only if the version was even and the
        # same before and after (`_status`). The fences keep the status between the two stores of the version.
        version = self.word(self.rank, STATUS_VERSION)
        self.words[version] = (self.words[version] + 1) & 0xFFFFFFFF
        futex.fence()
        if status is None:
            self.words[self.word(self.rank, STATUS_LENGTH)] = 0
        else:
            self._write(_STATUS_AT, _STATUS_MAX, STATUS_LENGTH, status.to_plain())
        futex.fence()
        self.words[version] = (self.words[version] + 1) & 0xFFFFFFFF

    def peer(self, rank: int) -> PeerState:
        state = RankState(self.words[self.word(rank, STATE)])
        pid = self.words[self.word(rank, PID)]
        if state is RankState.FAILED:
            failure = self._read(rank, _FAILURE_AT, FAILURE_LENGTH) or {"kind": "", "text": "no reason given"}
            return PeerState(state, None, failure, pid)
        if state is RankState.RUNNING and rank != self.rank and not self._alive(rank, pid):
            # It may have left in good order between the two readings.
            if RankState(self.words[self.word(rank, STATE)]) is not RankState.RUNNING:
                return self.peer(rank)
            return PeerState(RankState.DEAD, None, {"kind": "", "text": f"process {pid} is gone"}, pid)
        status = self._status(rank)
        if status is None and rank != self.rank and state is RankState.RUNNING and is_stopped(pid):
            return PeerState(state, None, {"kind": "", "text": f"its process {pid} is stopped"}, pid)
        return PeerState(state, status, None, pid)

    def is_gone(self, rank: int) -> bool:
        """Return whether a rank will never do anything again: it left, failed, or its process has ended."""
        if RankState(self.words[self.word(rank, STATE)]) in (RankState.LEFT, RankState.FAILED):
            return True
        # By /proc and not by a pidfd: an interrupt has closed those, and the thread that it ends asks this.
        began = self.longs[self.long(rank, START_TIME)]
        return bool(began) and start_time(self.words[self.word(rank, PID)]) != began

    def posted(self) -> Status | None:
        """Return what this rank itself has posted; None while it does not wait."""
        self.check_open()
        return self._status(self.rank)

    def peers(self) -> dict[int, PeerState]:
        self.check_open()
        return {rank: self.peer(rank) for rank in range(self.world_size)}

    def _status(self, rank: int) -> Status | None:
        version = self.word(rank, STATUS_VERSION)
        for _ in range(100):
            before = self.words[version]
            known, status = self._known.get(rank, (-1, None))
            if known == before:
                return status
            plain = self._read(rank, _STATUS_AT, STATUS_LENGTH)
            futex.fence()
            if before % 2 == 0 and self.words[version] == before:
                status = None if plain is None else Status.from_plain(plain)
                self._known[rank] = (before, status)
                return status
        # Changed each time, or the rank was killed in the middle of a post: `peer` finds its process gone.
        return None

    def _set_state(self, state: RankState) -> None:
        futex.fence()
        self.words[self.word(self.rank, STATE)] = state.value

    def _write(self, at: int, limit: int, length_word: int, plain: Any) -> None:
        data = json.dumps(plain).encode()
        if len(data) > limit:
            data = json.dumps(_shortened(plain)).encode()
        start = self._layout.row(self.rank) + at
        self._memory[start : start + len(data)] = data
        self.words[self.word(self.rank, length_word)] = len(data)

    def _read(self, rank: int, at: int, length_word: int) -> Any:
        length = self.words[self.word(rank, length_word)]
        if length == 0:
            return None
        start = self._layout.row(rank) + at
        try:
            return json.loads(bytes(self._memory[start : start + length]))
        except ValueError:
            return None  # torn by a concurrent write; the caller compares versions

    def _alive(self, rank: int, pid: int) -> bool:
        if self._same_process:
            return True
        with self._life:
            if self._left:
                return True
            if rank in self._gone:
                return False
            if rank not in self._pidfds:
                # Opened first, compared second: where the start time is that of the rank, the descriptor is,
                # too, and no later process with the number can take its place.
                try:
                    opened = self._pidfds[rank] = os.pidfd_open(pid)
                    self._ends.register(opened, select.POLLIN)
                except ProcessLookupError:
                    self._gone.add(rank)
                    return False
                except OSError:
                    self._pidfds[rank] = None  # an old kernel, or a sandbox: look the process up each time
                if start_time(pid) != self.longs[self.long(rank, START_TIME)]:
                    self._gone.add(rank)  # the number was given to another process
                    return False
            pidfd = self._pidfds[rank]
            if pidfd is None:
                return start_time(pid) == self.longs[self.long(rank, START_TIME)]
            poll = select.poll()
            poll.register(pidfd, select.POLLIN)
            return not poll.poll(0)


def _shortened(plain: Any) -> Any:
    if isinstance(plain, str):
        return plain if len(plain) <= 300 else plain[:297] + "..."
    if isinstance(plain, list):
        return [_shortened(part) for part in plain[:64]]
    if isinstance(plain, dict):
        return {key: _shortened(value) for key, value in list(plain.items())[:16]}
    return plain
