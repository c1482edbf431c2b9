"""How a rank gets its transport: find the place, meet the others, see who shares a host, connect.

    one rank                         shared memory of its own, no network
    all ranks on one host            shared memory; the first rank makes the segment, the others open it through /proc
    several hosts                    torch.distributed; where a host has more than one rank, shared memory inside it (hybrid)
    backend="gloo", "nccl", "mpi"    torch.distributed, also on one host; large CPU messages always go over Gloo

Knows how transports are made, not what they are used for.
"""

from __future__ import annotations

import itertools
import logging
import os
import secrets
import socket
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore, Store

import paceline
from paceline.comm.cost import Links, load_links
from paceline.comm.environment import HOST_VARIABLE, Address, Place, find_place
from paceline.comm.meeting import Meeting, StoreGoneError, connect, serve
from paceline.comm.transport.base import Topology, Transport
from paceline.comm.transport.bulk import Bulk
from paceline.comm.transport.handshake import connect_all, listen, source_address
from paceline.comm.transport.hybrid import HybridTransport
from paceline.comm.transport.mesh import Mesh
from paceline.comm.transport.native import BACKENDS, NativeGroup, check_backend, own_group
from paceline.comm.transport.shm import sync
from paceline.comm.transport.shm.layout import create_segment
from paceline.comm.transport.shm.transport import ShmTransport
from paceline.comm.transport.torchdist import TorchTransport
from paceline.core.errors import PacelineError, RendezvousError, UnavailableError, UsageError

_log = logging.getLogger("paceline.comm")

NAMES = ("auto", "shm", *BACKENDS)
_PAUSE = 0.05

_agent_meetings = itertools.count()
_group_meetings: Counter[str] = Counter()


def join(
    world_size: int | None, rank: int | None, address: str | None, backend: str, timeout: float
) -> tuple[Transport, Links]:
    """This rank's transport in its group, and the links that all ranks choose algorithms by."""
    check_name(backend)
    place = find_place(os.environ, world_size, rank, address)
    if place.world_size == 1 and backend in ("auto", "shm"):
        return alone(), load_links()
    deadline = time.monotonic() + timeout
    if place.agent_store:
        prefix = f"paceline/{place.attempt}/{next(_agent_meetings)}"
        meeting = Meeting(
            connect(place.rank, place.address, deadline),
            prefix,
            place.rank,
            place.world_size,
            deadline,
            str(place.address),
        )
        return _met(meeting, place.address.host, backend, lambda: None)
    return (
        _serve_and_join(place, backend, deadline)
        if place.rank == 0
        else _find_and_join(place, backend, deadline)
    )


def over_process_group(group: Any = None, timeout: float = 300.0) -> tuple[Transport, Links]:
    """A transport for the ranks of an initialised torch.distributed group; that group itself is used for its own all-reduce only."""
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
    meeting = Meeting(
        store, prefix, rank, world_size, time.monotonic() + timeout, f"the store of group {name!r}"
    )
    return _met(meeting, _host_of(store), "auto", lambda: None, group)


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


def host_identity(environment: Mapping[str, str] = os.environ) -> str:
    """Equal for two processes that can share memory: same kernel, same network and same process numbers."""
    parts = [environment.get(HOST_VARIABLE, "")]
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            parts.append(file.read().strip())
        parts += [str(os.stat(f"/proc/self/ns/{kind}").st_ino) for kind in ("net", "pid")]
    except OSError:
        parts.append(socket.gethostname())
    return "|".join(parts)


def _serve_and_join(place: Place, backend: str, deadline: float) -> tuple[Transport, Links]:
    holder = [serve(place.address)]
    local = Address("::1" if ":" in place.address.host else "127.0.0.1", place.address.port)
    try:
        # Rank 0 is a client of its own server too: what holds on to the client must not keep the server alive.
        client = connect(0, place.address if place.address.is_loopback else local, deadline)
        meeting = Meeting(client, "", 0, place.world_size, deadline, str(place.address))
        return _met(meeting, place.address.host, backend, holder.clear)
    finally:
        holder.clear()


def _find_and_join(place: Place, backend: str, deadline: float) -> tuple[Transport, Links]:
    while True:
        store = connect(place.rank, place.address, deadline)
        meeting = Meeting(store, "", place.rank, place.world_size, deadline, str(place.address))
        try:
            return _met(meeting, place.address.host, backend, lambda: None)
        except StoreGoneError:
            # Rank 0 ended, or this was the end of an earlier group's meeting: there may be a new one soon.
            if time.monotonic() >= deadline:
                raise RendezvousError(
                    f"rank 0 at {place.address} went away before the group was complete"
                ) from None
            time.sleep(_PAUSE)


@dataclass(frozen=True)
class _Group:
    """What the hellos say."""

    meeting: Meeting
    hellos: Mapping[int, Mapping[str, Any]]
    topology: Topology
    backend: str
    master: str
    native: Any = None

    @property
    def mates(self) -> list[int]:
        """The ranks of this host."""
        return self.topology.ranks_on(self.topology.host_of[self.meeting.rank])


def _met(
    meeting: Meeting, master: str, backend: str, leave: Any, native: Any = None
) -> tuple[Transport, Links]:
    with meeting, ExitStack() as stack:
        source = "127.0.0.1" if Address(master, 1).is_loopback else source_address(master)
        listener = stack.enter_context(listen(source))
        hello: dict[str, Any] = {
            "host": host_identity(),
            "hostname": os.environ.get(HOST_VARIABLE) or socket.gethostname(),
            "pid": os.getpid(),
            "endpoint": [source, listener.getsockname()[1]],
            "version": paceline.__version__,
            "backend": backend,
        }
        if meeting.rank == 0:
            hello |= {"links": load_links().to_plain(), "secret": secrets.token_hex(32)}
        hellos = meeting.enter(hello)
        group = _Group(meeting, hellos, _topology(hellos), backend, master, native)
        _check_alike(hellos)
        transport = _transport(group, listener)
        try:
            meeting.finish(leave)
        except BaseException as error:
            transport.close(error)
            raise
        return transport, Links.from_plain(hellos[0]["links"])


def _topology(hellos: Mapping[int, Mapping[str, Any]]) -> Topology:
    numbers: dict[str, int] = {}
    names: dict[int, str] = {}
    for rank in sorted(hellos):
        number = numbers.setdefault(hellos[rank]["host"], len(numbers))
        names.setdefault(number, str(hellos[rank]["hostname"]))
    return Topology(tuple(numbers[hellos[rank]["host"]] for rank in sorted(hellos)), tuple(names.values()))


def _check_alike(hellos: Mapping[int, Mapping[str, Any]]) -> None:
    for what in ("version", "backend"):
        values = {rank: hello[what] for rank, hello in sorted(hellos.items())}
        if len(set(values.values())) > 1:
            listing = ", ".join(f"rank {rank}: {value}" for rank, value in values.items())
            raise RendezvousError(
                f"the ranks differ in their {what} ({listing})", remedy=f"use the same {what} on all ranks"
            )


def _transport(group: _Group, listener: socket.socket) -> Transport:
    meeting, topology = group.meeting, group.topology
    wants_memory = group.backend in ("auto", "shm") and sync.available()
    if group.backend == "shm" and topology.hosts > 1:
        raise UnavailableError(
            f"backend='shm' for ranks on {topology.hosts} hosts ({', '.join(topology.names)}): they share no memory",
            remedy="use backend='auto' or 'gloo'",
        )
    local = None
    if wants_memory and topology.hosts < meeting.world_size:
        local = _share(group)
        if local is not None and topology.hosts == 1:
            return local
    try:
        wide = _connect(group, listener)
    except BaseException as error:
        if local is not None:
            local.close(error)
        raise
    return wide if local is None else HybridTransport(local, wide)


def _share(group: _Group) -> ShmTransport | None:
    """Shared memory among the ranks of each host; None on every rank if it does not work for one of them."""
    meeting, mates = group.meeting, group.mates
    rank = meeting.rank
    segment = -1
    local: ShmTransport | None = None
    problem = ""
    try:
        try:
            if rank == mates[0]:
                segment = create_segment(len(mates))
                status = os.fstat(segment)
                meeting.tell("segment", {"fd": segment, "inode": status.st_ino, "device": status.st_dev})
            else:
                segment = _open_segment(meeting.hear("segment", mates[0]), int(group.hellos[mates[0]]["pid"]))
            local = ShmTransport(segment, mates.index(rank), len(mates))
        except (OSError, PacelineError) as error:
            if isinstance(error, RendezvousError):
                raise
            problem = f"{type(error).__name__}: {error}"
            if rank == mates[0] and segment < 0:
                meeting.tell("segment", {"fd": -1, "problem": problem})
        meeting.tell("shared", {"problem": problem})
        problems = {
            peer: told["problem"] for peer, told in meeting.gather("shared").items() if told["problem"]
        }
    except BaseException as error:
        if local is not None:
            local.close(error)
        raise
    finally:
        if segment >= 0:
            os.close(segment)
    if not problems:
        return local
    if local is not None:
        local.close()
    listing = "; ".join(f"rank {peer}: {text}" for peer, text in problems.items())
    if group.backend == "shm":
        raise UnavailableError(
            f"shared memory does not work here ({listing})", remedy="use backend='auto' or 'gloo'"
        )
    if rank == 0:
        _log.warning("shared memory does not work here (%s): using Gloo", listing)
    return None


def _open_segment(told: Mapping[str, Any], pid: int) -> int:
    if told["fd"] < 0:
        raise OSError(f"the first rank of this host made no segment ({told['problem']})")
    segment = os.open(f"/proc/{pid}/fd/{told['fd']}", os.O_RDWR | os.O_CLOEXEC)
    status = os.fstat(segment)
    if (status.st_ino, status.st_dev) != (told["inode"], told["device"]):
        os.close(segment)
        raise OSError(f"descriptor {told['fd']} of process {pid} is another file")
    return segment


def _connect(group: _Group, listener: socket.socket) -> TorchTransport:
    """Mesh and Gloo group among all ranks."""
    meeting, topology, hellos = group.meeting, group.topology, group.hellos
    rank = meeting.rank
    secret = bytes.fromhex(hellos[0]["secret"])
    # Who has no address of its own that others can use is on the master's host.
    endpoints = {
        peer: (hello["endpoint"][0] or group.master, int(hello["endpoint"][1]))
        for peer, hello in hellos.items()
        if peer != rank
    }
    connections = connect_all(rank, listener, endpoints, secret, meeting.deadline, meeting.look)
    address = _own_address(connections, topology, rank)
    names = {peer: f"process {hello['pid']} on {hello['hostname']}" for peer, hello in hellos.items()}
    mesh = Mesh(rank, connections, names)
    try:
        left = max(meeting.deadline - time.monotonic(), 1.0)
        bulk = Bulk(_sub(meeting.store, "gloo"), rank, meeting.world_size, address, left, mesh.notify)
        native = _native(group, bulk)
    except BaseException as error:
        mesh.close(error)
        raise RendezvousError(f"rank {rank} could not make the torch.distributed group: {error}") from error
    return TorchTransport(mesh, bulk, topology, native)


def _own_address(connections: Mapping[int, socket.socket], topology: Topology, rank: int) -> str:
    """The address under which this rank talks to other hosts, if there are any."""
    mine = topology.host_of[rank]
    peer = next((peer for peer in connections if topology.host_of[peer] != mine), next(iter(connections)))
    return str(connections[peer].getsockname()[0]).removeprefix("::ffff:")


def _native(group: _Group, bulk: Bulk) -> NativeGroup:
    meeting = group.meeting
    rank, world_size = meeting.rank, meeting.world_size
    if group.native is None:
        backend = group.backend if group.backend in BACKENDS else "gloo"
        return own_group(backend, bulk.group, meeting.store, rank, world_size, group.mates.index(rank))
    name = str(dist.get_backend(group.native))
    backend = "nccl" if "nccl" in name else "mpi" if name == "mpi" else "gloo"
    return NativeGroup(backend, group.native, world_size, rank, _device_of(backend))


def _device_of(backend: str) -> Any:
    import torch

    return torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else None


def _host_of(store: Store) -> str:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return str(getattr(store, "host", "")) or socket.gethostname()


def _sub(store: Store, prefix: str) -> Store:
    return PrefixStore(prefix, store)
