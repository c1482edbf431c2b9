"""The supervisor process: takes the job from its caller, looks after it until it is over, ends.

Started by `client` in a session of its own: Ctrl-C at the terminal does not reach it. Never imports torch.
"""

from __future__ import annotations

import gc
import os
import socket
import sys
import traceback
from pathlib import Path
from typing import NoReturn

from paceline.core.control import address, crew
from paceline.core.errors import PacelineError
from paceline.elastic import job
from paceline.elastic.supervisor import Supervisor, raise_file_limit
from paceline.engines.local import client, protocol


def main(descriptor: int) -> NoReturn:
    """Look after one job; the caller is at the other end of this socket."""
    code = 1
    caller = socket.socket(fileno=descriptor)
    try:
        raise_file_limit()
        _serve(caller)
        code = 0
    except PacelineError as error:
        traceback.print_exc()
        try:
            job.send(caller, "error", (), **job.error_fields(error))
        except OSError:
            # The caller is gone too; what is on the terminal must do.
            code = 2
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _serve(caller: socket.socket) -> None:
    kept: dict[int, tuple[int, tuple[int, ...]]] = {}
    while True:
        message = job.receive(caller)
        if message is None:
            return
        kind, fields, descriptors = message
        if kind == "job":
            spec_file, payload, control, watch, *place = descriptors
        elif kind == "kept":
            kept[int(fields["member"])] = int(fields["pid"]), descriptors
        elif kind == "begin":
            break
    spec = job.read_spec(spec_file)
    client.borrow(spec.server_pid, control, watch)
    # What is here now stays for good, and a collector that walks it would only cost time.
    gc.collect()
    gc.freeze()
    with crew.at_work(Path(spec.folder)):
        # Under a name of its own from now on: the kernel knows who takes a lock, not who is sent one.
        protocol.close_all(place)
        supervisor = _supervisor(spec, payload, caller)
        supervisor.caller.kept = kept
        supervisor.run()
    client.shutdown()


def _supervisor(spec: job.Spec, payload: int, caller: socket.socket) -> Supervisor:
    """A start that fails (its port is taken) leaves no secret behind. One that takes over does: workers and
    tools of the job that goes on use it."""
    try:
        return Supervisor(spec, payload, caller)
    except BaseException:
        if spec.attempt == 1:
            address.remove(Path(spec.folder))
        raise
