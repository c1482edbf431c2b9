"""The supervisor process: takes the job from its parent, supervises it until it is over, ends.

Started by `supervisor_launcher` in another session: Ctrl-C at the terminal does not reach it. Never imports
torch.
"""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import selectors
import socket
import sys
import traceback
from functools import partial
from typing import NoReturn

from paceline.control import liveness_lock, supervisor_address
from paceline.core import fd_messages
from paceline.core.clock import MonotonicClock, WallClock
from paceline.core.errors import PacelineError
from paceline.elastic.supervisor import control_port, parent_messages
from paceline.elastic.supervisor.component_ports import Loop
from paceline.elastic.supervisor.parent_messages import JobSpec, KeptWorkers
from paceline.elastic.supervisor.supervisor import Supervisor
from paceline.engines.local import fork_server_client, memfd_pickle


def main(descriptor: int) -> NoReturn:
    """Supervise one job; the parent is at the other end of this socket."""
    code = 1
    parent = socket.socket(fileno=descriptor)
    try:
        _raise_file_limit()
        _serve(parent)
        code = 0
    except PacelineError as error:
        try:
            # The parent raises it: printed here as well, it would be on the terminal twice.
            parent_messages.send(parent, "error", (memfd_pickle.dump(error),))
        except OSError:
            traceback.print_exc()
            code = 2
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _serve(parent: socket.socket) -> None:
    kept: KeptWorkers = {}
    while True:
        message = parent_messages.receive(parent)
        if message is None:
            return
        kind, fields, descriptors = message
        if kind == "job":
            spec_file, payload, control, watch, *lock = descriptors
        elif kind == "kept":
            kept[int(fields["member"])] = int(fields["pid"]), descriptors
        elif kind == "begin":
            break
    spec: JobSpec = parent_messages.load(spec_file)
    fork_server_client.adopt_server(spec.server_pid, control, watch)
    # What is here now stays for good, and a collector that walks it would only cost time.
    gc.collect()
    gc.freeze()
    with liveness_lock.held(spec.job.folder):
        # This process has its own lock now: the kernel names the process that took a lock, not the one that
        # was sent it.
        fd_messages.close_all(lock)
        job, loop = spec.job, Loop(MonotonicClock(), selectors.DefaultSelector())
        listen = partial(control_port.listen, job.bind, job.port, loop.clock, listening=job.listening)
        try:
            supervisor = Supervisor(spec, payload, parent, kept, loop, WallClock(), listen)
        except BaseException:
            # A first start that fails (its port is taken) leaves no secret behind. One that takes over does:
            # workers and tools of the job use it.
            if spec.attempt == 1:
                supervisor_address.remove(spec.job.folder)
            raise
        supervisor.run()
    fork_server_client.shutdown()


def _raise_file_limit() -> None:
    """Use all descriptors that the system allows: each worker takes about six."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
