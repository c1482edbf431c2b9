"""Set up a rank's transport: find which rank it is, meet the others, find those that share its host, connect.

one rank                  shared memory of its own, no network
all ranks on one host     shared memory; the first rank makes it, the others open it through /proc
several hosts             proven connections; inside a host that has several ranks, shared memory (hybrid)
gloo, nccl, mpi           proven connections, also on one host; the name is that of the native all-reduce
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import secrets
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from paceline.comm.cost import LinkCosts, load_links
from paceline.comm.rendezvous.environment import (
    Address,
    LaunchInfo,
    chosen_backend,
    find_launch_info,
    group_secret,
    mesh_secret,
)
from paceline.comm.rendezvous.round import RendezvousRound, StoreGoneError, connect, connect_to_agent, serve
from paceline.comm.rendezvous.topology import GroupDescription, check_alike, topology_of, wire
from paceline.comm.transport.base import Transport
from paceline.comm.transport.shm import futex
from paceline.comm.transport.shm.transport import ShmTransport
from paceline.comm.transport.tcp.mesh_handshake import source_address
from paceline.comm.transport.tcp.native_backend import BACKENDS, check_backend
from paceline.core.errors import RendezvousError, UnavailableError, UsageError
from paceline.core.host import host_identity, host_name
from paceline.core.listen_address import ANY_PORT, ListenAddress
from paceline.core.mac_algorithms import offered
from paceline.core.shm_segment_layout import LEAST_ARENA, create_segment
from paceline.core.time_limits import COLLECTIVE_SECONDS
from paceline.core.version import VERSION

_log = logging.getLogger("paceline.comm")

NAMES = ("auto", "shm", *BACKENDS)
_PAUSE = 0.05

# Asked once here, not by the first group: it imports a package, and processes that are forked when this
# module is loaded have it then.
offered()

_agent_rounds = itertools.count()
_group_rounds: Counter[str] = Counter()


def join(
    world_size: int | None, rank: int | None, address: str | None, backend: str, timeout: float
) -> tuple[Transport, LinkCosts]:
    """Connect this rank to its group; return its transport and the links that all ranks choose by."""
    backend = chosen_backend(os.environ, backend)
    check_name(backend)
    launch = find_launch_info(os.environ, world_size, rank, address)
    if launch.world_size == 1:
        return single_rank(), load_links()
    deadline = time.monotonic() + timeout
    try:
        me = _hello(backend)
        if launch.agent_store:
            return _join_at_agent(launch, me, deadline)
        return (_find_and_join if launch.rank else _serve_and_join)(launch, me, deadline)
    except StoreGoneError as error:
        raise RendezvousError(
            f"the rendezvous at {launch.address} went away before the group was complete: {error}"
        ) from error


def over_process_group(group: Any = None, timeout: float = COLLECTIVE_SECONDS) -> tuple[Transport, LinkCosts]:
    """Make a transport for the ranks of an initialised torch.distributed group.

    That group itself is left alone: only algorithm="native" uses it.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise UsageError(
            "torch.distributed is not initialised", remedy="call torch.distributed.init_process_group() first"
        )
    group = dist.group.WORLD if group is None else group
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    if rank < 0:
        raise UsageError(
            "this process is not a member of the group", remedy="call it on the group's members only"
        )
    name = str(group.group_name)
    prefix = f"paceline/{name}/{_group_rounds[name]}"
    _group_rounds[name] += 1
    apart = PrefixStore(prefix, group.get_group_store())
    rendezvous = RendezvousRound(
        apart, rank, world_size, time.monotonic() + timeout, f"the store of group {name!r}"
    )
    return meet_in_store(rendezvous, _hello(native=group))


def meet_in_store(
    rendezvous: RendezvousRound, me: RankIntroduction | None = None
) -> tuple[Transport, LinkCosts]:
    """Connect the ranks that meet in a store of torch's."""
    if rendezvous.world_size == 1:
        return single_rank(rendezvous.labels), load_links()
    me = _hello(arena_bytes=LEAST_ARENA) if me is None else me
    try:
        return connect_ranks(rendezvous, _host_of(rendezvous.store), me)
    except StoreGoneError as error:
        raise RendezvousError(f"{rendezvous.where} went away before the ranks had met: {error}") from error


def single_rank(labels: Sequence[int] | None = None) -> ShmTransport:
    """Make the transport of a group of one rank."""
    segment = create_segment(1)
    try:
        return ShmTransport(segment, 0, 1, labels=labels)
    finally:
        os.close(segment)


def check_name(backend: object) -> None:
    """Refuse a backend that does not exist, or does not exist here."""
    if backend not in NAMES:
        raise UsageError(f"backend={backend!r} is not known", remedy=f"use one of {', '.join(NAMES)}")
    check_backend(str(backend))
    if backend == "shm" and not futex.available():
        raise UnavailableError("backend='shm' needs Linux", remedy="use backend='gloo'")


def _join_at_agent(launch: LaunchInfo, me: RankIntroduction, deadline: float) -> tuple[Transport, LinkCosts]:
    store = connect_to_agent(launch.rank, launch.address, deadline)
    apart = PrefixStore(f"paceline/{launch.attempt}/{next(_agent_rounds)}", store)
    rendezvous = RendezvousRound(apart, launch.rank, launch.world_size, deadline, str(launch.address))
    return connect_ranks(rendezvous, launch.address.host, me)


def _serve_and_join(launch: LaunchInfo, me: RankIntroduction, deadline: float) -> tuple[Transport, LinkCosts]:
    server, address = serve(launch.address, me.listening, me.token)
    try:
        with closing(connect(0, address, deadline, secret=me.token)) as client:
            rendezvous = RendezvousRound(client, 0, launch.world_size, deadline, str(launch.address))
            return connect_ranks(rendezvous, launch.address.host, me, server.close)
    finally:
        server.close()


def _find_and_join(launch: LaunchInfo, me: RankIntroduction, deadline: float) -> tuple[Transport, LinkCosts]:
    while True:
        with closing(connect(launch.rank, launch.address, deadline, secret=me.token)) as client:
            where = str(launch.address)
            rendezvous = RendezvousRound(client, launch.rank, launch.world_size, deadline, where)
            try:
                return connect_ranks(rendezvous, launch.address.host, me)
            except StoreGoneError:
                # Rank 0 ended, or this was the end of an earlier group's round: a new one may begin soon.
                if time.monotonic() >= deadline:
                    raise
        time.sleep(_PAUSE)


@dataclass(frozen=True)
class RankIntroduction:
    """Introduction of a rank to a rendezvous; what is not given is found out here, or made up by rank 0.
    `secret` is that of the connections, where it is known before; `token` the one that the user gave the
    ranks; `arena_bytes` the address space of a rank for tensors in shared memory, if not the usual."""

    backend: str = "auto"
    host: str = ""
    hostname: str = ""
    secret: bytes = b""
    token: bytes = b""
    links: LinkCosts | None = None
    native: Any = None
    listening: ListenAddress = ANY_PORT
    arena_bytes: int | None = None


def _hello(backend: str = "auto", native: Any = None, arena_bytes: int | None = None) -> RankIntroduction:
    """Introduce a rank whose starter sets environment variables and nothing else."""
    return RankIntroduction(
        backend,
        token=group_secret(os.environ),
        native=native,
        listening=ListenAddress.from_environment(os.environ),
        arena_bytes=arena_bytes,
    )


def connect_ranks(
    rendezvous: RendezvousRound, master: str, me: RankIntroduction, leave: Callable[[], None] = lambda: None
) -> tuple[Transport, LinkCosts]:
    """Introduce this rank, and connect it to the others; rank 0 ends the round with `leave`."""
    source = _source(master, me.listening)
    with contextlib.ExitStack() as stack:
        stack.enter_context(rendezvous)
        # Where this rank knows no address by which others reach it, it depends on them where to listen.
        listener = stack.enter_context(me.listening.open(source)) if source else None
        hello: dict[str, Any] = {
            "host": me.host or host_identity(),
            "hostname": me.hostname or host_name(),
            "pid": os.getpid(),
            "endpoint": [source, listener.getsockname()[1] if listener is not None else 0],
            "version": VERSION,
            "backend": me.backend,
            "keyed": bool(me.token),
            "macs": int(offered()),
        }
        if rendezvous.rank == 0:
            links = load_links() if me.links is None else me.links
            hello |= {"links": links.to_plain(), "secret": "" if me.secret else secrets.token_hex(32)}
        hellos = rendezvous.enter(hello)
        check_alike(hellos, rendezvous.labels)
        secret = me.secret or mesh_secret(me.token, bytes.fromhex(hellos[0]["secret"]))
        group = GroupDescription(
            rendezvous,
            hellos,
            topology_of(hellos),
            me.backend,
            master,
            secret,
            me.native,
            me.listening,
            me.arena_bytes,
        )
        transport = wire(group, listener)
        try:
            rendezvous.finish(leave)
        except BaseException as error:
            transport.close(error)
            raise
        return transport, LinkCosts.from_plain(hellos[0]["links"])


def _source(master: str, listening: ListenAddress) -> str:
    """Return the address by which the other ranks reach this one; empty where only they know it."""
    if listening.interface:
        return listening.address(master)
    if Address(master, 1).is_loopback:
        return "::1" if ":" in master else "127.0.0.1"
    return source_address(master)


def _host_of(store: object) -> str:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return str(getattr(store, "host", "")) or socket.gethostname()
