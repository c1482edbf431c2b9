"""Codecs and error feedback: what every gradient compressor has in common.

A codec turns a segment of a flat tensor into bytes and back, and knows nothing else. `Compression` is what
a user holds: a codec plus, for every tensor name, the residual, i.e. what earlier calls failed to send.
`EncodedTransfer` is one all-reduce call in progress. Nothing here knows ranks, algorithms or transports: an
algorithm asks a transfer to encode the segments that it is about to send and to decode those that it has
received.

Error feedback, precisely. `open` adds the residual of earlier calls to this rank's contribution. `encode`
remembers `values - decode(encode(values))` at the position of the segment; where `values` are partial sums,
that is the loss of the partial sum, and this rank makes it up in the next call. A position that is encoded
twice in a call keeps the loss of the last time. `close` makes the new residual the valid one, `abort` keeps
the old one. Residuals are in the unit of what is encoded, so an average has to be taken after decoding (or
before `open`), not between the two.

Memory: two tensors of the size of `flat` per name, the residual and the one that the next call writes. The
second one is what makes `abort` possible, and it is kept because fresh pages cost more than the codecs do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol, final

import torch
from torch import Tensor

from paceline.core.errors import InternalError, UsageError
from paceline.core.wording import counted

# Elements per step of a codec's loop on a CPU: temporaries of 1 MiB stay in the cache.
CHUNK = 1 << 18

_CODEC_KEY = "codec"
_RESIDUAL_PREFIX = "residual."


class Codec(Protocol):
    """Encoding of segments as bytes: stateless, deterministic, and the same on every rank.

    The size of the bytes depends on the number of elements alone, so that a receiver knows it beforehand.
    Non-finite values must stay visible after decoding, as NaN or as infinity.
    """

    @property
    def name(self) -> str:
        """The name of codec and settings: two codecs of one name understand each other's bytes."""

    def encoded_bytes(self, numel: int) -> int:
        """Return the size of an encoded segment of `numel` elements."""

    def encode(self, values: Tensor) -> Tensor:
        """Return `encoded_bytes(numel)` bytes (1-D uint8) that stand for `values` (1-D float32)."""

    def decode(self, encoded: Tensor, out: Tensor) -> None:
        """Overwrite `out` (1-D float32) with what `encoded` stands for."""


@final
@dataclass(slots=True, eq=False, repr=False)
class EncodedTransfer:
    """One all-reduce call under compression; made by `Compression.open`."""

    _codec: Codec
    _flat: Tensor
    _residual: Tensor | None
    _finish: Callable[[Tensor | None, bool], None] | None  # None: it has ended

    def encoded_bytes(self, numel: int) -> int:
        """Return the size of an encoded segment of `numel` elements."""
        return self._codec.encoded_bytes(numel)

    def encode(self, start: int, stop: int) -> Tensor:
        """Encode `flat[start:stop]` as it is now and remember what the bytes lose."""
        if self._finish is None:
            raise InternalError("a compressed transfer was used after it had ended")
        if not 0 <= start <= stop <= self._flat.numel():
            raise InternalError(
                f"a transfer of {counted(self._flat.numel(), 'element')} was asked for the segment "
                f"[{start}, {stop})"
            )
        values = self._flat[start:stop]
        encoded = self._codec.encode(_as_float32(values))
        if self._residual is not None:
            lost = self._residual[start:stop]
            self.decode(encoded, lost)
            torch.sub(values, lost, out=lost)
            # What was not finite has been seen by all ranks; kept, it would poison every later call.
            lost.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        return encoded

    def decode(self, encoded: Tensor, out: Tensor) -> None:
        """Overwrite `out` (1-D, float32 or float64) with what `encoded` stands for."""
        expected = self._codec.encoded_bytes(out.numel())
        if encoded.numel() != expected:
            raise InternalError(
                f"{self._codec.name} has {counted(expected, 'byte')} for {counted(out.numel(), 'element')}, "
                f"not {encoded.numel()}"
            )
        if out.dtype == torch.float32:
            self._codec.decode(encoded, out)
            return
        single = torch.empty(out.numel(), dtype=torch.float32, device=out.device)
        self._codec.decode(encoded, single)
        out.copy_(single)

    def close(self) -> None:
        """End the call: its losses become the residual. Positions never encoded have lost nothing."""
        self._end(keep=True)

    def abort(self) -> None:
        """End a failed call: the residual is as before. `flat` is of no use now; retry from the input."""
        self._end(keep=False)

    def _end(self, *, keep: bool) -> None:
        # Ending twice is harmless, so that an error handler may abort without asking how far the call came.
        if self._finish is not None:
            finish, self._finish = self._finish, None
            finish(self._residual, keep)


@final
class Compression:
    """A codec with error feedback: pass it as `compression=` to an all-reduce, save its state with the model.

    It belongs to one rank. Every tensor that is reduced through it needs a name of its own, and one call
    per name may be under way at a time.
    """

    def __init__(self, codec: Codec, *, error_feedback: bool = True) -> None:
        self.codec = codec
        self.error_feedback = error_feedback
        self._residuals: dict[str, Tensor] = {}
        self._spares: dict[str, Tensor] = {}
        self._open: set[str] = set()

    def __repr__(self) -> str:
        return f"Compression({self.codec.name}{'' if self.error_feedback else ', error_feedback=False'})"

    @property
    def name(self) -> str:
        """The name of the codec: ranks whose names differ cannot talk to each other."""
        return self.codec.name

    def check(self, numel: int, dtype: torch.dtype, name: str) -> None:
        """Refuse what `open` would refuse, before anything travels."""
        if name in self._open:
            raise UsageError(
                f"compression {self.name} already has a call under way for {name!r}",
                remedy="wait for that call first, or give each tensor a name of its own",
            )
        residual = self._residuals.get(name)
        if residual is not None and (residual.numel() != numel or residual.dtype != dtype):
            raise UsageError(
                f"compression {self.name} holds a residual of {residual.numel()} x {residual.dtype} "
                f"for {name!r}, and was now given {numel} x {dtype}",
                remedy="one name per tensor: give tensors of another size or dtype another name",
            )

    def open(self, flat: Tensor, name: str) -> EncodedTransfer:
        """Add the residual of `name` to `flat`, in place, and begin a call."""
        flat = flat.detach()
        if flat.dim() != 1 or flat.dtype not in (torch.float32, torch.float64):
            raise UsageError(
                f"compression {self.name} was given {name!r} with {counted(flat.dim(), 'dimension')} of "
                f"{flat.dtype}; it takes flat float32 or float64 tensors",
                remedy="compress floating-point gradients only, and reduce integers without compression",
            )
        self.check(flat.numel(), flat.dtype, name)
        fresh = self._feed_back(flat, name) if self.error_feedback else None
        self._open.add(name)

        def finish(residual: Tensor | None, keep: bool) -> None:
            self._open.discard(name)
            if residual is not None and keep:
                previous = self._residuals.pop(name, None)
                self._residuals[name] = residual
                residual = previous
            if residual is not None:
                self._spares[name] = residual

        return EncodedTransfer(self.codec, flat, fresh, finish)

    def _feed_back(self, flat: Tensor, name: str) -> Tensor:
        residual = self._residuals.get(name)
        if residual is not None:
            if residual.device != flat.device:
                residual = self._residuals[name] = residual.to(flat.device)
            flat.add_(residual)
        spare = self._spares.pop(name, None)
        wanted = (flat.shape, flat.dtype, flat.device)
        if spare is None or (spare.shape, spare.dtype, spare.device) != wanted:
            return torch.zeros_like(flat, memory_format=torch.contiguous_format)
        return spare.zero_()

    @property
    def residuals(self) -> Mapping[str, Tensor]:
        """The residuals by name: the tensors themselves, to be read before the next call."""
        self._refuse_while_open("read")
        return MappingProxyType(self._residuals)

    def keep(self, residuals: Mapping[str, Tensor]) -> None:
        """Replace the residuals by these, without the copies that `load_state_dict` makes."""
        self._refuse_while_open("loaded")
        self._residuals = dict(residuals)
        self._spares = {name: spare for name, spare in self._spares.items() if name in residuals}

    def state_dict(self) -> dict[str, Tensor]:
        """Return copies of the residuals by name, and the name of the codec they belong to."""
        self._refuse_while_open("saved")
        state = {_CODEC_KEY: text_to_tensor(self.name)}
        for name, residual in self._residuals.items():
            state[_RESIDUAL_PREFIX + name] = residual.clone()
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Replace all residuals by those of `state`; they move to the tensors' device with the next call."""
        self._refuse_while_open("loaded")
        check_saved_name(state, _CODEC_KEY, self.name)
        residuals = {}
        for key, value in state.items():
            if key == _CODEC_KEY:
                continue
            if not key.startswith(_RESIDUAL_PREFIX):
                raise UsageError(
                    f"the saved state of compression {self.name} has an unknown entry {key!r}",
                    remedy="load what Compression.state_dict() returned",
                )
            residuals[key.removeprefix(_RESIDUAL_PREFIX)] = value.detach().clone()
        if residuals and not self.error_feedback:
            raise UsageError(
                f"the saved state holds residuals, and this compression {self.name} has error_feedback=False",
                remedy="load it into a compression with error feedback, or start without a saved state",
            )
        self._residuals = residuals
        self._spares = {}

    def _refuse_while_open(self, verb: str) -> None:
        if self._open:
            raise UsageError(
                f"the state of compression {self.name} cannot be {verb} while calls are under way: "
                f"{', '.join(sorted(self._open))}",
                remedy="wait for the asynchronous all-reduces first",
            )


def chunks(numel: int, device: torch.device, multiple: int = 1) -> Iterator[tuple[int, int]]:
    """Cut `range(numel)` into pieces that fit a CPU's cache, starting at multiples of `multiple`.

    Other devices get it whole: there a launch costs more than a pass through memory.
    """
    step = max(multiple, CHUNK // multiple * multiple) if device.type == "cpu" else max(numel, 1)
    for start in range(0, numel, step):
        yield start, min(start + step, numel)


def typed_view(encoded: Tensor, dtype: torch.dtype) -> Tensor:
    """View bytes as numbers; bytes that do not lie at a multiple of the number's size are copied first."""
    size = dtype.itemsize
    if encoded.storage_offset() % size or encoded.data_ptr() % size or not encoded.is_contiguous():
        encoded = encoded.clone(memory_format=torch.contiguous_format)
    return encoded.view(dtype)


def text_to_tensor(text: str) -> Tensor:
    """Wrap a short text so that it can stand in a state of tensors."""
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


def check_saved_name(state: Mapping[str, Tensor], key: str, expected: str) -> None:
    """Refuse a saved state that was written by another compressor."""
    saved = bytes(state[key].tolist()).decode(errors="replace") if key in state else None
    if saved != expected:
        origin = "names no compressor" if saved is None else f"was written by {saved}"
        raise UsageError(
            f"the saved compression state {origin}, and this compressor is {expected}",
            remedy="use the settings that the state was saved with, or start without a saved state",
        )


def _as_float32(values: Tensor) -> Tensor:
    if values.dtype == torch.float32:
        return values.contiguous()
    single = values.to(torch.float32)
    # A large double is not an infinity: it saturates, and the residual keeps the rest.
    limit = torch.finfo(torch.float32).max
    return torch.where(values.isfinite(), single.clamp_(-limit, limit), values.to(torch.float32))
