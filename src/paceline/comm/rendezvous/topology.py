"""Make a transport from the hellos: find the ranks that share a host or memory, and those that must connect.

Every rank reads the same hellos and comes to the same plan; where shared memory does not work for one rank,
none of them uses it.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from paceline.comm.rendezvous.environment import LOCAL_HOST, SECRET_VARIABLE
from paceline.comm.rendezvous.round import RendezvousRound
from paceline.comm.transport.base import Topology, Transport
from paceline.comm.transport.hybrid import HybridTransport
from paceline.comm.transport.shm import futex
from paceline.comm.transport.shm.transport import ShmTransport
from paceline.comm.transport.tcp.bulk_transfer import BulkConnections
from paceline.comm.transport.tcp.mesh import Mesh
from paceline.comm.transport.tcp.mesh_handshake import connect_all
from paceline.comm.transport.tcp.native_backend import BACKENDS, BackendGroup, nccl_group, own_group
from paceline.comm.transport.tcp.network_transport import NetworkTransport
from paceline.core.errors import GroupInterruptedError, PacelineError, RendezvousError, UnavailableError
from paceline.core.listen_address import ANY_PORT, INTERFACE_VARIABLE, ListenAddress
from paceline.core.mac_algorithms import Mac, offered
from paceline.core.shm_segment_layout import create_segment
from paceline.core.wording import ranks

_log = logging.getLogger("paceline.comm")


@dataclass(frozen=True)
class GroupDescription:
    """Description of a group, from the hellos of its ranks."""

    rendezvous: RendezvousRound
    hellos: Mapping[int, Mapping[str, Any]]
    topology: Topology
    backend: str
    master: str
    secret: bytes
    native: Any = None
    listening: ListenAddress = ANY_PORT
    arena_bytes: int | None = None

    @property
    def mates(self) -> list[int]:
        """The ranks of this host."""
        return self.topology.ranks_on(self.topology.host_of[self.rendezvous.rank])


def topology_of(hellos: Mapping[int, Mapping[str, Any]]) -> Topology:
    numbers: dict[str, int] = {}
    names: dict[int, str] = {}
    for rank in sorted(hellos):
        number = numbers.setdefault(hellos[rank]["host"], len(numbers))
        names.setdefault(number, str(hellos[rank]["hostname"]))
    return Topology(tuple(numbers[hellos[rank]["host"]] for rank in sorted(hellos)), tuple(names.values()))


def check_alike(hellos: Mapping[int, Mapping[str, Any]], labels: Sequence[int]) -> None:
    without = [labels[rank] for rank, hello in sorted(hellos.items()) if not hello["keyed"]]
    if without and len(without) < len(hellos):
        raise RendezvousError(
            f"{ranks(without, all_named=True)} came without a secret, the others have one",
            remedy=f"set {SECRET_VARIABLE} on all ranks, or on none",
        )
    for what in ("version", "backend"):
        values = {labels[rank]: hello[what] for rank, hello in sorted(hellos.items())}
        if len(set(values.values())) > 1:
            listing = ", ".join(f"rank {rank}: {value}" for rank, value in values.items())
            raise RendezvousError(
                f"the ranks differ in their {what} ({listing})", remedy=f"use the same {what} on all ranks"
            )


def wire(group: GroupDescription, listener: socket.socket | None) -> Transport:
    """Make the transport of this rank; without a listener, one is made where connections are needed."""
    rendezvous, topology = group.rendezvous, group.topology
    wants_memory = group.backend in ("auto", "shm") and futex.available()
    if group.backend == "shm" and topology.hosts > 1:
        raise UnavailableError(
            f"backend='shm': the hosts {', '.join(topology.names)} share no memory",
            remedy="use backend='auto' or 'gloo'",
        )
    local = None
    if wants_memory and topology.hosts < rendezvous.world_size:
        local = _share(group)
        if local is not None and topology.hosts == 1:
            return local
    try:
        if listener is not None:
            wide = _connect(group, listener)
        else:
            with _listener_for(group) as listener:
                group.rendezvous.publish("port", {"port": listener.getsockname()[1]})
                wide = _connect(group, listener)
    except BaseException as error:
        if local is not None:
            local.close(error)
        raise
    return wide if local is None else HybridTransport(local, wide)


def _share(group: GroupDescription) -> ShmTransport | None:
    """Share memory among the ranks of each host; None on every rank if it does not work for one of them."""
    rendezvous, mates = group.rendezvous, group.mates
    rank = rendezvous.rank
    segment = -1
    local: ShmTransport | None = None
    problem = ""
    try:
        try:
            if rank == mates[0]:
                segment = create_segment(len(mates), group.arena_bytes)
                status = os.fstat(segment)
                rendezvous.publish(
                    "segment", {"fd": segment, "inode": status.st_ino, "device": status.st_dev}
                )
            else:
                published = rendezvous.read("segment", mates[0])
                segment = open_segment(published, int(group.hellos[mates[0]]["pid"]))
            labels = [rendezvous.labels[mate] for mate in mates]
            local = ShmTransport(segment, mates.index(rank), len(mates), labels=labels)
        except (OSError, PacelineError) as error:
            if isinstance(error, RendezvousError | GroupInterruptedError):
                raise
            problem = f"{type(error).__name__}: {error}"
            if rank == mates[0] and segment < 0:
                rendezvous.publish("segment", {"fd": -1, "problem": problem})
        rendezvous.publish("shared", {"problem": problem})
        problems = {
            peer: reply["problem"] for peer, reply in rendezvous.gather("shared").items() if reply["problem"]
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
    listing = "; ".join(f"rank {rendezvous.labels[peer]}: {text}" for peer, text in problems.items())
    if group.backend == "shm":
        raise UnavailableError(
            f"shared memory does not work here ({listing})", remedy="use backend='auto' or 'gloo'"
        )
    if rank == 0:
        _log.warning("shared memory does not work here (%s): using connections", listing)
    return None


def open_segment(published: Mapping[str, Any], pid: int) -> int:
    if published["fd"] < 0:
        raise OSError(f"the first rank of this host made no segment ({published['problem']})")
    segment = os.open(f"/proc/{pid}/fd/{published['fd']}", os.O_RDWR | os.O_CLOEXEC)
    status = os.fstat(segment)
    if (status.st_ino, status.st_dev) != (published["inode"], published["device"]):
        os.close(segment)
        raise OSError(f"descriptor {published['fd']} of process {pid} is another file")
    return segment


def _listener_for(group: GroupDescription) -> socket.socket:
    """Listen where no address is known by which others reach this rank: on loopback if all are on this host,
    else on all interfaces, because the others know this host by an address that it does not have."""
    if group.topology.hosts == 1:
        return group.listening.open(LOCAL_HOST)
    _log.warning(
        "rank %d listens on all interfaces until all ranks are connected: %s is no address of this machine "
        "that others could use; %s=ADDRESS chooses one",
        group.rendezvous.labels[group.rendezvous.rank],
        group.master,
        INTERFACE_VARIABLE,
    )
    return group.listening.open("")


def _endpoint(group: GroupDescription, rank: int) -> tuple[str, int]:
    """Return where another rank listens. A rank without an address that the others reach is on the master's
    host, and sends its port once connections are known to be needed."""
    host, port = group.hellos[rank]["endpoint"]
    if host:
        return str(host), int(port)
    port = int(group.rendezvous.read("port", rank)["port"])
    return (LOCAL_HOST if group.topology.hosts == 1 else group.master), port


def _connect(group: GroupDescription, listener: socket.socket) -> NetworkTransport:
    """Connect all ranks: a mesh, and a connection for bulk data beside each of the mesh's."""
    rendezvous, topology, hellos = group.rendezvous, group.topology, group.hellos
    rank = rendezvous.rank
    endpoints = {peer: _endpoint(group, peer) for peer in hellos if peer != rank}
    # Of the peers what they published, which the handshake checks; of this rank what it really offers.
    macs = {peer: Mac(hello["macs"]) for peer, hello in hellos.items()} | {rank: offered()}
    connected = connect_all(
        rank,
        listener,
        endpoints,
        group.secret,
        rendezvous.deadline,
        rendezvous.raise_if_failed,
        macs,
        rendezvous.labels,
    )
    # The address under which this rank talks to other hosts, if there are any.
    mine = topology.host_of[rank]
    peer = next((peer for peer in connected if topology.host_of[peer] != mine), next(iter(connected)))
    address = str(connected[peer].control.sock.getsockname()[0]).removeprefix("::ffff:")
    names = {peer: f"process {hello['pid']} on {hello['hostname']}" for peer, hello in hellos.items()}
    mesh = Mesh(rank, {peer: pair.control for peer, pair in connected.items()}, names, rendezvous.labels)
    bulk = BulkConnections({peer: pair.bulk for peer, pair in connected.items()}, mesh.notify)
    try:
        return NetworkTransport(mesh, bulk, topology, _native(group, mesh, address))
    except Exception as error:
        if isinstance(error, GroupInterruptedError):
            mesh.interrupt(error)
        mesh.close(error)
        bulk.close()
        rendezvous.cancel()
        raise RendezvousError(
            f"rank {rendezvous.labels[rank]} could not make the {group.backend} group of torch.distributed: "
            f"{error}"
        ) from error


def _native(group: GroupDescription, mesh: Mesh, address: str) -> BackendGroup:
    rendezvous = group.rendezvous
    rank, world_size = rendezvous.rank, rendezvous.world_size
    if group.native is None:
        backend = group.backend if group.backend in BACKENDS else "gloo"
        if backend != "nccl":
            return own_group(backend, mesh, address)
        return nccl_group(_lasting_store(group), rank, world_size, group.mates.index(rank))
    name = str(dist.get_backend(group.native))
    backend = "nccl" if "nccl" in name else "mpi" if name == "mpi" else "gloo"
    device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else None
    return BackendGroup(backend, lambda deadline: group.native, world_size, rank, device)


def _lasting_store(group: GroupDescription) -> Store:
    """Make a store that lives as long as the ranks that hold it: NCCL asks its store long after the start."""
    rendezvous = group.rendezvous
    host = group.hellos[0]["endpoint"][0] or group.master
    limit = timedelta(seconds=max(rendezvous.deadline - time.monotonic(), 1.0))
    if rendezvous.rank == 0:
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
        rendezvous.publish("nccl", {"port": port})
        return store
    port = int(rendezvous.read("nccl", 0)["port"])
    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=limit)
