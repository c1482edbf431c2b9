"""Encode plain Python data and NumPy arrays as bytes, and decode them.

A message is a small header, a msgpack tree, and the arrays' own memory beside the tree, each at a multiple of
64 bytes, so that encoding copies no array:

    magic  buffers:u32  tree_bytes:u64  length:u64 per buffer | tree | pad | buffer 0 | pad | buffer 1 ...

What msgpack has no word for (tuples, sets, big integers, arrays) is a list that begins with a marker. No
pickle: a message can never run code. Types of other layers join through `register`; this module knows neither
torch nor who talks to whom.
"""

from __future__ import annotations

import functools
import math
import operator
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final, Literal, NamedTuple, TypeVar

import msgpack
import numpy as np

from paceline.core.errors import UsageError, WireError
from paceline.core.wording import type_name

T = TypeVar("T")
Buffer = bytes | memoryview

ALIGNMENT: Final = 64

_MESSAGE_MAGIC: Final = b"PLm1"
_MESSAGE_HEAD: Final = struct.Struct("<4sIQ")
_COMPLEX: Final = struct.Struct("<dd")
# Below this an array costs less inside the tree than as a separate buffer.
_INLINE_BYTES: Final = 512


class _Code(IntEnum):
    TUPLE = 1
    SET = 2
    FROZENSET = 3
    ARRAY = 4
    SCALAR = 5
    BYTEARRAY = 6
    BYTES = 7
    REGISTERED = 8
    BIG_INT = 20
    COMPLEX = 21


_CONTAINERS: Final[dict[type, _Code]] = {tuple: _Code.TUPLE, set: _Code.SET, frozenset: _Code.FROZENSET}
_CONTAINER_OF: Final = {code: kind for kind, code in _CONTAINERS.items()}
_MARKERS: Final = {code: msgpack.ExtType(code, b"") for code in _Code}


class _RegisteredType(NamedTuple):
    type_: type
    name: str
    to_plain: Callable[[Any], object]
    from_plain: Callable[[Any], object]


_by_type: Final[dict[type, _RegisteredType]] = {}
_by_name: Final[dict[str, _RegisteredType]] = {}


def register(
    type_: type[T], name: str, to_plain: Callable[[T], object], from_plain: Callable[[Any], T]
) -> None:
    """Teach the wire a type: `to_plain` turns it into encodable data, `from_plain` turns that back.

    Subclasses of `type_` are encoded by the same functions. Registering the same pair again replaces it.
    """
    codec = _RegisteredType(type_, name, to_plain, from_plain)
    known = _by_name.setdefault(name, codec)
    if known.type_ is not type_:
        raise UsageError(
            f"wire name {name!r} already belongs to {type_name(known.type_)}",
            remedy=f"register {type_name(type_)} under another name",
        )
    _by_type[type_] = _by_name[name] = codec


def encode(obj: object) -> list[Buffer]:
    """Return `obj` as pieces whose concatenation is the message; large arrays are not copied.

    The pieces are valid as long as the arrays are not changed. A memoryview arrives as bytes.
    """
    buffers: list[Buffer] = []
    default = functools.partial(_to_tree, buffers)
    try:
        tree: bytes = msgpack.packb(
            _lift(obj), default=default, strict_types=True, unicode_errors="surrogatepass"
        )
    except _Unsupported as error:
        path = _path_to(obj, error.item, "message", 0) or "message (inside a registered type)"
        raise UsageError(
            f"{path} is of type {type_name(type(error.item))}, which cannot be sent{error.why}",
            remedy="send plain Python data, NumPy arrays or tensors (convert a subclass to its plain type "
            "first)",
            path=path,
        ) from None
    except (ValueError, OverflowError, RecursionError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(
            f"a message of type {type_name(type(obj))} cannot be sent: {error}",
            remedy="send data that is nested less than 500 levels deep and does not contain itself",
        ) from error
    lengths = [memoryview(buffer).nbytes for buffer in buffers]
    head = _MESSAGE_HEAD.pack(_MESSAGE_MAGIC, len(buffers), len(tree)) + struct.pack(
        f"<{len(lengths)}Q", *lengths
    )
    pieces: list[Buffer] = [head + tree]
    position = len(pieces[0])
    for buffer, length in zip(buffers, lengths, strict=True):
        padding = -position % ALIGNMENT
        if padding:
            pieces.append(bytes(padding))
        pieces.append(buffer)
        position += padding + length
    return pieces


def decode(buffer: bytes | bytearray | memoryview) -> Any:
    """Return the object that `encode` was given; its arrays are copies, and writable."""
    view = memoryview(buffer).cast("B")
    tree, buffers = _split(view)

    def sequence(items: list[Any]) -> object:
        if items and isinstance(items[0], _Code):
            return _from_tree(items[0], items[1:], buffers)
        return items

    try:
        return msgpack.unpackb(
            tree,
            ext_hook=_from_extension,
            list_hook=sequence,
            strict_map_key=False,
            raw=False,
            unicode_errors="surrogatepass",
        )
    except WireError:
        raise
    except Exception as error:
        # Of whatever kind: a length can be too large for the memory, a dtype too deep for the stack.
        raise WireError(f"a message of {len(view)} bytes cannot be read: {error}") from error


class _Unsupported(Exception):  # noqa: N818 - a signal inside this module, never seen outside
    def __init__(self, item: object, why: str) -> None:
        super().__init__()
        self.item = item
        self.why = why


def _to_tree(buffers: list[Buffer], item: Any) -> object:
    """Return the tree of an item that msgpack has no word for."""
    kind = type(item)
    if kind in _CONTAINERS:
        return [_MARKERS[_CONTAINERS[kind]], *item]
    if kind is np.ndarray:
        return _array_tree(item, buffers)
    if isinstance(item, np.generic):
        return [_MARKERS[_Code.SCALAR], _describe(item), item.tobytes()]
    if isinstance(item, _Lifted):
        code = _Code.BYTES if isinstance(item.data, bytes) else _Code.BYTEARRAY
        return [_MARKERS[code], _place(memoryview(item.data), buffers)]
    if kind is int:
        size = item.bit_length() // 8 + 1
        return msgpack.ExtType(_Code.BIG_INT, item.to_bytes(size, "little", signed=True))
    if kind is complex:
        return msgpack.ExtType(_Code.COMPLEX, _COMPLEX.pack(item.real, item.imag))
    for ancestor in kind.__mro__:
        codec = _by_type.get(ancestor)
        if codec is not None:
            return [_MARKERS[_Code.REGISTERED], codec.name, _lift(codec.to_plain(item))]
    raise _Unsupported(item, "")


@dataclass(frozen=True)
class _Lifted:
    """Bytes that msgpack must not see: it would copy them, and take a bytearray for bytes."""

    data: bytes | bytearray


_LIFTABLE: Final = frozenset({bytes, bytearray, list, tuple, dict})


def _lift(node: Any) -> Any:
    """Return `node` with every bytearray and all long bytes below it wrapped; itself when there are none."""
    kind = type(node)
    if kind is bytearray or (kind is bytes and len(node) > _INLINE_BYTES):
        return _Lifted(node)
    if kind is list or kind is tuple:
        # Long lists of numbers are the common case: this looks at them without a Python loop.
        if _LIFTABLE.isdisjoint(map(type, node)):
            return node
        items = kind(map(_lift, node))
        return items if any(map(operator.is_not, items, node)) else node
    if kind is dict and not _LIFTABLE.isdisjoint(map(type, node.values())):
        return {key: _lift(value) for key, value in node.items()}
    return node


def _array_tree(array: np.ndarray[Any, Any], buffers: list[Buffer]) -> object:
    order: Literal["C", "F"] = "F" if array.flags.f_contiguous and not array.flags.c_contiguous else "C"
    if array.nbytes <= _INLINE_BYTES:
        place: object = array.tobytes(order)
    else:
        flat = np.ascontiguousarray(array.T if order == "F" else array).reshape(-1)
        place = _place(flat.view(np.uint8).data, buffers)
    return [_MARKERS[_Code.ARRAY], _describe(array), list(array.shape), order, place]


def _describe(item: np.ndarray[Any, Any] | np.generic) -> object:
    dtype = item.dtype
    if dtype.hasobject:
        raise _Unsupported(item, f": dtype {dtype} holds Python objects")
    if dtype.fields is None and dtype.subdtype is None:
        return dtype.str
    return np.lib.format.dtype_to_descr(dtype)


def _place(data: Buffer, buffers: list[Buffer]) -> object:
    if memoryview(data).nbytes <= _INLINE_BYTES:
        return bytes(data)
    buffers.append(data)
    return len(buffers) - 1


def _split(view: memoryview) -> tuple[memoryview, list[memoryview]]:
    """Return the tree and the buffers of a message, after checking that its length is the one it claims."""
    if len(view) < _MESSAGE_HEAD.size:
        raise WireError(f"a message of {len(view)} bytes is shorter than its header")
    magic, count, tree_bytes = _MESSAGE_HEAD.unpack_from(view)
    if magic != _MESSAGE_MAGIC:
        raise WireError(f"not a Paceline message: it begins with {bytes(magic)!r}")
    start = _MESSAGE_HEAD.size + 8 * count
    if len(view) < start:
        raise WireError(f"a message of {len(view)} bytes claims {count} buffers and ends inside its header")
    lengths = struct.unpack_from(f"<{count}Q", view, _MESSAGE_HEAD.size)
    position = start + tree_bytes
    spans = []
    for length in lengths:
        position += -position % ALIGNMENT
        spans.append((position, position + length))
        position += length
    if position != len(view):
        raise WireError(f"a message claims {position} bytes and has {len(view)}")
    return view[start : start + tree_bytes], [view[begin:end] for begin, end in spans]


def _from_extension(code: int, data: bytes) -> object:
    kind = _Code(code)
    if kind is _Code.BIG_INT:
        return int.from_bytes(data, "little", signed=True)
    if kind is _Code.COMPLEX:
        if len(data) != _COMPLEX.size:
            raise WireError(f"a complex number of {len(data)} bytes")
        return complex(*_COMPLEX.unpack(data))
    return kind


def _from_tree(code: _Code, items: list[Any], buffers: list[memoryview]) -> object:
    if code in _CONTAINER_OF:
        return _CONTAINER_OF[code](items)
    match code, items:
        case _Code.ARRAY, [descr, list(shape), ("C" | "F") as order, place]:
            return _array(_dtype(descr), shape, order, place, buffers)
        case _Code.SCALAR, [descr, bytes(data)]:
            dtype = _dtype(descr)
            return np.frombuffer(data, dtype)[0] if dtype.itemsize else dtype.type()
        case _Code.BYTEARRAY, [place]:
            return bytearray(_find(place, buffers))
        case _Code.BYTES, [place]:
            return bytes(_find(place, buffers))
        case _Code.REGISTERED, [str(name), plain]:
            codec = _by_name.get(name)
            if codec is None:
                raise WireError(
                    f"a message holds a {name!r}, which this process does not know",
                    remedy=f"import the module that registers {name!r} before receiving",
                )
            return codec.from_plain(plain)
    raise WireError(f"a {code.name.lower()} with {len(items)} parts cannot be read")


def _array(
    dtype: np.dtype[Any], shape: list[int], order: str, place: object, buffers: list[memoryview]
) -> np.ndarray[Any, Any]:
    data = _find(place, buffers)
    if not all(type(size) is int and size >= 0 for size in shape):
        raise WireError(f"an array of shape {shape}")
    if math.prod(shape) * dtype.itemsize != len(data):
        raise WireError(f"an array of shape {tuple(shape)} and dtype {dtype} cannot be {len(data)} bytes")
    if not len(data):
        return np.empty(shape, dtype)
    # A copy: the receiver may write to its array, and the message is freed.
    flat: np.ndarray[Any, Any] = np.frombuffer(data, dtype).copy()
    return flat.reshape(shape, order="F" if order == "F" else "C")


def _dtype(descr: Any) -> np.dtype[Any]:
    dtype: np.dtype[Any] = np.dtype(descr) if isinstance(descr, str) else np.lib.format.descr_to_dtype(descr)
    if dtype.hasobject:
        raise WireError(f"dtype {dtype} holds Python objects, which cannot travel")
    return dtype


def _find(place: object, buffers: list[memoryview]) -> memoryview | bytes:
    if isinstance(place, bytes):
        return place
    if type(place) is int and 0 <= place < len(buffers):
        return buffers[place]
    raise WireError(f"a message refers to buffer {place!r} and has {len(buffers)}")


def _path_to(node: object, target: object, path: str, depth: int) -> str:
    """Return where `target` sits below `node`, written as one would index it; empty when it is not found."""
    if node is target:
        return path
    if depth > 600:
        return ""
    for name, child in _children(node, path):
        if found := _path_to(child, target, name, depth + 1):
            return found
    return ""


def _children(node: Any, path: str) -> Iterator[tuple[str, object]]:
    if type(node) is dict:
        yield from ((f"a key of {path}", key) for key in node)
        for key, value in node.items():
            quoted = f'"{key}"' if type(key) is str else repr(key)
            yield f"{path}[{quoted}]", value
    elif type(node) in (list, tuple):
        yield from ((f"{path}[{index}]", value) for index, value in enumerate(node))
    elif type(node) in (set, frozenset):
        yield from ((f"an element of {path}", value) for value in node)
