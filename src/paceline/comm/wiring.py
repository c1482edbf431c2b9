"""From hellos to a transport: who shares a host, who shares memory, who has to connect.

Every rank reads the same hellos and comes to the same plan; where shared memory does not work for one rank,
none of them uses it. Knows how transports are made, not how ranks found each other or what the transport is
used for.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from paceline.comm.calls import ranks_text
from paceline.comm.environment import LOCAL_HOST
from paceline.comm.group_secret import SECRET_VARIABLE
from paceline.comm.meeting import Meeting
from paceline.comm.transport.base import Topology, Transport
from paceline.comm.transport.bulk import Bulk
from paceline.comm.transport.gloo import open_group
from paceline.comm.transport.handshake import Connected, connect_all
from paceline.comm.transport.hybrid import HybridTransport
from paceline.comm.transport.mesh import Mesh
from paceline.comm.transport.native import BACKENDS, NativeGroup, nccl_group, own_group
from paceline.comm.transport.shm import sync
from paceline.comm.transport.shm.layout import create_segment
from paceline.comm.transport.shm.transport import ShmTransport
from paceline.comm.transport.torchdist import TorchTransport
from paceline.core.errors import GroupInterruptedError, PacelineError, RendezvousError, UnavailableError
from paceline.core.listening import ANY_PORT, INTERFACE_VARIABLE, Listening
from paceline.core.macs import Mac, offered

_log = logging.getLogger("paceline.comm")


@dataclass(frozen=True)
class Group:
    """What the hellos say."""

    meeting: Meeting
    hellos: Mapping[int, Mapping[str, Any]]
    topology: Topology
    backend: str
    master: str
    secret: bytes
    native: Any = None
    listening: Listening = ANY_PORT

    @property
    def mates(self) -> list[int]:
        """The ranks of this host."""
        return self.topology.ranks_on(self.topology.host_of[self.meeting.rank])


def topology_of(hellos: Mapping[int, Mapping[str, Any]]) -> Topology:
    numbers: dict[str, int] = {}
    names: dict[int, str] = {}
    for rank in sorted(hellos):
        number = numbers.setdefault(hellos[rank]["host"], len(numbers))
        names.setdefault(number, str(hellos[rank]["hostname"]))
    return Topology(tuple(numbers[hellos[rank]["host"]] for rank in sorted(hellos)), tuple(names.values()))


def check_alike(hellos: Mapping[int, Mapping[str, Any]]) -> None:
    without = [rank for rank, hello in sorted(hellos.items()) if not hello["keyed"]]
    if without and len(without) < len(hellos):
        raise RendezvousError(
            f"{ranks_text(without)} came without a secret, the others have one",
            remedy=f"set {SECRET_VARIABLE} on all ranks, or on none",
        )
    for what in ("version", "backend"):
        values = {rank: hello[what] for rank, hello in sorted(hellos.items())}
        if len(set(values.values())) > 1:
            listing = ", ".join(f"rank {rank}: {value}" for rank, value in values.items())
            raise RendezvousError(
                f"the ranks differ in their {what} ({listing})", remedy=f"use the same {what} on all ranks"
            )


def wire(group: Group, listener: socket.socket | None) -> Transport:
    """The transport of this rank; without a listener, one is made where connections are needed."""
    meeting, topology = group.meeting, group.topology
    wants_memory = group.backend in ("auto", "shm") and sync.available()
    if group.backend == "shm" and topology.hosts > 1:
        raise UnavailableError(
            f"backend='shm': the hosts {', '.join(topology.names)} share no memory",
            remedy="use backend='auto' or 'gloo'",
        )
    local = None
    if wants_memory and topology.hosts < meeting.world_size:
        local = _share(group)
        if local is not None and topology.hosts == 1:
            return local
    try:
        if listener is not None:
            wide = _connect(group, listener)
        else:
            with _listener_for(group) as listener:
                group.meeting.tell("port", {"port": listener.getsockname()[1]})
                wide = _connect(group, listener)
    except BaseException as error:
        if local is not None:
            local.close(error)
        raise
    return wide if local is None else HybridTransport(local, wide)


def _share(group: Group) -> ShmTransport | None:
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
                segment = open_segment(meeting.hear("segment", mates[0]), int(group.hellos[mates[0]]["pid"]))
            local = ShmTransport(segment, mates.index(rank), len(mates))
        except (OSError, PacelineError) as error:
            if isinstance(error, RendezvousError | GroupInterruptedError):
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
        _log.warning("shared memory does not work here (%s): using connections", listing)
    return None


def open_segment(told: Mapping[str, Any], pid: int) -> int:
    if told["fd"] < 0:
        raise OSError(f"the first rank of this host made no segment ({told['problem']})")
    segment = os.open(f"/proc/{pid}/fd/{told['fd']}", os.O_RDWR | os.O_CLOEXEC)
    status = os.fstat(segment)
    if (status.st_ino, status.st_dev) != (told["inode"], told["device"]):
        os.close(segment)
        raise OSError(f"descriptor {told['fd']} of process {pid} is another file")
    return segment


def _listener_for(group: Group) -> socket.socket:
    """Where a rank listens that knows no address by which others reach it: on loopback if all are on this
    host, else on all interfaces, because the others know this host by an address that it does not have."""
    if group.topology.hosts == 1:
        return group.listening.open(LOCAL_HOST)
    _log.warning(
        "rank %d listens on all interfaces until all ranks are connected: %s is no address of this machine "
        "that others could use; %s=ADDRESS chooses one",
        group.meeting.rank,
        group.master,
        INTERFACE_VARIABLE,
    )
    return group.listening.open("")


def _endpoint(group: Group, rank: int) -> tuple[str, int]:
    """Where another rank listens. A rank without an address at which the others reach it is on the master's
    host, and sends its port once connections are known to be needed."""
    host, port = group.hellos[rank]["endpoint"]
    if host:
        return str(host), int(port)
    told = int(group.meeting.hear("port", rank)["port"])
    return (LOCAL_HOST if group.topology.hosts == 1 else group.master), told


def _connect(group: Group, listener: socket.socket) -> TorchTransport:
    """Proven connections among all ranks: a mesh, and one for bulk data beside each of its connections."""
    meeting, topology, hellos = group.meeting, group.topology, group.hellos
    rank = meeting.rank
    endpoints = {peer: _endpoint(group, peer) for peer in hellos if peer != rank}
    # Of the others what they said in the meeting, which the handshake checks; of this rank what it can do.
    macs = {peer: Mac(hello["macs"]) for peer, hello in hellos.items()} | {rank: offered()}
    connected = connect_all(rank, listener, endpoints, group.secret, meeting.deadline, meeting.look, macs)
    address = _own_address(connected, topology, rank)
    names = {peer: f"process {hello['pid']} on {hello['hostname']}" for peer, hello in hellos.items()}
    mesh = Mesh(rank, {peer: pair.control for peer, pair in connected.items()}, names)
    bulk = Bulk({peer: pair.bulk for peer, pair in connected.items()}, mesh.notify)
    try:
        return TorchTransport(mesh, bulk, topology, _native(group, mesh, address))
    except Exception as error:
        if isinstance(error, GroupInterruptedError):
            mesh.interrupt(error)
        mesh.close(error)
        bulk.close()
        meeting.cancel()
        raise RendezvousError(
            f"rank {rank} could not make the {group.backend} group of torch.distributed: {error}"
        ) from error


def _own_address(connected: Mapping[int, Connected], topology: Topology, rank: int) -> str:
    """The address under which this rank talks to other hosts, if there are any."""
    mine = topology.host_of[rank]
    peer = next((peer for peer in connected if topology.host_of[peer] != mine), next(iter(connected)))
    return str(connected[peer].control.sock.getsockname()[0]).removeprefix("::ffff:")


def _native(group: Group, mesh: Mesh, address: str) -> NativeGroup:
    meeting = group.meeting
    rank, world_size = meeting.rank, meeting.world_size
    if group.native is None:
        backend = group.backend if group.backend in BACKENDS else "gloo"
        if backend != "nccl":
            gloo = partial(open_group, mesh, address)
            return own_group(backend, gloo, rank, world_size)
        return nccl_group(_lasting_store(group), rank, world_size, group.mates.index(rank))
    name = str(dist.get_backend(group.native))
    backend = "nccl" if "nccl" in name else "mpi" if name == "mpi" else "gloo"
    return NativeGroup(backend, lambda deadline: group.native, world_size, rank, _device_of(backend))


def _lasting_store(group: Group) -> Store:
    """A store that lives as long as the ranks that hold it: NCCL asks its store long after the start."""
    meeting = group.meeting
    host = group.hellos[0]["endpoint"][0] or group.master
    limit = timedelta(seconds=max(meeting.deadline - time.monotonic(), 1.0))
    if meeting.rank == 0:
        listener = group.listening.open(host)
        port = int(listener.getsockname()[1])
        store = TCPStore(
            host,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=limit,
            master_listen_fd=listener.detach(),
        )
        meeting.tell("nccl", {"port": port})
        return store
    port = int(meeting.hear("nccl", 0)["port"])
    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=limit)


def _device_of(backend: str) -> torch.device | None:
    return torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else None
