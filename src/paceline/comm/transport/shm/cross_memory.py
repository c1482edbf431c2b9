"""Read and write a peer's ordinary memory: one copy, straight between its tensor and ours, by the kernel
(process_vm_readv, process_vm_writev).

Works between processes of one user where the kernel allows it; whether it does is tried out, not guessed:
every rank publishes the address of a word with a random value, and every peer reads it. Where a process may
be read only by its relatives (Yama's scope 1), a rank allows the processes that its own parent started, its
sibling ranks, and no others.
"""

from __future__ import annotations

import ctypes
import os
import secrets
from pathlib import Path
from typing import Any

_PR_SET_PTRACER = 0x59616D61
_libc = ctypes.CDLL(None, use_errno=True)


class _Iovec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


class CrossMemory:
    """Access of this rank to the memory of one group's peers."""

    def __init__(self) -> None:
        self.word = ctypes.c_uint64(secrets.randbits(63) | 1)
        self._local, self._remote = _Iovec(), _Iovec()
        self._local_at, self._remote_at = ctypes.byref(self._local), ctypes.byref(self._remote)
        self._read = _system_call("process_vm_readv")
        self._write = _system_call("process_vm_writev")

    @property
    def address(self) -> int:
        return ctypes.addressof(self.word)

    def allow_siblings(self) -> None:
        """Allow this process's siblings where only relatives may read it: its parent and all descendants."""
        scope = Path("/proc/sys/kernel/yama/ptrace_scope")
        if scope.exists() and scope.read_text().strip() == "1":
            _libc.prctl(_PR_SET_PTRACER, ctypes.c_ulong(os.getppid()), 0, 0, 0)

    def try_word(self, pid: int, address: int, value: int) -> bool:
        """Return whether the peer's published word can be read and holds what was published."""
        if self._read is None or self._write is None:
            return False
        word = ctypes.c_uint64()
        return self.read(pid, address, ctypes.addressof(word), 8) == 8 and word.value == value

    def read(self, pid: int, address: int, into: int, nbytes: int) -> int:
        """Copy the peer's memory to `into`; return how many bytes came, -1 on refusal."""
        return self._copy(self._read, pid, address, into, nbytes)

    def write(self, pid: int, address: int, source: int, nbytes: int) -> int:
        """Copy `source` into the peer's memory; return how many bytes went, -1 on refusal."""
        return self._copy(self._write, pid, address, source, nbytes)

    def _copy(self, call: Any, pid: int, address: int, here: int, nbytes: int) -> int:
        local, remote = self._local, self._remote
        local.base, local.length = here, nbytes
        remote.base, remote.length = address, nbytes
        return int(call(pid, self._local_at, 1, self._remote_at, 1, 0))


def _system_call(name: str) -> Any:
    call = getattr(_libc, name, None)
    if call is not None:
        call.restype = ctypes.c_ssize_t
        vector = (ctypes.c_void_p, ctypes.c_ulong)
        call.argtypes = (ctypes.c_int, *vector, *vector, ctypes.c_ulong)
    return call
