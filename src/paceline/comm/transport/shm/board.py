"""Who does what: one row per rank, written by that rank alone and read by all.

A row holds the rank's tick and bells (words to wait on), its process, its state, and, while it waits, its
status as text. Reading a row never blocks; a row that changes while it is read is read again. Knows calls
and statuses, not algorithms.
"""

from __future__ import annotations

import copy
import json
import os
import select
import threading
from typing import Any

from paceline.comm.calls import Peer, RankState, Status
from paceline.comm.processes import is_stopped, start_time
from paceline.comm.transport.shm import sync
from paceline.comm.transport.shm.layout import Layout
from paceline.comm.transport.watch import LOOK_SECONDS, Widen
from paceline.core.errors import GroupInterruptedError

# 32-bit words of a row; words that others wait on have a cache line of their own.
TICK, BELL = 0, 16  # BELL + 16 * lane
STATE, PID, STATUS_VERSION, STATUS_LENGTH, FAILURE_LENGTH, REACHES = 64, 65, 66, 67, 68, 69
# 64-bit words.
START_TIME, WORD = 35, 36  # WORD: an address in the rank's memory, what stands there, another address
SIGNATURES = 40  # two entries of four, one per parity of the window call, see window.py
_STATUS_AT, _STATUS_MAX = 1024, 3072
_FAILURE_AT, _FAILURE_MAX = 4096, 4096


class Board:
    """This rank's row, and a reading of everybody's."""

    def __init__(
        self, memory: memoryview, address: int, layout: Layout, rank: int, *, same_process: bool = False
    ) -> None:
        self.rank = rank
        self.widen: Widen | None = None  # for ranks that are part of a larger group, see watch.Watch
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
        # Everybody who waits looks at everybody: in a large group less often.
        crowd = max(layout.world_size / 16, 1.0)
        self._naps = 4 if crowd == 1.0 else 1
        self._nap_seconds = LOOK_SECONDS / self._naps * min(crowd * crowd, 25.0)
        self._known: dict[int, tuple[int, Status | None]] = {}
        self._life = threading.RLock()  # one thread may leave while another looks around
        self._left = False
        self.interrupted: GroupInterruptedError | None = None

    def check_open(self) -> None:
        """Raises if another thread has ended this rank's waits."""
        if self.interrupted is not None:
            raise copy.copy(self.interrupted)

    def sleep(self, rank: int, index: int, value: int) -> None:
        """Returns when a rank's word no longer holds `value`, when woken, when a rank's process ends, or
        when it is time to look around."""
        address, at = self.address(rank, index), self.word(rank, index)
        for _ in range(self._naps):
            sync.wait(address, value, self._nap_seconds)
            if self.words[at] != value or self.interrupted is not None or self._somebody_died():
                return

    def _somebody_died(self) -> bool:
        if self._same_process:
            return False
        with self._life:
            if self._left:
                return True
            for rank in range(self.world_size):
                if rank not in self._pidfds and rank != self.rank and self._runs(rank):
                    self._lives(rank, self.words[self.word(rank, PID)])
            ended = {pidfd for pidfd, _ in self._ends.poll(0)}
            if not ended and not self._gone:
                return False
            gone = self._gone | {rank for rank, pidfd in self._pidfds.items() if pidfd in ended}
            return any(self._runs(rank) for rank in gone)

    def _runs(self, rank: int) -> bool:
        return self.words[self.word(rank, STATE)] == RankState.RUNNING.value

    def word(self, rank: int, index: int) -> int:
        """The position in `words` of a rank's word."""
        return rank * self._row_words + index

    def long(self, rank: int, index: int) -> int:
        return rank * self._row_words // 2 + index

    def address(self, rank: int, index: int) -> int:
        return self._address + self.word(rank, index) * 4

    def enter(self) -> None:
        pid = os.getpid()
        self.longs[self.long(self.rank, START_TIME)] = start_time(pid)
        self.words[self.word(self.rank, PID)] = pid
        self._set_state(RankState.RUNNING)

    def leave(self, failure: dict[str, Any] | None) -> None:
        """Says that this rank is gone, or why it fails; a second call does nothing."""
        with self._life:
            if self._left:
                return
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
        for index in (TICK, BELL, BELL + 16):
            sync.wake(self.address(self.rank, index))
        for peer in range(self.world_size):
            for index in (BELL, BELL + 16):
                sync.wake(self.address(peer, index))

    def post(self, status: Status | None) -> None:
        """Lets the others read what this rank waits for; None: it goes on."""
        with self._life:
            if not self._left:
                self._post(status)

    def _post(self, status: Status | None) -> None:
        version = self.word(self.rank, STATUS_VERSION)
        self.words[version] = (self.words[version] + 1) & 0xFFFFFFFF
        sync.fence()
        if status is None:
            self.words[self.word(self.rank, STATUS_LENGTH)] = 0
        else:
            self._write(_STATUS_AT, _STATUS_MAX, STATUS_LENGTH, status.to_plain())
        sync.fence()
        self.words[version] = (self.words[version] + 1) & 0xFFFFFFFF

    def peer(self, rank: int) -> Peer:
        state = RankState(self.words[self.word(rank, STATE)])
        pid = self.words[self.word(rank, PID)]
        if state is RankState.FAILED:
            failure = self._read(rank, _FAILURE_AT, FAILURE_LENGTH) or {"kind": "", "text": "no reason given"}
            return Peer(state, None, failure, pid)
        if state is RankState.RUNNING and rank != self.rank and not self._alive(rank, pid):
            # It may have left in good order between the two readings.
            if RankState(self.words[self.word(rank, STATE)]) is not RankState.RUNNING:
                return self.peer(rank)
            return Peer(RankState.DEAD, None, {"kind": "", "text": f"process {pid} is gone"}, pid)
        status = self._status(rank)
        if status is None and rank != self.rank and state is RankState.RUNNING and is_stopped(pid):
            return Peer(state, None, {"kind": "", "text": f"its process {pid} is stopped"}, pid)
        return Peer(state, status, None, pid)

    def is_gone(self, rank: int) -> bool:
        """Whether a rank will never do anything again: it left, failed, or its process has ended."""
        if RankState(self.words[self.word(rank, STATE)]) in (RankState.LEFT, RankState.FAILED):
            return True
        began = self.longs[self.long(rank, START_TIME)]
        return bool(began) and start_time(self.words[self.word(rank, PID)]) != began

    def posted(self) -> Status | None:
        """What this rank itself has posted; None while it does not wait."""
        self.check_open()
        return self._status(self.rank)

    def peers(self) -> dict[int, Peer]:
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
            sync.fence()
            if before % 2 == 0 and self.words[version] == before:
                status = None if plain is None else Status.from_plain(plain)
                self._known[rank] = (before, status)
                return status
        return None

    def _set_state(self, state: RankState) -> None:
        sync.fence()
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
            return self._left or self._lives(rank, pid)

    def _lives(self, rank: int, pid: int) -> bool:
        if rank in self._gone:
            return False
        if rank not in self._pidfds:
            try:
                opened = self._pidfds[rank] = os.pidfd_open(pid)
                self._ends.register(opened, select.POLLIN)
            except ProcessLookupError:
                self._gone.add(rank)
                return False
            except OSError:
                self._pidfds[rank] = (
                    None  # no pidfd here (old kernel, sandbox): look the process up each time
                )
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
