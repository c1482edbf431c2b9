"""Workers that dial each other before they are in a view."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest
from tests.waiting import wait_for

from paceline.control import channel, reachability
from paceline.control.messages import DialResult
from paceline.control.reachability import Peer, ReachabilityProber
from paceline.core import authenticated_listener
from paceline.core.handshake import CHALLENGE_BYTES, DIAL, PROOF_BYTES, STORE, Acceptor
from paceline.core.listen_address import listener
from paceline.core.session_auth import TAG_BYTES

SECRET = b"s" * 32


class Worker:
    """A listener, a dialer, and what it told."""

    def __init__(self, member: int, secret: bytes = SECRET) -> None:
        self.told: queue.SimpleQueue[DialResult] = queue.SimpleQueue()
        self.listener = listener("127.0.0.1", 0)
        self.dialer = ReachabilityProber(member, member - 1, secret, self.listener, self.told.put)
        host, port = self.listener.getsockname()
        self.peer: Peer = (member, member - 1, host, port)

    def result(self) -> DialResult:
        return self.told.get(timeout=60)

    def close(self) -> None:
        self.dialer.close()
        self.listener.close()


@contextmanager
def workers(*secrets: bytes) -> Iterator[list[Worker]]:
    made = [Worker(number + 1, secret) for number, secret in enumerate(secrets)]
    try:
        yield made
    finally:
        for worker in made:
            worker.close()


def test_two_workers_reach_each_other_in_both_directions():
    with workers(SECRET, SECRET) as (one, other):
        one.dialer.dial([other.peer])
        other.dialer.dial([one.peer])
        assert one.result() == DialResult(peer=2)
        assert other.result() == DialResult(peer=1)


def test_the_address_and_the_direction_are_named():
    with workers(SECRET) as (one,):
        with listener("127.0.0.1", 0) as gone:
            port = gone.getsockname()[1]
        one.dialer.dial([(7, 6, "127.0.0.1", port)])
        expected = f"rank 0 cannot reach rank 6 at 127.0.0.1:{port}: Connection refused"
        assert one.result() == DialResult(peer=7, trouble=expected)


@pytest.mark.parametrize("host", ["", "nonsense.invalid", "a" * 1024, "a\0b", "\ud800"])
def test_an_address_that_is_none(host):
    with workers(SECRET, SECRET) as (one, other):
        one.dialer.dial([(7, 6, host, 1)])
        told = one.result()
        assert told.trouble.startswith("rank 0 cannot reach rank 6 at ")
        # What another member gave as its address must not make this one's report nonsense.
        assert channel.decode_frame(channel.frame(told)) == told
        one.dialer.dial([other.peer])
        other.dialer.dial([one.peer])
        assert one.result() == DialResult(peer=2)


def test_another_secret_is_no_proof(monkeypatch):
    monkeypatch.setattr(reachability, "ANSWER_SECONDS", 0.5)
    with workers(SECRET, b"x" * 32) as (one, other):
        other.dialer.dial([])
        one.dialer.dial([other.peer])
        # It is dropped, as a stranger would be, and comes again until its time is over.
        assert "closed there" in one.result().trouble


def test_what_listens_there_must_prove_itself():
    with workers(SECRET) as (one,), listener("127.0.0.1", 0) as other:

        def answer() -> None:
            sock, _ = other.accept()
            with sock:
                sock.sendall(Acceptor(DIAL, b"x" * 32).challenge)
                sock.recv(DIAL.answer_bytes, socket.MSG_WAITALL)
                sock.sendall(bytes(PROOF_BYTES))

        thread = threading.Thread(target=answer)
        thread.start()
        one.dialer.dial([(2, 1, *other.getsockname())])
        assert "no worker of this job" in one.result().trouble
        thread.join()


def test_a_receipt_is_the_peers_own():
    """A machine on the path has the large part and answers for it."""
    with workers(SECRET, SECRET) as (one, other), listener("127.0.0.1", 0) as relay:
        other.dialer.dial([])
        one.dialer.dial([(2, 1, *relay.getsockname())])
        near, _ = relay.accept()
        with near, closing(socket.create_connection(other.peer[2:])) as far:
            pass_handshake(near, far)
            assert len(near.recv(reachability.LARGE_BYTES, socket.MSG_WAITALL)) == reachability.LARGE_BYTES
            near.sendall(bytes(TAG_BYTES))
            assert near.recv(1) == b""
        # It is dialed again, and nothing listens there.
        relay.close()
        assert one.result().trouble


def pass_handshake(near: socket.socket, far: socket.socket) -> None:
    near.sendall(far.recv(CHALLENGE_BYTES, socket.MSG_WAITALL))
    far.sendall(near.recv(DIAL.answer_bytes, socket.MSG_WAITALL))
    near.sendall(far.recv(PROOF_BYTES, socket.MSG_WAITALL))


def test_who_connects_and_does_not_answer(monkeypatch):
    monkeypatch.setattr(reachability, "ANSWER_SECONDS", 0.3)
    with workers(SECRET) as (one,), listener("127.0.0.1", 0) as other:
        one.dialer.dial([(2, 1, *other.getsockname())])
        assert one.result().trouble.endswith("it did not answer")


@pytest.mark.parametrize("protocol", [None, STORE])
def test_a_listener_that_is_busy_with_a_view_is_dialed_again(protocol):
    """What has the listener now closes the connection at once, or speaks for the store of a view."""
    with workers(SECRET, SECRET) as (one, other):
        with other.dialer.paused():
            other.dialer.dial([])
            one.dialer.dial([other.peer])
            other.listener.setblocking(True)
            sock, _ = other.listener.accept()
            with sock:
                if protocol is not None:
                    sock.sendall(Acceptor(protocol, SECRET).challenge)
                    assert sock.recv(1) == b""
        assert one.result() == DialResult(peer=2)


def test_strangers_are_dropped_and_delay_no_worker(monkeypatch):
    monkeypatch.setattr(authenticated_listener, "HANDSHAKE_SECONDS", 0.2)
    with workers(SECRET, SECRET) as (one, other):
        other.dialer.dial([])
        for said in (b"GET / HTTP/1.1\r\n", DIAL.magic + bytes(DIAL.answer_bytes - 8), b"PL"):
            with closing(socket.create_connection(other.listener.getsockname(), timeout=20)) as stranger:
                stranger.sendall(said)
                assert len(stranger.recv(CHALLENGE_BYTES, socket.MSG_WAITALL)) == CHALLENGE_BYTES
                assert stranger.recv(1) == b""
        silent = [
            socket.create_connection(other.listener.getsockname())
            for _ in range(authenticated_listener.MAX_UNAUTHENTICATED)
        ]
        one.dialer.dial([other.peer])
        assert one.result() == DialResult(peer=2)
        for sock in silent:
            sock.close()


def test_the_thread_ends_when_nothing_was_asked_for_a_while(monkeypatch):
    monkeypatch.setattr(reachability, "LINGER_SECONDS", 0.05)
    with workers(SECRET, SECRET) as (one, other):
        for _ in range(2):
            other.dialer.dial([])
            one.dialer.dial([other.peer])
            assert one.result().peer == 2
            wait_for(
                lambda: not [t for t in threading.enumerate() if t.name == "paceline-dial"],
                "no thread is left",
            )


def test_a_dial_while_the_last_thread_ends_is_answered(monkeypatch):
    """The thread that ends still closes what it owns: the next one begins after it."""
    decide = ReachabilityProber._is_needed
    dialed = threading.Event()

    def dial_when_it_ends(prober: ReachabilityProber) -> bool:
        needed = decide(prober)
        if not needed and prober is one.dialer and not dialed.is_set():
            dialed.set()
            held = threading.current_thread()
            one.dialer.dial([other.peer])
            assert one.dialer._thread is not held
        return needed

    with workers(SECRET, SECRET) as (one, other):
        # Asked once, before the time is shortened: only the thread of the dialing worker ends in this test,
        # and the other worker answers however late a busy machine lets either of them run.
        other.dialer.dial([])
        monkeypatch.setattr(reachability, "LINGER_SECONDS", 0.05)
        monkeypatch.setattr(ReachabilityProber, "_is_needed", dial_when_it_ends)
        one.dialer.dial([other.peer])
        assert one.result() == DialResult(peer=2)
        wait_for(dialed.is_set, "a thread ends and another begins")
        assert one.result() == DialResult(peer=2)
        one.dialer.dial([other.peer])
        assert one.result() == DialResult(peer=2)


def test_a_way_that_loses_large_packets_is_named(monkeypatch):
    """What follows the small messages never arrives: here a relay withholds it."""
    monkeypatch.setattr(reachability, "LARGE_SECONDS", 0.3)
    with workers(SECRET, SECRET) as (one, other), listener("127.0.0.1", 0) as relay:
        other.dialer.dial([])
        host, port = relay.getsockname()
        one.dialer.dial([(2, 1, host, port)])
        near, _ = relay.accept()
        with near, closing(socket.create_connection(other.peer[2:])) as far:
            pass_handshake(near, far)
            found = one.result()
            assert found.lossy
            assert "small packets arrive there and large ones do not" in found.trouble
