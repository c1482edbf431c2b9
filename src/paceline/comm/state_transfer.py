"""State transfer: a member's whole state for ranks that lack it, point to point, checked, without a second
copy of it.

    source -> receiver    what there is: names, dtypes, shapes, where it lies, and plain data
    receiver -> source    "read" where the receiver can copy out of the source's memory, else "pieces"
    source -> receiver    pieces of some megabytes, only a few ahead of the receiver
    source -> receiver    a checksum per tensor
    receiver -> source    which tensors did not match theirs

On one host the kernel copies once, from tensor to tensor, and all receivers copy at the same time;
elsewhere each piece goes to all receivers before the next one. Tensors of a GPU pass through the host's
memory piece by piece and arrive on the CPU. Nothing is unpickled.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import msgspec
import torch
import xxhash
from torch import Tensor

from paceline.comm.collectives.message_encoding import DTYPES, raw_bytes
from paceline.comm.collectives.reduction_input import check_dense
from paceline.comm.context import DistributedContext
from paceline.comm.ops import dtype_name
from paceline.comm.transport.base import memory_of
from paceline.comm.transport.shm.cross_memory import CrossMemory
from paceline.core.errors import CorruptDataError, PeerError, PeerLostError
from paceline.core.time_limits import COLLECTIVE_SECONDS

PIECE_BYTES = 4 << 20
_AHEAD = 4
# Far from the tags that people choose.
_ABOUT, _WAY, _PIECE, _GOT, _CHECKSUMS, _END = range(0x7FFF_FF00, 0x7FFF_FF06)
_READ, _PIECES = "read", "pieces"


def send_state(
    context: DistributedContext, ranks: Sequence[int], tensors: Mapping[str, Tensor], plain: Any
) -> None:
    """Send tensors and plain data to `ranks`, which all call `receive_state`. Return when they have them;
    until then the tensors must not change."""
    if not ranks:
        return
    deadline = time.monotonic() + COLLECTIVE_SECONDS
    stock = TensorPieces(tensors)
    reach = CrossMemory()
    reach.allow_siblings()
    about = {
        "names": list(tensors),
        "dtypes": [dtype_name(tensor.dtype) for tensor in tensors.values()],
        "shapes": [list(tensor.shape) for tensor in tensors.values()],
        "plain": plain,
        "pid": os.getpid(),
        "word": [reach.address, reach.word.value],
        "addresses": stock.addresses(),
    }
    for rank in ranks:
        context.send(about, rank, tag=_ABOUT, timeout=COLLECTIVE_SECONDS)
    ways = {rank: context.receive(rank, tag=_WAY, timeout=COLLECTIVE_SECONDS) for rank in ranks}
    send_pieces(context, [rank for rank, way in ways.items() if way != _READ], stock, deadline)
    for rank in ranks:
        context.send(stock.checksums(), rank, tag=_CHECKSUMS, timeout=COLLECTIVE_SECONDS)
    damaged = {rank: context.receive(rank, tag=_END, timeout=COLLECTIVE_SECONDS) for rank in ranks}
    if any(damaged.values()):
        labels = context.labels
        listing = "; ".join(
            f"rank {labels[rank]}: {', '.join(names)}" for rank, names in damaged.items() if names
        )
        mine = labels[context.rank]
        raise CorruptDataError(
            f"the state of rank {mine} did not match its checksums where it arrived ({listing})", rank=mine
        )


def receive_state(context: DistributedContext, source: int) -> tuple[dict[str, Tensor], Any]:
    """Receive what `source` sends: tensors on the CPU, and the plain data."""
    deadline = time.monotonic() + COLLECTIVE_SECONDS
    about = _StateHeader.parse(
        context.receive(source, tag=_ABOUT, timeout=COLLECTIVE_SECONDS), context.labels[source]
    )
    kinds = list(zip(about.dtypes, about.shapes, strict=True))
    sizes = [math.prod(shape) * dtype.itemsize for dtype, shape in kinds]
    bodies = [torch.empty(size, dtype=torch.uint8, device="cpu") for size in sizes]
    hosts = context.transport.topology.host_of
    reach = CrossMemory()
    near = hosts[source] == hosts[context.rank] and None not in about.addresses
    if near and reach.try_word(about.pid, *about.word):
        context.send(_READ, source, tag=_WAY, timeout=COLLECTIVE_SECONDS)
        states = [
            _copied(context, reach, source, about.pid, address or 0, body)
            for address, body in zip(about.addresses, bodies, strict=True)
        ]
    else:
        context.send(_PIECES, source, tag=_WAY, timeout=COLLECTIVE_SECONDS)
        states = _taken(context, source, bodies, deadline)
    checksums = context.receive(source, tag=_CHECKSUMS, timeout=COLLECTIVE_SECONDS)
    checked = zip(about.names, states, checksums, strict=True)
    damaged = [name for name, state, checksum in checked if state.intdigest() != checksum]
    context.send(damaged, source, tag=_END, timeout=COLLECTIVE_SECONDS)
    if damaged:
        raise CorruptDataError(
            f"state that rank {context.labels[context.rank]} got of rank {context.labels[source]} does not "
            f"match its checksum: {', '.join(damaged[:8])}",
            rank=context.labels[source],
        )
    tensors = [body.view(dtype).view(shape) for body, (dtype, shape) in zip(bodies, kinds, strict=True)]
    return dict(zip(about.names, tensors, strict=True)), about.plain


@final
class TensorPieces:
    """The source's tensors, flat; hashed while they are sent, or when the checksums are asked for."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            check_dense(tensor, f"send_state: {name}")
        self._flats = [raw_bytes(tensor, on_device=True) for tensor in tensors.values()]
        self._checksums: list[int] | None = None

    def addresses(self) -> list[int | None]:
        """Return where each tensor lies in this process; None where no other process can read it."""
        return [flat.data_ptr() if flat.device.type == "cpu" else None for flat in self._flats]

    def pieces(self) -> Iterator[list[memoryview]]:
        """Yield all bytes in order, a few megabytes at a time."""
        states = [xxhash.xxh3_64() for _ in self._flats]
        piece: list[memoryview] = []
        room = PIECE_BYTES
        for flat, state in zip(self._flats, states, strict=True):
            at = 0
            while at < flat.numel():
                part = memory_of(flat[at : at + room].cpu())
                state.update(part)
                piece.append(part)
                at, room = at + len(part), room - len(part)
                if room == 0:
                    yield piece
                    piece, room = [], PIECE_BYTES
        if piece:
            yield piece
        self._checksums = [state.intdigest() for state in states]

    def checksums(self) -> list[int]:
        if self._checksums is None:
            for _ in self.pieces():
                continue
        assert self._checksums is not None
        return self._checksums


@dataclass(frozen=True)
class _StateHeader:
    """Header of a state transfer: what the source announces of its state."""

    names: list[str]
    dtypes: list[torch.dtype]
    shapes: list[tuple[int, ...]]
    plain: Any
    pid: int
    word: tuple[int, int]
    addresses: list[int | None]

    @classmethod
    def parse(cls, header: Any, source: int) -> _StateHeader:
        """Validate a state-transfer header."""
        try:
            return msgspec.convert(header, cls, dec_hook=lambda kind, name: DTYPES[name])
        except (KeyError, msgspec.ValidationError) as error:
            raise PeerError(
                f"what rank {source} sent is not the header of a state transfer: {error!r}",
                remedy="run the same Paceline version on every rank",
            ) from error


def _copied(
    context: DistributedContext, reach: CrossMemory, source: int, pid: int, address: int, body: Tensor
) -> Any:
    """Copy a tensor out of the source's memory; return its checksum."""
    state = xxhash.xxh3_64()
    for piece in torch.split(body, PIECE_BYTES) if body.numel() else ():
        context.check_open()
        done = 0
        while done < piece.numel():
            count = reach.read(pid, address + done, piece.data_ptr() + done, piece.numel() - done)
            if count <= 0:
                raise PeerLostError(
                    f"the memory of rank {context.labels[source]} (process {pid}) went away while rank "
                    f"{context.labels[context.rank]} copied its state",
                    rank=context.labels[source],
                )
            done += count
        state.update(memory_of(piece))
        address += piece.numel()
    return state


def send_pieces(
    context: DistributedContext, ranks: Sequence[int], stock: TensorPieces, deadline: float
) -> None:
    sent = 0
    for piece in stock.pieces():
        for rank in ranks:
            if sent >= _AHEAD:
                _got(context, rank, deadline)
            context.check_open()
            context.transport.post(rank, _PIECE, piece, deadline)
        sent += 1
    for rank in ranks:
        for _ in range(min(sent, _AHEAD)):
            _got(context, rank, deadline)


def _got(context: DistributedContext, rank: int, deadline: float) -> None:
    context.receive(rank, tag=_GOT, timeout=max(deadline - time.monotonic(), 0.001))


def _taken(context: DistributedContext, source: int, bodies: Sequence[Tensor], deadline: float) -> list[Any]:
    """Fill the tensors from pieces, in order; return their checksums."""
    states = [xxhash.xxh3_64() for _ in bodies]
    rest = [(body, state) for body, state in zip(bodies, states, strict=True) if body.numel()]
    rest.reverse()
    while rest:
        context.check_open()
        message = context.transport.take(source, _PIECE, deadline, own_deadline=True)
        arrived = torch.frombuffer(message.body, dtype=torch.uint8)
        while arrived.numel():
            if not rest:
                raise PeerError(
                    f"rank {context.labels[source]} sent more than it had announced",
                    remedy="run the same Paceline version",
                )
            body, state = rest.pop()
            count = min(body.numel(), arrived.numel())
            body[:count].copy_(arrived[:count])
            state.update(memory_of(body[:count]))
            arrived = arrived[count:]
            if count < body.numel():
                rest.append((body[count:], state))
        context.send(None, source, tag=_GOT, timeout=max(deadline - time.monotonic(), 0.001))
    return states
