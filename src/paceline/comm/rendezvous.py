"""How a rank gets its transport: find the place, meet the others, see who shares a host, connect.

    one rank                  shared memory of its own, no network
    all ranks on one host     shared memory; the first rank makes it, the others open it through /proc
    several hosts             proven connections; inside a host that has several ranks, shared memory (hybrid)
    gloo, nccl, mpi           proven connections, also on one host; the name is that of the native all-reduce

Knows who meets where and when it is over; how transports are made is in wiring.py.
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
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from paceline.comm.cost import Links, load_links
from paceline.comm.environment import Address, Place, find_place
from paceline.comm.group_secret import group_secret, mesh_secret
from paceline.comm.meeting import Meeting, StoreGoneError, connect, connect_to_agent, serve
from paceline.comm.transport.base import Transport
from paceline.comm.transport.handshake import source_address
from paceline.comm.transport.native import BACKENDS, check_backend
from paceline.comm.transport.shm import sync
from paceline.comm.transport.shm.layout import create_segment
from paceline.comm.transport.shm.transport import ShmTransport
from paceline.comm.wiring import Group, check_alike, topology_of, wire
from paceline.core.control.host import host_identity, host_name
from paceline.core.errors import RendezvousError, UnavailableError, UsageError
from paceline.core.listening import ANY_PORT, Listening
from paceline.core.macs import offered
from paceline.core.version import VERSION

_log = logging.getLogger("paceline.comm")

NAMES = ("auto", "shm", *BACKENDS)
_PAUSE = 0.05

# Asked once here, not by the first group: it imports a package, and processes that are forked when this
# module is loaded have it then.
offered()

_agent_meetings = itertools.count()
_group_meetings: Counter[str] = Counter()


def join(
    world_size: int | None, rank: int | None, address: str | None, backend: str, timeout: float
) -> tuple[Transport, Links]:
    """This rank's transport in its group, and the links that all ranks choose algorithms by."""
    check_name(backend)
    place = find_place(os.environ, world_size, rank, address)
    if place.world_size == 1:
        return alone(), load_links()
    deadline = time.monotonic() + timeout
    try:
        me = _hello(backend)
        if place.agent_store:
            return _join_at_agent(place, me, deadline)
        return (
            _serve_and_join(place, me, deadline) if place.rank == 0 else _find_and_join(place, me, deadline)
        )
    except StoreGoneError as error:
        raise RendezvousError(
            f"the rendezvous at {place.address} went away before the group was complete: {error}"
        ) from error


def over_process_group(group: Any = None, timeout: float = 300.0) -> tuple[Transport, Links]:
    """A transport for the ranks of an initialised torch.distributed group.

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
    if world_size == 1:
        return alone(), load_links()
    name = str(group.group_name)
    prefix = f"paceline/{name}/{_group_meetings[name]}"
    _group_meetings[name] += 1
    store = group.get_group_store()
    where = f"the store of group {name!r}"
    meeting = Meeting(PrefixStore(prefix, store), rank, world_size, time.monotonic() + timeout, where)
    try:
        return met(meeting, _host_of(store), _hello(native=group))
    except StoreGoneError as error:
        raise RendezvousError(f"{where} went away before the ranks had met: {error}") from error


def alone() -> ShmTransport:
    """A group of one rank."""
    segment = create_segment(1)
    try:
        return ShmTransport(segment, 0, 1)
    finally:
        os.close(segment)


def check_name(backend: object) -> None:
    """Refuses a backend that does not exist, or does not exist here."""
    if backend not in NAMES:
        raise UsageError(f"backend={backend!r} is not known", remedy=f"use one of {', '.join(NAMES)}")
    check_backend(str(backend))
    if backend == "shm" and not sync.available():
        raise UnavailableError("backend='shm' needs Linux", remedy="use backend='gloo'")


def _join_at_agent(place: Place, me: Hello, deadline: float) -> tuple[Transport, Links]:
    store = connect_to_agent(place.rank, place.address, deadline)
    apart = PrefixStore(f"paceline/{place.attempt}/{next(_agent_meetings)}", store)
    meeting = Meeting(apart, place.rank, place.world_size, deadline, str(place.address))
    return met(meeting, place.address.host, me)


def _serve_and_join(place: Place, me: Hello, deadline: float) -> tuple[Transport, Links]:
    server, address = serve(place.address, me.listening, me.token)
    try:
        with closing(connect(0, address, deadline, secret=me.token)) as client:
            meeting = Meeting(client, 0, place.world_size, deadline, str(place.address))
            return met(meeting, place.address.host, me, server.close)
    finally:
        server.close()


def _find_and_join(place: Place, me: Hello, deadline: float) -> tuple[Transport, Links]:
    while True:
        with closing(connect(place.rank, place.address, deadline, secret=me.token)) as client:
            meeting = Meeting(client, place.rank, place.world_size, deadline, str(place.address))
            try:
                return met(meeting, place.address.host, me)
            except StoreGoneError:
                # Rank 0 ended, or this was the end of an earlier group's meeting: a new one may begin soon.
                if time.monotonic() >= deadline:
                    raise
        time.sleep(_PAUSE)


@dataclass(frozen=True)
class Hello:
    """How a rank comes to a meeting; what is not given is found out here, or made up by rank 0. `secret` is
    that of the connections, where it is known before; `token` the one that the user gave the ranks."""

    backend: str = "auto"
    host: str = ""
    hostname: str = ""
    secret: bytes = b""
    token: bytes = b""
    links: Links | None = None
    native: Any = None
    listening: Listening = ANY_PORT


def _hello(backend: str = "auto", native: Any = None) -> Hello:
    """Of a rank whose starter sets environment variables and nothing else."""
    return Hello(
        backend,
        token=group_secret(os.environ),
        native=native,
        listening=Listening.from_environment(os.environ),
    )


def met(
    meeting: Meeting, master: str, me: Hello, leave: Callable[[], None] = lambda: None
) -> tuple[Transport, Links]:
    """Says hello, and wires the ranks that came; rank 0 ends the meeting with `leave`."""
    source = _source(master, me.listening)
    with contextlib.ExitStack() as stack:
        stack.enter_context(meeting)
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
        if meeting.rank == 0:
            links = load_links() if me.links is None else me.links
            hello |= {"links": links.to_plain(), "secret": "" if me.secret else secrets.token_hex(32)}
        hellos = meeting.enter(hello)
        check_alike(hellos)
        secret = me.secret or mesh_secret(me.token, bytes.fromhex(hellos[0]["secret"]))
        group = Group(
            meeting, hellos, topology_of(hellos), me.backend, master, secret, me.native, me.listening
        )
        transport = wire(group, listener)
        try:
            meeting.finish(leave)
        except BaseException as error:
            transport.close(error)
            raise
        return transport, Links.from_plain(hellos[0]["links"])


def _source(master: str, listening: Listening) -> str:
    """The address by which the other ranks reach this one; empty where only they know it."""
    if listening.interface:
        return listening.address(master)
    if Address(master, 1).is_loopback:
        return "::1" if ":" in master else "127.0.0.1"
    return source_address(master)


def _host_of(store: Store) -> str:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return str(getattr(store, "host", "")) or socket.gethostname()
