"""The parent of a run's process: `python -I run_host.py EXIT WAKE LOCK COMMAND...`

It outlives the server, waits for the run, and writes the exit code where the next server finds it. The file
is made before the run starts and is then overwritten in place, so that a full disk does not lose the code.
LOCK is a descriptor that is locked: the lock says that the run lives, and goes on to the run itself, which
may outlive its parent.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from typing import Final

_WIDTH: Final = 24
_RUNNING: Final = "running"
NOT_STARTED: Final = 127
_SIGNALS: Final = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1}


def written(code: int | None) -> bytes:
    """Return the content of the file for an exit code; None: the run, whose parent this is, has not ended."""
    return f"{f'{_RUNNING} {os.getpid()}' if code is None else code:<{_WIDTH}}\n".encode()


def read_code(text: bytes) -> int | None:
    """Return the exit code in the file, negative for a signal; None where it was not written."""
    with suppress(ValueError):
        return int(text)
    return None


def read_group(text: bytes) -> int | None:
    """Return the process group of a run that has not ended: the number of its parent."""
    match text.split():
        case [state, number] if state == _RUNNING.encode() and number.isdigit():
            return int(number)
    return None


def _unblock_signals() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)


def main(exit_file: str, wake_pipe: str, lock: str, *command: str) -> int:
    """Run the command to its end."""
    # Handlers, and not SIG_IGN, which the run would inherit: what is sent to the whole group reaches the run,
    # and its parent stays to see the end.
    for number in _SIGNALS:
        signal.signal(number, lambda number, frame: None)
    # From the next line on the server knows whom to signal. A signal that comes before there is a run waits.
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    descriptor = os.open(exit_file, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    os.pwrite(descriptor, written(None), 0)
    os.fsync(descriptor)
    try:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, pass_fds=(int(lock),), preexec_fn=_unblock_signals
        )
    except OSError as error:
        print(f"{command[0]} cannot be started: {error.strerror}", file=sys.stderr, flush=True)
        code = NOT_STARTED
    else:
        # Sent before the run was there, or to both: a run takes the second for the first.
        for number in signal.sigpending() & _SIGNALS:
            child.send_signal(number)
        _unblock_signals()
        code = child.wait()
    os.pwrite(descriptor, written(code), 0)
    os.fsync(descriptor)
    with suppress(OSError):  # no server is there now, or it looks by itself
        os.write(os.open(wake_pipe, os.O_WRONLY | os.O_NONBLOCK), b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
