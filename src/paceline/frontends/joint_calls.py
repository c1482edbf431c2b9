"""Calls of a Trainer that the ranks of one launcher make together: `fit`, `evaluate` and `predict`.

A script under `paceline run` makes each of them once on every rank. Rank 0 makes the call for all: it starts
the workers, as a script that runs alone would, from the launcher's warm fork server, and a supervisor
repairs them in place. The other ranks wait for the result. So a lost worker is repaired as anywhere else. A
rank that is lost while a call is under way is started again alone, and is given what it missed; where rank 0
itself is lost, its workers save, and its successor goes on with their run. So do the successors of all
ranks, where they are to start again together.

Under mpirun the other ranks are agents meanwhile, and no launcher stands between them: mpi_calls.py.

Calls are known by their number, counted from 1 on every rank. launcher/call_relay.py is the launcher's
end.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from paceline.comm import default_group, tensor_pickling
from paceline.core import fd_messages
from paceline.engines.local import fork_server_client, memfd_pickle
from paceline.frontends import launcher_link, mpi_calls, overrides
from paceline.frontends.launcher_link import LauncherLink
from paceline.frontends.mpi_calls import MpiRanks
from paceline.frontends.portable_errors import portable
from paceline.train.settings.train_config import TrainConfig, shards_on_ranks
from paceline.train.stop_signals import Stopped, listening

T = TypeVar("T")


def joint_link() -> LauncherLink | MpiRanks | None:
    """Return the connection over which this rank makes joint calls. None where there is none, and where the
    ranks have formed a group already: a call is made in that group then."""
    if default_group.current() is not None or _has_torch_group():
        return None
    link = launcher_link.current()
    if link is None:
        return mpi_calls.current()
    return link if link.joint and link.world_size > 1 else None


def call_together(
    link: LauncherLink | MpiRanks,
    config: TrainConfig,
    compute: Callable[[], T],
    was_stopped: Callable[[T], bool],
) -> T:
    """Make a call for all ranks if this one leads, else wait for its result. It has as many workers as there
    are ranks, whatever the script's own config says. A result that `was_stopped` is that of ranks which were
    to end: their successors make the call again, and go on with its run."""
    if isinstance(link, MpiRanks):
        return link.call_together(config, compute)
    with link.lock:
        link.calls += 1
        number = link.calls
        link.send("call", number=number)
        answer, descriptors = link.receive()
        if answer["kind"] == "lead":
            _adopt_server(link, answer, descriptors)
            settings = _settings(link, config, str(answer["folder"]))
            return _lead(link, number, settings, compute, was_stopped)
        # Signals are the launcher's: it sends them to every rank, and the one that leads stops the run.
        with listening(lambda reason: None, ctrl_c=True):
            while answer["kind"] != "outcome":
                answer, descriptors = link.receive()
        try:
            result = memfd_pickle.load(descriptors[0])
        finally:
            fd_messages.close_all(descriptors)
    if answer["ok"]:
        return result  # type: ignore[no-any-return]
    raise result


def _adopt_server(link: LauncherLink, answer: Mapping[str, Any], descriptors: tuple[int, ...]) -> None:
    if link.has_server:
        fd_messages.close_all(descriptors)
    else:
        link.has_server = True
        fork_server_client.adopt_server(int(answer["server"]), *descriptors)


def _settings(link: LauncherLink, config: TrainConfig, folder: str) -> dict[str, Any]:
    """Return the settings that win over the script's own. `folder`: of the run that an earlier process of
    this rank has begun; empty for none."""
    shards = shards_on_ranks(config, link.world_size)
    settings = {"workers": link.world_size, **({} if shards is None else {"shards": shards})}
    return settings | {"run_dir": folder, "resume": "auto"} if folder else settings


def _lead(
    link: LauncherLink,
    number: int,
    settings: Mapping[str, Any],
    compute: Callable[[], T],
    was_stopped: Callable[[T], bool],
) -> T:
    now = overrides.current()
    chosen = replace(now, options={**settings, **now.options})
    try:
        with overrides.in_force(chosen):
            result = compute()
    except BaseException as error:
        # What ends one rank ends them all alike.
        stopped = isinstance(error, Stopped | KeyboardInterrupt)
        _send(link, number, portable(error), ok=False, stopped=stopped)
        raise
    _send(link, number, result, ok=True, stopped=was_stopped(result))
    return result


def _send(link: LauncherLink, number: int, result: object, *, ok: bool, stopped: bool) -> None:
    file = memfd_pickle.dump(result, reducers=tensor_pickling.reducers())
    try:
        link.send("outcome", (file,), number=number, ok=ok, stopped=stopped)
    finally:
        os.close(file)


def _has_torch_group() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized()
