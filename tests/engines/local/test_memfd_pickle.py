"""Objects in memory files."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from paceline.engines.local import memfd_pickle


def travel(value: Any, **how: Any) -> Any:
    descriptor = memfd_pickle.dump(value)
    try:
        return memfd_pickle.load(descriptor, **how)
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("mapped", [False, True])
def test_plain_data_and_arrays_come_back_equal(mapped):
    value = {"a": [1, 2.5, None], "b": b"x" * 100_000, "c": np.arange(300_000), "d": np.zeros((0, 3))}
    back = travel(value, mapped=mapped)
    assert back["a"] == value["a"]
    assert back["b"] == value["b"]
    np.testing.assert_array_equal(back["c"], value["c"])
    assert back["d"].shape == (0, 3)


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("size", [10, 5_000, 2_000_000])
def test_arrays_are_writable_after_the_journey_unless_they_were_not_before(mapped, size):
    frozen = np.zeros(size)
    frozen.flags.writeable = False
    back, back_frozen = travel((np.zeros(size), frozen), mapped=mapped)
    back[0] = 1.0
    assert back[0] == 1.0
    # NumPy itself forgets the flag of small arrays, which travel inside the pickle.
    assert size * 8 < 4096 or not back_frozen.flags.writeable


def test_a_mapped_array_is_private_to_its_reader():
    descriptor = memfd_pickle.dump(np.zeros(100_000))
    one, other = (memfd_pickle.load(descriptor, mapped=True) for _ in range(2))
    os.close(descriptor)
    one[:] = 7.0
    assert not other.any()


def test_large_buffers_are_aligned():
    back = travel([np.zeros(5_001, np.uint8), np.zeros(4_097, np.uint8), np.zeros(9_000)], mapped=True)
    assert all(array.ctypes.data % 64 == 0 for array in back)


def test_a_result_that_is_kept_holds_no_descriptor():
    before = len(os.listdir("/proc/self/fd"))
    kept = [travel(np.zeros(1_000_000)) for _ in range(3)]
    assert len(os.listdir("/proc/self/fd")) == before
    assert len(kept) == 3


def test_shared_classes_arrive_as_the_very_same_class():
    @dataclass
    class Local:
        x: int

    descriptor = memfd_pickle.dump([Local(1), Local], shared=[Local])
    value, cls = memfd_pickle.load(descriptor, shared=[Local])
    os.close(descriptor)
    assert type(value) is Local
    assert cls is Local
    assert value == Local(1)


def test_definitions_that_travel_by_value_are_noted():
    class Local:
        def method(self) -> int:
            return helper()

    def helper() -> int:
        return 1

    seen: list[object] = []
    os.close(memfd_pickle.dump(Local(), definitions=seen))
    assert Local in seen
    assert helper in seen
    assert memfd_pickle.dump not in seen


def test_what_cannot_be_pickled_leaves_no_descriptor():
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(TypeError):
        memfd_pickle.dump(open_lock())
    assert len(os.listdir("/proc/self/fd")) == before


def open_lock() -> object:
    import threading

    return threading.Lock()
