"""The memory that a save copies tensors into: one buffer, laid out as the file will be (its image).

The buffer of a writer is kept and filled again, so that in the long run a save costs one copy and no
allocation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import final

import torch
from torch import Tensor

from paceline.checkpoint.digests import require_tensor
from paceline.checkpoint.tensor_file import IMAGE_STEP, TensorEntry, TensorFileLayout, image_memory, plan
from paceline.core.errors import UsageError


def layout_of(tensors: Mapping[str, Tensor], names: Sequence[str]) -> TensorFileLayout:
    """Return how the named tensors lie in a file; UsageError names one that cannot be saved."""
    described = []
    for name in names:
        tensor = require_tensor(name, tensors[name])
        if tensor.layout is not torch.strided or tensor.device.type == "meta":
            kind = "meta" if tensor.device.type == "meta" else str(tensor.layout).removeprefix("torch.")
            raise UsageError(
                f"tensor {name!r} is {kind}; only dense tensors can be saved",
                remedy="convert it with .to_dense(), or save its indices and values",
            )
        described.append((name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)))
    return plan(described)


_FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_PIECE = 32_000  # elements; torch works on so few in one thread


@final
class ImageBuffer:
    """Memory for one file's image, filled from tensors again and again.

    Tensors of a CUDA device are copied into pinned memory on a separate stream: `fill` returns while the
    copy runs, work that the caller starts afterwards waits for it on the device, and `wait` waits for it on
    the host.
    """

    def __init__(self) -> None:
        self._bytes: Tensor | None = None
        self._layout: TensorFileLayout | None = None
        self._places: list[Tensor] = []
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._copies: list[torch.cuda.Event] = []

    @property
    def nbytes(self) -> int:
        """The number of bytes that are held."""
        return 0 if self._bytes is None else self._bytes.numel()

    def fill(self, tensors: Mapping[str, Tensor], names: Sequence[str]) -> TensorFileLayout:
        """Copy the named tensors in; they may be changed as soon as this returns."""
        layout = layout_of(tensors, names)
        devices = {tensors[name].device for name in names if tensors[name].is_cuda}
        self._prepare(layout, pinned=bool(devices))
        with torch.no_grad():
            for device in devices:
                self._stream(device).wait_stream(torch.cuda.current_stream(device))
            for entry, place in zip(layout.entries, self._places, strict=True):
                source = tensors[entry.name].detach()
                if source.is_cuda:
                    with torch.cuda.stream(self._stream(source.device)):
                        place.copy_(source, non_blocking=True)
                else:
                    place.copy_(source)
            self._copies = [self._mark_end(device) for device in devices]
        return layout

    def wait(self) -> None:
        """Wait until the copies from devices have arrived."""
        for copied in self._copies:
            copied.synchronize()
        self._copies = []

    def image(self, layout: TensorFileLayout) -> memoryview:
        """Return the file's bytes."""
        assert self._bytes is not None
        return memoryview(self._bytes.numpy().data)[: layout.nbytes]

    def finite(self, layout: TensorFileLayout, prefix: str) -> bool:
        """Return whether the tensors whose name begins so are all finite; in pieces, so that no other thread
        is woken to help, and without further memory."""
        for entry, place in zip(layout.entries, self._places, strict=True):
            if entry.name.startswith(prefix) and place.dtype in _FLOATS and place.numel():
                flat = place.reshape(-1)
                for start in range(0, flat.numel(), _PIECE):
                    low, high = torch.aminmax(flat[start : start + _PIECE])
                    if not math.isfinite(float(low)) or not math.isfinite(float(high)):
                        return False
        return True

    def release(self) -> None:
        """Give the memory back."""
        self._bytes, self._layout, self._places = None, None, []

    def _prepare(self, layout: TensorFileLayout, *, pinned: bool) -> None:
        if self._bytes is None or self.nbytes < layout.nbytes or self._bytes.is_pinned() != pinned:
            self.release()
            if pinned:
                self._bytes = torch.empty(layout.nbytes + IMAGE_STEP, dtype=torch.uint8, pin_memory=True)
            else:
                self._bytes = torch.frombuffer(image_memory(layout.nbytes), dtype=torch.uint8)
        if layout != self._layout:
            self._bytes[: len(layout.header)] = torch.frombuffer(bytearray(layout.header), dtype=torch.uint8)
            self._places = [view_of(self._bytes, entry) for entry in layout.entries]
            self._layout = layout

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return self._streams[device]

    def _mark_end(self, device: torch.device) -> torch.cuda.Event:
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record(self._stream(device))
        # The next update of the parameters must not overtake the copy.
        torch.cuda.current_stream(device).wait_event(copied)
        return copied


def view_of(image: Tensor, entry: TensorEntry) -> Tensor:
    """Return the tensor whose memory is a piece of the image."""
    dtype: torch.dtype = getattr(torch, entry.dtype)
    if entry.start == entry.stop:
        return torch.empty(entry.shape, dtype=dtype)
    return image[entry.start : entry.stop].view(dtype).view(entry.shape)
