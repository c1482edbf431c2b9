"""Messages between processes of one machine keep their boundaries, their order and their descriptors."""

from __future__ import annotations

import os
import resource

import pytest

from paceline.core import fd_messages
from paceline.core.errors import ResourceError


def test_messages_keep_boundaries_order_and_descriptors():
    left, right = fd_messages.pair()
    read, write = os.pipe()
    with left, right:
        fd_messages.send(left, {"number": 1, "ratio": float("nan")})
        fd_messages.send(left, ["two", {"x": None}], [write])
        os.close(write)
        first = fd_messages.receive(right)
        second = fd_messages.receive(right)
        assert first is not None
        assert (first[0]["number"], first[1]) == (1, ())
        assert second is not None
        body, (passed,) = second
        assert body == ["two", {"x": None}]
        os.write(passed, b"through")
        os.close(passed)
        assert os.read(read, 100) == b"through"
        os.close(read)


@pytest.mark.parametrize("unread", [False, True])
def test_a_side_that_has_closed_is_no_error(unread):
    left, right = fd_messages.pair()
    if unread:
        fd_messages.send(left, {"never": "read"})  # closing with data unread resets the connection
    right.close()
    with left:
        assert fd_messages.receive(left) is None


def test_descriptors_that_find_no_room_are_an_error_with_a_remedy():
    left, right = fd_messages.pair()
    with left, right:
        fd_messages.send(left, {"many": True}, [0] * 8)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        lowest = os.open("/dev/null", os.O_RDONLY)
        os.close(lowest)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + 3, hard))
        try:
            with pytest.raises(ResourceError, match="too many files open"):
                fd_messages.receive(right)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_what_is_longer_than_a_message_travels_in_a_memory_file():
    body = {"text": "x" * 200_000}
    descriptor = fd_messages.to_memory_file("paceline-test", body)
    assert fd_messages.from_memory_file(descriptor) == body
    assert fd_messages.from_memory_file(descriptor) == body
    os.close(descriptor)
