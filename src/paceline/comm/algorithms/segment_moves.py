"""The moves that message-passing algorithms are made of, with or without compression.

A flat accumulator is cut into segments. `reduce` sends segments of the accumulator and folds what arrives;
when a segment is complete on its owner, `finish_segment` finishes it (average, rounding, encoding), and
`share` passes it on. With compression every rank encodes each position at most once before it is finished,
so the error-feedback residual of a position belongs to one rank and one moment. Finished segments are
forwarded as the bytes that their owner made: all ranks end with the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.comm.algorithms.reduce_request import ReduceRequest
from paceline.comm.ops import accumulator_dtype, finish, kernel_of
from paceline.comm.reduction_order import Segment


class MessageSteps:
    def __init__(self, request: ReduceRequest) -> None:
        self._request = request
        self._kernel = kernel_of(request.op)
        wide = accumulator_dtype(request.flat.dtype)
        if request.out.dtype == wide:
            self.accumulator = request.out
            if request.out.data_ptr() != request.flat.data_ptr():
                request.out.copy_(request.flat)
        else:
            self.accumulator = request.flat.to(wide)
        self._transfer = (
            None if request.compression is None else request.compression.open(self.accumulator, request.name)
        )
        self._finished: dict[Segment, Tensor] = {}

    def __enter__(self) -> MessageSteps:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if self._transfer is not None:
            if error is None:
                self._transfer.close()
            else:
                self._transfer.abort()

    def reduce(self, sends: Sequence[tuple[int, Segment]], receives: Sequence[tuple[int, Segment]]) -> None:
        """Exchange partial sums in one round, and fold those that come in, in the order given."""
        for (_, segment), values in zip(receives, self.partials(sends, receives), strict=True):
            self._fold(segment, values)

    def partials(
        self, sends: Sequence[tuple[int, Segment]], receives: Sequence[tuple[int, Segment]]
    ) -> list[Tensor]:
        """Exchange partial sums in one round, and return those that come in, unfolded."""
        outgoing = [(peer, self._packed(segment)) for peer, segment in sends]
        incoming = [(peer, self._room(segment)) for peer, segment in receives]
        self._exchange(outgoing, incoming)
        return [
            self._unpacked(arrived, segment)
            for (_, segment), (_, arrived) in zip(receives, incoming, strict=True)
        ]

    def outgoing(self, segment: Segment, *, finished: bool) -> Tensor:
        """Return what travels of a segment: this rank's partial sum of it, or its finished form."""
        if not finished:
            return self._packed(segment)
        return self._span([segment]) if self._transfer is None else self._finished[segment]

    def incoming(self, segment: Segment, *, finished: bool, used: Tensor) -> Tensor:
        """Return where a peer's message of a segment goes: memory that was used before where it fits."""
        if finished and self._transfer is None:
            return self._span([segment])
        room = self._room_for(segment)
        fits = not finished and used.numel() == room[0] and used.dtype == room[1]
        return used if fits else self._room(segment)

    def arrived(self, segment: Segment, message: Tensor, *, finished: bool) -> None:
        """Take up a peer's message of a segment: fold a partial sum, or keep what is finished."""
        if not finished:
            self._fold(segment, self._unpacked(message, segment))
        elif self._transfer is not None:
            self._keep_finished(segment, message)

    def _fold(self, segment: Segment, values: Tensor) -> None:
        mine = self.accumulator[slice(*segment)]
        self._kernel(mine, values, out=mine)

    def finish_segment(self, segment: Segment) -> None:
        """Make this rank's complete segment final, and what the others will get."""
        if self._transfer is not None:
            # The residual is in the unit of the sum: encode first, divide what was decoded.
            self._keep_finished(segment, self._transfer.encode(*segment))
        else:
            self._finish(segment)

    def share(
        self,
        sends: Sequence[tuple[int, Sequence[Segment]]],
        receives: Sequence[tuple[int, Sequence[Segment]]],
    ) -> None:
        """Exchange finished segments in one round; each message holds neighbouring segments."""
        if self._transfer is None:
            outgoing = [(peer, self._span(segments)) for peer, segments in sends]
            incoming = [(peer, self._span(segments)) for peer, segments in receives]
            self._exchange(outgoing, incoming)
            return
        outgoing = [
            (peer, torch.cat([self._finished[segment] for segment in segments])) for peer, segments in sends
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
                self._keep_finished(segment, encoded)

    def _keep_finished(self, segment: Segment, encoded: Tensor) -> None:
        """Keep what the owner of a segment made of it, to pass it on; decode it into the result."""
        assert self._transfer is not None
        self._finished[segment] = encoded
        self._transfer.decode(encoded, self.accumulator[slice(*segment)])
        self._finish(segment)

    def _finish(self, segment: Segment) -> None:
        total = self.accumulator[slice(*segment)]
        finish(self._request.op, total, self._request.transport.world_size)
        if self.accumulator is not self._request.out:
            self._request.out[slice(*segment)].copy_(total)

    def _exchange(self, outgoing: list[tuple[int, Tensor]], incoming: list[tuple[int, Tensor]]) -> None:
        self._request.transport.exchange(self._request.call, outgoing, incoming, self._request.deadline)

    def _packed(self, segment: Segment) -> Tensor:
        transfer = self._transfer
        return self.accumulator[slice(*segment)] if transfer is None else transfer.encode(*segment)

    def _room_for(self, segment: Segment) -> tuple[int, torch.dtype]:
        """Return elements and dtype of a segment as it travels."""
        size = segment[1] - segment[0]
        if self._transfer is None:
            return size, self.accumulator.dtype
        return self._transfer.encoded_bytes(size), torch.uint8

    def _room(self, segment: Segment) -> Tensor:
        size, dtype = self._room_for(segment)
        return torch.empty(size, dtype=dtype, device="cpu")

    def _unpacked(self, arrived: Tensor, segment: Segment) -> Tensor:
        if self._transfer is None:
            return arrived
        values = torch.empty(segment[1] - segment[0], dtype=self.accumulator.dtype, device="cpu")
        self._transfer.decode(arrived, values)
        return values

    def _span(self, segments: Sequence[Segment]) -> Tensor:
        return self._request.out[segments[0][0] : segments[-1][1]]
