"""A small run as a program, in a process whose system calls, memory or network are really limited:

python -m tests.frontends.sandbox FOLDER WORKERS [limit ...]

Limits: `address-space=BYTES` (ulimit -v), `no-CALL` (a seccomp filter answers EPERM).
"""

from __future__ import annotations

import ctypes
import errno
import platform
import resource
import struct
import sys

_NUMBERS = {
    "x86_64": {"memfd_create": 319, "pidfd_open": 434},
    "aarch64": {"memfd_create": 279, "pidfd_open": 434},
}
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _FILTER = 38, 22, 2
_LOAD, _JUMP_IF, _RETURN = 0x20, 0x15, 0x06
_ERRNO, _ALLOW = 0x00050000, 0x7FFF0000


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def forbid(call: str) -> None:
    """From now on the call fails with EPERM in this process and in all that it starts."""
    number = _NUMBERS[platform.machine()][call]
    code = b"".join(
        struct.pack("HBBI", *instruction)
        for instruction in (
            (_LOAD, 0, 0, 0),
            (_JUMP_IF, 0, 1, number),
            (_RETURN, 0, 0, _ERRNO | errno.EPERM),
            (_RETURN, 0, 0, _ALLOW),
        )
    )
    memory = ctypes.create_string_buffer(code, len(code))
    program = _Program(4, ctypes.addressof(memory))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(
        _PR_SET_SECCOMP, _FILTER, ctypes.byref(program), 0, 0
    ):
        raise OSError(ctypes.get_errno(), "seccomp")


def main() -> None:
    folder, workers, *limits = sys.argv[1:]
    for limit in limits:
        name, _, value = limit.partition("=")
        if name == "address-space":
            resource.setrlimit(resource.RLIMIT_AS, (int(value), int(value)))
        else:
            forbid(name.removeprefix("no-"))

    import torch
    from torch import nn

    import paceline

    x = torch.randn(16, 3, generator=torch.Generator().manual_seed(0))
    trainer = paceline.Trainer(
        lambda: nn.Linear(3, 1),
        nn.MSELoss(),
        optimizer=lambda p: torch.optim.SGD(p, 0.1),
        config=paceline.TrainConfig(
            workers=int(workers),
            shards=2,
            global_batch=8,
            seed=3,
            threads=1,
            progress=False,
            run_dir=folder,
        ),
    )
    print(trainer.fit((x, x.sum(1, keepdim=True))).state_hash)


if __name__ == "__main__":
    main()
