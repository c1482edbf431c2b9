"""The handshake as bytes: both ends prove the secret, and whatever is changed on the way is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.core.handshake import (
    CONTROL,
    MESH,
    STORE,
    Acceptor,
    Connector,
    HandshakeError,
    KeyedDifferentlyError,
    OtherProtocolError,
    VersionError,
    WireProtocol,
)

SECRET = b"s" * 32
PROTOCOL = WireProtocol("test", b"PLtest", 1, context_bytes=4)
BOUND = b"b" * 64


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
    mine, theirs = acceptor.session_keys(), connector.session_keys()
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


@pytest.mark.parametrize("said", [b"GET / HTTP/1.1", b"\0", b"PLtext\0\x01", bytes(200)])
def test_nonsense_is_refused_as_soon_as_it_is_seen(said: bytes) -> None:
    for end in (Acceptor(PROTOCOL, SECRET), Connector(PROTOCOL, SECRET, b"abcd")):
        with pytest.raises(OtherProtocolError, match="does not speak Paceline's test protocol"):
            end.feed(said)


def test_more_than_an_answer_is_refused() -> None:
    acceptor = Acceptor(PROTOCOL, SECRET)
    with pytest.raises(HandshakeError, match="more than an answer"):
        acceptor.feed(answered(acceptor, Connector(PROTOCOL, SECRET, b"abcd")) + b"\0")


@pytest.mark.parametrize("protocol", [CONTROL, STORE, MESH], ids=lambda protocol: protocol.name)
def test_another_version_is_refused_with_both_numbers_by_both_ends(protocol: WireProtocol) -> None:
    other = replace(protocol, number=protocol.number + 1)
    context = bytes(protocol.context_bytes)
    both = f"{protocol.name} protocol {other.number}, this end speaks {protocol.number}"
    connector = Connector(protocol, SECRET, context)
    said: list[bytes] = []
    with pytest.raises(VersionError, match=both):
        connector.run(lambda count: Acceptor(other, SECRET).challenge[:count], said.append)
    # The connector says its number before it goes, so that the acceptor can name both, too.
    with pytest.raises(VersionError, match=f"protocol {protocol.number}, this end speaks {other.number}"):
        Acceptor(other, SECRET).feed(b"".join(said))


def test_protocols_are_told_apart() -> None:
    every = (CONTROL, STORE, MESH)
    assert len({one.mark for one in every}) == len(every)
    for one in every:
        for other in every:
            if one is not other:
                with pytest.raises(OtherProtocolError):
                    Acceptor(one, SECRET).feed(other.magic)


def test_what_both_ends_see_is_part_of_both_proofs_and_of_the_keys() -> None:
    acceptor = Acceptor(PROTOCOL, SECRET, BOUND)
    connector = Connector(PROTOCOL, SECRET, b"abcd", BOUND)
    proven(acceptor, connector)
    for theirs in (b"", b"c" * 64):
        acceptor = Acceptor(PROTOCOL, SECRET, BOUND)
        answer = answered(acceptor, Connector(PROTOCOL, SECRET, b"abcd", theirs))
        with pytest.raises(HandshakeError, match="certificate is not the one"):
            acceptor.feed(answer)
        assert not acceptor.proof


def test_all_of_it_through_calls_that_wait() -> None:
    acceptor, connector = Acceptor(PROTOCOL, SECRET), Connector(PROTOCOL, SECRET, b"abcd")
    box = bytearray(acceptor.challenge)

    def read(count: int) -> bytes:
        taken = bytes(box[: min(count, 7)])
        del box[:7]
        return taken

    def send(data: bytes) -> None:
        assert acceptor.feed(data)
        box.extend(acceptor.proof)

    session = connector.run(read, send)
    acceptor.session_keys().incoming.check(session.outgoing.tag(b"up"), b"up")


def test_one_end_without_a_secret_is_told_so() -> None:
    with pytest.raises(KeyedDifferentlyError, match="it has no secret"):
        Connector(PROTOCOL, SECRET, b"abcd").feed(Acceptor(PROTOCOL, b"").challenge)
    with pytest.raises(KeyedDifferentlyError, match="asks for a secret"):
        Connector(PROTOCOL, b"", b"abcd").feed(Acceptor(PROTOCOL, SECRET).challenge)
    with pytest.raises(KeyedDifferentlyError, match="it has no secret"):
        Acceptor(PROTOCOL, SECRET).feed(Connector(PROTOCOL, b"", b"abcd").head)
    with pytest.raises(KeyedDifferentlyError, match="it has a secret"):
        Acceptor(PROTOCOL, b"").feed(Connector(PROTOCOL, SECRET, b"abcd").head)


def test_sessions_of_two_connections_differ() -> None:
    tags = set()
    for _ in range(3):
        acceptor, connector = Acceptor(PROTOCOL, SECRET), Connector(PROTOCOL, SECRET, b"abcd")
        proven(acceptor, connector)
        tags |= {
            acceptor.session_keys().outgoing.tag(b"same"),
            connector.session_keys().outgoing.tag(b"same"),
        }
    assert len(tags) == 6
