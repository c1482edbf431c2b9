"""The moves that message-passing algorithms are made of, with or without compression.

A flat accumulator is cut into segments. `reduce` sends segments of the accumulator and folds what arrives;
when a segment is complete on its owner, `seal` finishes it (average, rounding, encoding); `share` passes
sealed segments on. With compression every rank encodes each position at most once before it is sealed, so
the error-feedback residual of a position belongs to one rank and one moment. Sealed segments are forwarded
as the bytes their owner made: all ranks end with the same bits.

Knows segments and codecs; which rank talks to which is the algorithm's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from types import TracebackType

import torch
from torch import Tensor

from paceline.comm.algorithms.job import Job
from paceline.comm.ops import accumulator_dtype, finish, kernel_of
from paceline.comm.transport.base import Transport

Segment = tuple[int, int]


def cut(size: int, parts: int, align: int = 1) -> list[Segment]:
    """`parts` ranges that cover `size` elements, as even as the alignment allows."""
    units = -(-size // align)
    edges = [min(size, units * part // parts * align) for part in range(parts + 1)]
    return list(pairwise(edges))


class Hops:
    def __init__(self, job: Job, *, contributions: int | None = None) -> None:
        self._job = job
        self._transport: Transport = job.transport
        self._kernel = kernel_of(job.op)
        self._contributions = contributions if contributions is not None else job.transport.world_size
        wide = accumulator_dtype(job.flat.dtype)
        if job.out.dtype == wide:
            self.accumulator = job.out
            if job.out.data_ptr() != job.flat.data_ptr():
                job.out.copy_(job.flat)
        else:
            self.accumulator = job.flat.to(wide)
        self._transfer = None if job.compression is None else job.compression.open(self.accumulator, job.name)
        self._sealed: dict[Segment, Tensor] = {}

    def __enter__(self) -> Hops:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._transfer is not None:
            if error is None:
                self._transfer.close()
            else:
                self._transfer.abort()

    def reduce(self, sends: Sequence[tuple[int, Segment]], receives: Sequence[tuple[int, Segment]]) -> None:
        """One round: partial sums go out, partial sums come in and are folded in the order given."""
        outgoing = [(peer, self._packed(segment)) for peer, segment in sends]
        incoming = [(peer, self._room(segment)) for peer, segment in receives]
        self._exchange(outgoing, incoming)
        for (_, segment), (_, arrived) in zip(receives, incoming, strict=True):
            self.arrived(segment, arrived, sealed=False)

    def outgoing(self, segment: Segment, *, sealed: bool) -> Tensor:
        """What travels of a segment: this rank's partial sum of it, or its sealed form."""
        if not sealed:
            return self._packed(segment)
        return self._span([segment]) if self._transfer is None else self._sealed[segment]

    def incoming(self, segment: Segment, *, sealed: bool, used: Tensor) -> Tensor:
        """Where a peer's message of a segment goes: memory that was used before where it fits."""
        if sealed and self._transfer is None:
            return self._span([segment])
        room = self._room_for(segment)
        fits = not sealed and used.numel() == room[0] and used.dtype == room[1]
        return used if fits else self._room(segment)

    def arrived(self, segment: Segment, message: Tensor, *, sealed: bool) -> None:
        """Takes up a peer's message of a segment: folds a partial sum, or keeps what is sealed."""
        if not sealed:
            self._fold(segment, self._unpacked(message, segment[1] - segment[0]))
        elif self._transfer is not None:
            self._keep_sealed(segment, message)

    def _fold(self, segment: Segment, values: Tensor) -> None:
        mine = self.accumulator[slice(*segment)]
        self._kernel(mine, values, out=mine)

    def gather_partials(
        self, sends: Sequence[tuple[int, Segment]], sources: Sequence[int], segment: Segment
    ) -> list[Tensor]:
        """One round in which the owner of `segment` gets every source's part of it, unfolded."""
        outgoing = [(peer, self._packed(part)) for peer, part in sends]
        incoming = [(peer, self._room(segment)) for peer in sources]
        self._exchange(outgoing, incoming)
        return [self._unpacked(arrived, segment[1] - segment[0]) for _, arrived in incoming]

    def seal(self, segment: Segment) -> None:
        """This rank's segment is complete: make it final, and what the others will get."""
        start, stop = segment
        total = self.accumulator[start:stop]
        if self._transfer is not None:
            # The residual is in the unit of the sum: encode first, divide what was decoded.
            self._keep_sealed(segment, self._transfer.encode(start, stop))
            return
        finish(self._job.op, total, self._contributions)
        self._publish(start, stop)

    def share(
        self,
        sends: Sequence[tuple[int, Sequence[Segment]]],
        receives: Sequence[tuple[int, Sequence[Segment]]],
    ) -> None:
        """One round: sealed segments go out and come in; each message holds neighbouring segments."""
        if self._transfer is None:
            outgoing = [(peer, self._span(segments)) for peer, segments in sends]
            incoming = [(peer, self._span(segments)) for peer, segments in receives]
            self._exchange(outgoing, incoming)
            return
        outgoing = [
            (peer, torch.cat([self._sealed[segment] for segment in segments])) for peer, segments in sends
        ]
        sizes = [
            [self._transfer.encoded_bytes(stop - start) for start, stop in segments]
            for _, segments in receives
        ]
        incoming = [
            (peer, torch.empty(sum(lengths), dtype=torch.uint8, device="cpu"))
            for (peer, _), lengths in zip(receives, sizes, strict=True)
        ]
        self._exchange(outgoing, incoming)
        for (_, segments), (_, arrived), lengths in zip(receives, incoming, sizes, strict=True):
            for segment, encoded in zip(segments, torch.split(arrived, lengths), strict=True):
                self._keep_sealed(segment, encoded)

    def _keep_sealed(self, segment: Segment, encoded: Tensor) -> None:
        """What the owner of a segment made of it: to pass on as it is, and decoded into the result."""
        assert self._transfer is not None
        start, stop = segment
        self._sealed[segment] = encoded
        total = self.accumulator[start:stop]
        self._transfer.decode(encoded, total)
        finish(self._job.op, total, self._contributions)
        self._publish(start, stop)

    def _publish(self, start: int, stop: int) -> None:
        if self.accumulator is not self._job.out:
            self._job.out[start:stop].copy_(self.accumulator[start:stop])

    def _exchange(self, outgoing: list[tuple[int, Tensor]], incoming: list[tuple[int, Tensor]]) -> None:
        self._transport.exchange(self._job.call, outgoing, incoming, self._job.deadline)

    def _packed(self, segment: Segment) -> Tensor:
        start, stop = segment
        return self.accumulator[start:stop] if self._transfer is None else self._transfer.encode(start, stop)

    def _room_for(self, segment: Segment) -> tuple[int, torch.dtype]:
        """Elements and dtype of a segment as it travels."""
        size = segment[1] - segment[0]
        if self._transfer is None:
            return size, self.accumulator.dtype
        return self._transfer.encoded_bytes(size), torch.uint8

    def _room(self, segment: Segment) -> Tensor:
        size, dtype = self._room_for(segment)
        return torch.empty(size, dtype=dtype, device="cpu")

    def _unpacked(self, arrived: Tensor, size: int) -> Tensor:
        if self._transfer is None:
            return arrived
        values = torch.empty(size, dtype=self.accumulator.dtype, device="cpu")
        self._transfer.decode(arrived, values)
        return values

    def _span(self, segments: Sequence[Segment]) -> Tensor:
        return self._job.out[segments[0][0] : segments[-1][1]]
