"""The state comes back as what it was, or is refused with its place."""

from __future__ import annotations

import json
import math
import random
import struct
from enum import IntEnum

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from paceline.checkpoint import state_json
from paceline.core.errors import UsageError

keys = st.one_of(st.text(), st.integers(), st.booleans(), st.none(), st.tuples(st.integers(), st.text()))
leaves = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(), st.binary()
)
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner),
        st.tuples(inner, inner),
        st.dictionaries(keys, inner),
        st.dictionaries(st.text(), inner),
    ),
    max_leaves=20,
)


def same(left: object, right: object) -> bool:
    """Equal, of the same types, in the same order."""
    return repr(left) == repr(right)


@given(st.dictionaries(st.text(), trees))
def test_anything_plain_comes_back(state):
    assert same(state_json.decode(state_json.encode(state)), state)


@given(st.floats())
def test_every_float_keeps_its_bits(number):
    back = state_json.decode(state_json.encode({"x": number}))["x"]
    if math.isnan(number):
        assert math.isnan(back)
    else:
        assert struct.pack("<d", back) == struct.pack("<d", number)


def test_what_looks_like_a_marker_is_data():
    state = {"a": {"$tuple": [1]}, "$float": "nan", "b": [{"$bytes": "zz"}]}
    assert same(state_json.decode(state_json.encode(state)), state)


def test_generators_of_python_and_numpy():
    state = {"python": random.Random(3).getstate(), "groups": [{"betas": (0.9, 0.999), "lr": 1e-3}]}
    assert same(state_json.decode(state_json.encode(state)), state)


def test_numbers_of_other_kinds_become_plain():
    class Colour(IntEnum):
        RED = 3

    back = state_json.decode(state_json.encode({"a": Colour.RED, "b": np.float64(0.1)}))
    assert same(back, {"a": 3, "b": 0.1})


@pytest.mark.parametrize(
    ("state", "place"),
    [
        ({"a": [1, {"b": torch.ones(2)}]}, r"state\['a'\]\[1\]\['b'\] is of type torch.Tensor"),
        ({"a": np.int64(3)}, r"state\['a'\] is of type numpy.int64"),
        ({"a": {object(): 1}}, "key"),
        ({"f": lambda: None}, "function"),
        ([1], "a state is a dict"),
    ],
)
def test_what_cannot_be_kept_is_refused_with_its_place(state, place):
    with pytest.raises(UsageError, match=place):
        state_json.encode(state)


def test_a_state_that_contains_itself_is_refused():
    state: dict[str, object] = {}
    state["again"] = state
    with pytest.raises(UsageError, match="nested more than"):
        state_json.encode(state)


@pytest.mark.parametrize(
    "raw",
    [b"", b"[1]", b"{", b'{"a": {"$tuple": 3}}', b'{"a": {"$bytes": "*"}}', b"[" * 10**5, b'{"$dict": [1]}'],
)
def test_other_bytes_are_a_value_error(raw):
    with pytest.raises(ValueError, match="not a state"):
        state_json.decode(raw)


def test_the_file_is_standard_json():
    text = state_json.encode({"x": float("nan"), "t": (1, 2)})
    assert json.loads(text) == {"x": {"$float": "nan"}, "t": {"$tuple": [1, 2]}}
