"""Python objects in memory files: a pickle, then its large buffers, aligned, without a copy in between.

    pickle | padding | buffer | padding | buffer | ... | index as JSON | length of the index (8 bytes)

One file can be read by any number of ranks: they map it copy-on-write, so a big argument is in memory once. A
process that will live on copies the buffers instead, so that it holds no descriptor.

`shared` are classes that both sides hold already (sent by value earlier): they travel as a number and arrive
as the very same class, so that `type(result)` is the caller's class.
"""

from __future__ import annotations

import io
import json
import mmap
import os
import pickle
import struct
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from types import FunctionType
from typing import Any, TypeAlias

import cloudpickle

from paceline.core.sandbox_fallbacks import memory_file

Reducers: TypeAlias = Mapping[type, Callable[[Any], Any]]

_ALIGN = 64
_INLINE_BELOW = 4 * 1024
_PAGES_FROM = 1 << 20
_LENGTH = struct.Struct("<Q")
_shared: ContextVar[Sequence[type]] = ContextVar("paceline_shared_classes", default=())


def dump(
    value: object,
    *,
    reducers: Reducers | None = None,
    shared: Sequence[type] = (),
    definitions: list[object] | None = None,
) -> int:
    """Write `value` to a new memory file and return its descriptor.

    Functions and classes that had to travel by value are appended to `definitions` as they are met.
    """
    descriptor = memory_file("paceline-payload")
    try:
        with os.fdopen(os.dup(descriptor), "wb") as file:
            buffers: list[pickle.PickleBuffer] = []
            _Pickler(file, buffers, reducers or {}, shared, definitions).dump(value)
            index = [[0, file.tell(), False]]
            for buffer in buffers:
                with buffer.raw() as raw:
                    file.seek(-file.tell() % _ALIGN, io.SEEK_CUR)
                    index.append([file.tell(), raw.nbytes, raw.readonly])
                    file.write(raw)
            tail = json.dumps(index).encode()
            file.write(tail + _LENGTH.pack(len(tail)))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def load(descriptor: int, *, shared: Sequence[type] = (), mapped: bool = False) -> Any:
    """Read an object back. `mapped`: buffers stay in the file, pages written to become private."""
    size = os.fstat(descriptor).st_size
    (length,) = _LENGTH.unpack(os.pread(descriptor, _LENGTH.size, size - _LENGTH.size))
    index = json.loads(os.pread(descriptor, length, size - _LENGTH.size - length))
    if mapped:
        view = memoryview(mmap.mmap(descriptor, size, access=mmap.ACCESS_COPY))
        parts = [view[offset : offset + length] for offset, length, _ in index]
    else:
        parts = [_read(descriptor, offset, length) for offset, length, _ in index]
    buffers = [
        part.toreadonly() if readonly else part for part, (_, _, readonly) in zip(parts, index, strict=True)
    ]
    token = _shared.set(shared)
    try:
        return pickle.loads(buffers[0], buffers=buffers[1:])
    finally:
        _shared.reset(token)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickler with large buffers out of band and shared classes as numbers; notes what travels by value."""

    def __init__(
        self,
        file: io.BufferedIOBase,
        buffers: list[pickle.PickleBuffer],
        reducers: Reducers,
        shared: Sequence[type],
        definitions: list[object] | None,
    ) -> None:
        def keep_inline(buffer: pickle.PickleBuffer) -> bool:
            if buffer.raw().nbytes < _INLINE_BELOW:
                return True
            buffers.append(buffer)
            return False

        # Before the base class, which looks at it once, when it is made.
        self.dispatch_table = ChainMap(reducers, cloudpickle.Pickler.dispatch_table)  # type: ignore[arg-type]
        super().__init__(file, protocol=5, buffer_callback=keep_inline)
        self._numbers = {cls: number for number, cls in enumerate(shared)}
        self._definitions = definitions

    def reducer_override(self, obj: Any) -> Any:
        is_class = isinstance(obj, type)
        if is_class and obj in self._numbers:
            return _shared_class, (self._numbers[obj],)
        reduced = super().reducer_override(obj)
        if self._definitions is not None and reduced is not NotImplemented:
            by_value = obj.__module__ != "builtins" if is_class else isinstance(obj, FunctionType)
            if by_value:
                self._definitions.append(obj)
        return reduced


def _shared_class(number: int) -> type:
    return _shared.get()[number]


def _read(descriptor: int, offset: int, length: int) -> memoryview:
    if length >= _PAGES_FROM:
        pages = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        pages.madvise(mmap.MADV_HUGEPAGE)
        view = memoryview(pages)
    else:
        view = memoryview(bytearray(length))
    done = 0
    while done < length:
        # One call moves at most 2 GiB.
        step = os.preadv(descriptor, [view[done:]], offset + done)
        if step == 0:
            raise EOFError("a memory file is shorter than its index says")
        done += step
    return view
