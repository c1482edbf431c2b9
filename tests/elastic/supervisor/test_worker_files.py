"""Files of workers on their way from agent to supervisor."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from paceline.control.channel import Channel
from paceline.control.messages import WorkerFileChunk
from paceline.core.errors import WireError
from paceline.core.sandbox_fallbacks import memory_file
from paceline.core.session_auth import session_keys
from paceline.elastic.supervisor.worker_files import CHUNK_BYTES, ReceivedFiles, SentFiles


def file_of(content: bytes) -> int:
    descriptor = memory_file("test")
    os.pwrite(descriptor, content, 0)
    return descriptor


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    pair = socket.socketpair()
    keys = [session_keys(b"k" * 32, b"said", accepts=accepts) for accepts in (False, True)]
    near, far = Channel(pair[0], keys[0]), Channel(pair[1], keys[1])
    yield near, far
    near.close()
    far.close()


def content_of(descriptor: int) -> bytes:
    try:
        return os.pread(descriptor, 1 << 30, 0)
    finally:
        os.close(descriptor)


def passed(sent: SentFiles, near: Channel, far: Channel, received: ReceivedFiles, most: int = 1000) -> int:
    """Send all, the connection taking as much as it does; return the chunks."""
    chunks = 0
    while chunks < most and (sent.holds(1) or near.wants_write):
        sent.send(near)
        for _, message in far.receive():
            assert isinstance(message, WorkerFileChunk)
            received.add(message)
            chunks += 1
        near.flush()
    return chunks


def test_a_large_result_arrives_whole_in_chunks(ends: tuple[Channel, Channel]) -> None:
    result = os.urandom(3 * CHUNK_BYTES + 17)
    sent, received = SentFiles(), ReceivedFiles()
    sent.add(1, (file_of(result),), ())
    assert passed(sent, *ends, received) == 4
    (returned,), failed = received.release(1)
    assert (content_of(returned) == result, failed) == (True, ())
    assert received.release(1) == ((), ())


def test_report_and_exception_arrive_in_their_order(ends: tuple[Channel, Channel]) -> None:
    sent, received = SentFiles(), ReceivedFiles()
    sent.add(1, (), (file_of(b"report"), file_of(b"exception")))
    passed(sent, *ends, received)
    returned, failed = received.release(1)
    assert (returned, [content_of(one) for one in failed]) == ((), [b"report", b"exception"])


def test_after_a_broken_connection_the_file_is_sent_from_its_beginning(ends: tuple[Channel, Channel]) -> None:
    result = os.urandom(2 * CHUNK_BYTES + 1)
    sent, received = SentFiles(), ReceivedFiles()
    sent.add(1, (file_of(result),), ())
    received.add(WorkerFileChunk(member=1, part=0, size=len(result), offset=0, data=b"of a lost connection"))
    sent.restart()
    passed(sent, *ends, received)
    (returned,), _ = received.release(1)
    assert content_of(returned) == result


def test_a_file_that_is_not_whole_is_none() -> None:
    received = ReceivedFiles()
    received.add(WorkerFileChunk(member=1, part=0, size=10, offset=0, data=b"12345"))
    assert received.release(1) == ((), ())


@pytest.mark.parametrize(
    ("part", "offset", "data"), [(0, 4, b"x"), (0, 5, b"123456"), (3, 0, b""), (1, 5, b"x")]
)
def test_what_does_not_continue_a_file_is_refused(part: int, offset: int, data: bytes) -> None:
    received = ReceivedFiles()
    received.add(WorkerFileChunk(member=1, part=0, size=10, offset=0, data=b"12345"))
    with pytest.raises(WireError, match="does not continue"):
        received.add(WorkerFileChunk(member=1, part=part, size=10, offset=offset, data=data))
    received.close()


def test_what_was_not_sent_is_closed() -> None:
    sent, descriptor = SentFiles(), file_of(b"x")
    sent.add(1, (descriptor,), ())
    sent.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
