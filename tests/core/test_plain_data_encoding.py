"""Messages come back as they were, arrays without copies, and bad bytes are refused with a reason."""

from __future__ import annotations

import collections
import contextlib
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, strategies as st
from hypothesis.extra import numpy as hnp

from paceline.core import plain_data_encoding
from paceline.core.errors import UsageError, WireError

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.complex_numbers(allow_nan=False)
    | st.text()
    | st.binary()
)
KEYS = st.recursive(
    SCALARS, lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3), max_leaves=4
)
DATA = st.recursive(
    SCALARS | st.binary().map(bytearray),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=4)
        | st.sets(KEYS, max_size=4)
    ),
    max_leaves=20,
)


def joined(obj):
    return b"".join(plain_data_encoding.encode(obj))


def same(left, right):
    """Equal, and of equal types all the way down (1, 1.0 and True are different things)."""
    if type(left) is not type(right):
        return False
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, dict):
        return len(left) == len(right) and all(
            same(key, other) and same(value, right[other])
            for (key, value), other in zip(left.items(), right, strict=True)
        )
    if isinstance(left, float):
        return left == right and math.copysign(1, left) == math.copysign(1, right)
    return left == right


@given(DATA)
def test_plain_data_comes_back(data):
    assert same(plain_data_encoding.decode(joined(data)), data)


@given(
    hnp.arrays(
        st.one_of(
            hnp.scalar_dtypes(), hnp.byte_string_dtypes(), hnp.unicode_string_dtypes(), hnp.array_dtypes()
        ),
        hnp.array_shapes(min_dims=0, min_side=0, max_side=6),
    )
)
def test_arrays_of_every_dtype_and_shape_come_back(array):
    result = plain_data_encoding.decode(joined(array))
    assert (result.dtype, result.shape) == (array.dtype, array.shape)
    assert result.tobytes() == array.tobytes()
    assert result.flags.writeable


@pytest.mark.parametrize(
    "value",
    [
        np.float32(1.5),
        np.int8(-3),
        np.bool_(True),
        np.datetime64("2024-02-29T12:00"),
        np.complex64(1 + 2j),
        np.str_("né"),
        np.str_(""),
        np.bytes_(b"ab"),
        np.array([(1, 2.5)], dtype=[("a", "i4"), ("b", "f8")])[0],
    ],
    ids=lambda value: value.dtype.str,
)
def test_numpy_scalars_come_back_as_what_they_are(value):
    result = plain_data_encoding.decode(joined({"x": value}))["x"]
    assert type(result) is type(value)
    assert result.dtype == value.dtype
    assert result == value


def test_layouts_are_kept_where_they_cost_nothing():
    base = np.arange(24_000.0).reshape(100, 240)
    for array in (base, base.T, base[::2, ::3], base[:, 5], np.asfortranarray(base)):
        result = plain_data_encoding.decode(joined(array))
        assert np.array_equal(result, array)
        assert result.flags.f_contiguous == (array.flags.f_contiguous or array.ndim == 1)


def test_encoding_does_not_copy_a_large_array_and_decoding_does():
    array = np.arange(100_000, dtype=np.float32)
    pieces = plain_data_encoding.encode([array, "and words"])
    view = next(piece for piece in pieces if isinstance(piece, memoryview))
    assert np.shares_memory(np.frombuffer(view, np.float32), array)
    buffer = bytearray(b"".join(pieces))
    result = plain_data_encoding.decode(buffer)[0]
    assert result.flags.writeable
    assert not np.shares_memory(result, np.frombuffer(buffer, np.uint8))


def test_buffers_are_aligned_within_the_message():
    arrays = [np.full(1001, index, np.uint8) for index in (11, 12, 13)]
    message = joined(arrays)
    for array in arrays:
        assert message.index(array.tobytes()) % plain_data_encoding.ALIGNMENT == 0


def test_large_bytes_are_not_copied():
    data = b"x" * 10_000
    for message in (data, {"a": [1, (data, "b")]}):
        views = [piece for piece in plain_data_encoding.encode(message) if isinstance(piece, memoryview)]
        assert [view.obj is data for view in views] == [True]
        assert plain_data_encoding.decode(joined(message)) == message


@pytest.mark.parametrize(
    ("data", "path"),
    [
        (object(), "message is of type object"),
        ({"a": [0, 1, object()]}, 'message["a"][2] is of type object'),
        ({"a": (0, {3: Fraction(1, 2)})}, 'message["a"][1][3] is of type fractions.Fraction'),
        ([collections.Counter()], "message[0] is of type collections.Counter"),
        ({(1, int): 2}, "a key of message[1] is of type type"),
        ([{frozenset({int})}], "an element of an element of message[0] is of type type"),
        (
            {"w": np.array([None])},
            'message["w"] is of type numpy.ndarray, which cannot be sent: dtype object',
        ),
        (np.ma.masked_array([1]), "message is of type numpy.ma.MaskedArray"),
    ],
)
def test_what_cannot_be_sent_is_named_with_its_place(data, path):
    with pytest.raises(UsageError) as caught:
        plain_data_encoding.encode(data)
    assert caught.value.message.startswith(path)
    assert caught.value.remedy


def test_data_that_contains_itself_is_refused():
    loop: list[object] = []
    loop.append(loop)
    with pytest.raises(UsageError, match="does not contain itself"):
        plain_data_encoding.encode(loop)


class Point:
    def __init__(self, x, y):
        self.x, self.y = x, y


class NamedPoint(Point):
    pass


def test_registered_types_travel_with_their_arrays_out_of_band():
    plain_data_encoding.register(Point, "test.point", lambda p: (p.x, p.y), lambda plain: Point(*plain))
    big = np.arange(1000.0)
    pieces = plain_data_encoding.encode([NamedPoint(1, big)])
    assert any(isinstance(piece, memoryview) for piece in pieces)
    (point,) = plain_data_encoding.decode(b"".join(pieces))
    assert type(point) is Point
    assert point.x == 1
    assert np.array_equal(point.y, big)


def test_a_wire_name_belongs_to_one_type():
    plain_data_encoding.register(Point, "test.point", lambda p: (p.x, p.y), lambda plain: Point(*plain))
    with pytest.raises(UsageError, match="already belongs to"):
        plain_data_encoding.register(Fraction, "test.point", str, Fraction)


def test_a_name_that_is_not_registered_here_is_refused():
    class Local:
        pass

    plain_data_encoding.register(Local, "test.local", lambda _: 1, lambda _: Local())
    message = joined(Local()).replace(b"test.local", b"test.other")
    with pytest.raises(WireError, match=r"test\.other"):
        plain_data_encoding.decode(message)


@given(DATA, st.data())
def test_a_message_cut_short_is_refused(data, draw):
    message = joined([data, np.arange(200.0)])
    cut = draw.draw(st.integers(0, len(message) - 1))
    with pytest.raises(WireError):
        plain_data_encoding.decode(message[:cut])


@given(st.data())
def test_a_damaged_message_is_data_or_a_wire_error(draw):
    message = bytearray(joined({"a": (1, 2.5, {3}), "b": np.arange(5.0), "c": [np.int8(1), 2**90, 1j]}))
    for _ in range(draw.draw(st.integers(1, 4))):
        message[draw.draw(st.integers(0, len(message) - 1))] = draw.draw(st.integers(0, 255))
    with contextlib.suppress(WireError):
        plain_data_encoding.decode(message)


@given(st.binary())
def test_garbage_is_refused(data):
    with pytest.raises(WireError):
        plain_data_encoding.decode(data)
