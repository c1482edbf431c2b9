"""The handshake as bytes: both ends prove the secret, and whatever is changed on the way is refused."""

from __future__ import annotations

import pytest

from paceline.core.handshake import (
    Acceptor,
    Connector,
    HandshakeError,
    KeyedDifferentlyError,
    Protocol,
    no_answer,
)

SECRET = b"s" * 32
PROTOCOL = Protocol(b"PLtest1\0", 4)


def answered(acceptor: Acceptor, connector: Connector) -> bytes:
    """What the connector says to the acceptor's challenge."""
    return connector.feed(acceptor.challenge)


def proven(acceptor: Acceptor, connector: Connector) -> None:
    assert acceptor.feed(answered(acceptor, connector))
    assert connector.feed(acceptor.proof) == b""
    assert connector.done


def test_both_ends_prove_themselves_and_have_the_same_keys() -> None:
    acceptor, connector = Acceptor(PROTOCOL, SECRET), Connector(PROTOCOL, SECRET, b"abcd")
    proven(acceptor, connector)
    assert acceptor.context == b"abcd"
    mine, theirs = acceptor.session(), connector.session()
    theirs.incoming.check(mine.outgoing.tag(b"down"), b"down")
    mine.incoming.check(theirs.outgoing.tag(b"up"), b"up")


def test_bytes_may_come_one_by_one() -> None:
    acceptor, connector = Acceptor(PROTOCOL, SECRET), Connector(PROTOCOL, SECRET, b"abcd")
    answer = b"".join(connector.feed(bytes([byte])) for byte in acceptor.challenge)
    assert len(answer) == PROTOCOL.answer_bytes == acceptor.wanted
    assert [acceptor.feed(bytes([byte])) for byte in answer] == [False] * (len(answer) - 1) + [True]
    for byte in acceptor.proof:
        assert not connector.done
        connector.feed(bytes([byte]))
    assert connector.done


def test_any_byte_that_is_changed_is_refused() -> None:
    for place in range(PROTOCOL.answer_bytes):
        acceptor, connector = Acceptor(PROTOCOL, SECRET), Connector(PROTOCOL, SECRET, b"abcd")
        answer = bytearray(answered(acceptor, connector))
        answer[place] ^= 1
        with pytest.raises(HandshakeError):
            acceptor.feed(bytes(answer))
        assert not acceptor.proof
    acceptor, connector = Acceptor(PROTOCOL, SECRET), Connector(PROTOCOL, SECRET, b"abcd")
    assert acceptor.feed(answered(acceptor, connector))
    with pytest.raises(HandshakeError, match="does not know the secret"):
        connector.feed(bytes([acceptor.proof[0] ^ 1]) + acceptor.proof[1:])


def test_a_challenge_that_is_changed_on_the_way_is_refused() -> None:
    acceptor, connector = Acceptor(PROTOCOL, SECRET), Connector(PROTOCOL, SECRET, b"abcd")
    challenge = bytearray(acceptor.challenge)
    challenge[-1] ^= 1
    with pytest.raises(HandshakeError, match="secret is another"):
        acceptor.feed(connector.feed(bytes(challenge)))


def test_another_secret_and_an_answer_of_before_are_refused() -> None:
    acceptor = Acceptor(PROTOCOL, SECRET)
    with pytest.raises(HandshakeError, match="secret is another"):
        acceptor.feed(answered(acceptor, Connector(PROTOCOL, b"x" * 32, b"abcd")))
    heard = answered(Acceptor(PROTOCOL, SECRET), Connector(PROTOCOL, SECRET, b"abcd"))
    with pytest.raises(HandshakeError, match="secret is another"):
        Acceptor(PROTOCOL, SECRET).feed(heard)


def test_an_acceptors_own_proof_does_not_prove_a_connector() -> None:
    acceptor, other = Acceptor(PROTOCOL, SECRET), Acceptor(PROTOCOL, SECRET)
    proven(other, Connector(PROTOCOL, SECRET, b"abcd"))
    said = answered(acceptor, Connector(PROTOCOL, SECRET, b"abcd"))
    with pytest.raises(HandshakeError):
        acceptor.feed(said[:-32] + other.proof)


@pytest.mark.parametrize(
    "said", [b"GET / HTTP/1.1", b"\0", b"PLtest2\0", bytes(200), b"PLtest1\0\x01" + bytes(100)]
)
def test_nonsense_is_refused_as_soon_as_it_is_seen(said: bytes) -> None:
    with pytest.raises(HandshakeError, match="does not speak"):
        Acceptor(PROTOCOL, SECRET).feed(said)


def test_one_end_without_a_secret_is_told_so() -> None:
    with pytest.raises(KeyedDifferentlyError, match="it has no secret"):
        Connector(PROTOCOL, SECRET, b"abcd").feed(Acceptor(PROTOCOL, b"").challenge)
    with pytest.raises(KeyedDifferentlyError, match="asks for a secret"):
        Connector(PROTOCOL, b"", b"abcd").feed(Acceptor(PROTOCOL, SECRET).challenge)
    with pytest.raises(KeyedDifferentlyError, match="it has no secret"):
        Acceptor(PROTOCOL, SECRET).feed(no_answer(PROTOCOL, b""))
    with pytest.raises(KeyedDifferentlyError, match="it has a secret"):
        Acceptor(PROTOCOL, b"").feed(no_answer(PROTOCOL, SECRET))


def test_sessions_of_two_connections_differ() -> None:
    tags = set()
    for _ in range(3):
        acceptor, connector = Acceptor(PROTOCOL, SECRET), Connector(PROTOCOL, SECRET, b"abcd")
        proven(acceptor, connector)
        tags |= {acceptor.session().outgoing.tag(b"same"), connector.session().outgoing.tag(b"same")}
    assert len(tags) == 6
