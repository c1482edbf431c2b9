"""Messages of a proven connection carry tags that no other process can make."""

from __future__ import annotations

import pytest

from paceline.core.errors import WireError
from paceline.core.mac_algorithms import Mac, agreed, offered
from paceline.core.session_auth import session_keys

SECRET, TRANSCRIPT = b"s" * 32, b"both nonces"


def test_each_direction_verifies_in_order() -> None:
    acceptor = session_keys(SECRET, TRANSCRIPT, accepts=True)
    connector = session_keys(SECRET, TRANSCRIPT, accepts=False)
    for message in (b"one", b"two", b""):
        acceptor.incoming.check(connector.outgoing.tag(message), message)
        connector.incoming.check(acceptor.outgoing.tag(message[:1], message[1:]), message)


@pytest.mark.parametrize("harm", ["changed", "repeated", "dropped", "reflected", "session", "secret"])
def test_what_a_relay_can_do_does_not_verify(harm: str) -> None:
    connector = session_keys(SECRET, TRANSCRIPT, accepts=False)
    acceptor = session_keys(
        b"t" * 32 if harm == "secret" else SECRET,
        b"other nonces" if harm == "session" else TRANSCRIPT,
        accepts=True,
    )
    first, second = connector.outgoing.tag(b"one"), connector.outgoing.tag(b"two")
    victim, tag, body = acceptor.incoming, first, b"one"
    if harm == "changed":
        body = b"onE"
    elif harm == "repeated":
        victim.check(first, b"one")
    elif harm == "dropped":
        tag, body = second, b"two"
    elif harm == "reflected":
        victim = connector.incoming
    with pytest.raises(WireError, match="does not carry the tag"):
        victim.check(tag, body)


KINDS = [Mac.SHA256, Mac.GMAC]


@pytest.mark.parametrize("kind", KINDS)
def test_chunks_and_messages_are_counted_together(kind: Mac) -> None:
    acceptor = session_keys(SECRET, TRANSCRIPT, accepts=True).by(kind)
    connector = session_keys(SECRET, TRANSCRIPT, accepts=False).by(kind)
    chunk = memoryview(bytes(range(256)) * 5000)
    for _ in range(3):
        acceptor.incoming.check(connector.outgoing.tag(b"head"), b"head")
        acceptor.incoming.check_chunk(connector.outgoing.tag_chunk(chunk), chunk)
    # The same message under the next number: a chunk cannot take a head's place, nor the other way round.
    tag = connector.outgoing.tag_chunk(b"head")
    with pytest.raises(WireError, match="does not carry the tag"):
        acceptor.incoming.check(tag, b"head")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "harm", ["changed", "shorter", "repeated", "dropped", "reflected", "session", "kind"]
)
def test_what_a_relay_can_do_to_chunks_does_not_verify(harm: str, kind: Mac) -> None:
    connector = session_keys(SECRET, TRANSCRIPT, accepts=False).by(kind)
    acceptor = session_keys(SECRET, b"other nonces" if harm == "session" else TRANSCRIPT, accepts=True)
    acceptor = acceptor.by(kind if harm != "kind" else Mac(3 - kind))
    one, two = b"1" * 100_000, b"2" * 100_000
    first, second = connector.outgoing.tag_chunk(one), connector.outgoing.tag_chunk(two)
    victim, tag, body = acceptor.incoming, first, one
    if harm == "changed":
        body = one[:70_000] + b"0" + one[70_001:]
    elif harm == "shorter":
        body = one[:-1]
    elif harm == "repeated":
        victim.check_chunk(first, one)
    elif harm == "dropped":
        tag, body = second, two
    elif harm == "reflected":
        victim = connector.incoming
    with pytest.raises(WireError, match="does not carry the tag"):
        victim.check_chunk(tag, body)


def test_a_nonce_is_never_used_twice_also_where_a_tag_could_not_be_made() -> None:
    sealer = session_keys(SECRET, TRANSCRIPT, accepts=False).by(Mac.GMAC).outgoing
    again = session_keys(SECRET, TRANSCRIPT, accepts=False).by(Mac.GMAC).outgoing
    with pytest.raises(TypeError):
        sealer.tag_chunk("no bytes")  # type: ignore[arg-type]
    assert sealer.tag_chunk(b"x") != again.tag_chunk(b"x")
    assert sealer.tag_chunk(b"x") == [again.tag_chunk(b"x") for _ in range(2)][-1]


def test_gmac_is_that_of_the_standard() -> None:
    """The tag is that of AES-256-GCM with nothing to encrypt, so that another implementation can be used."""
    import hmac

    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

    key = hmac.digest(SECRET, b"paceline connector to acceptor\x00" + TRANSCRIPT, "sha256")
    cipher = Cipher(
        algorithms.AES256(hmac.digest(key, b"paceline chunks, AES-256-GMAC", "sha256")), modes.GCM(bytes(12))
    ).encryptor()
    cipher.authenticate_additional_data(b"gradients")
    cipher.finalize()
    tag = session_keys(SECRET, TRANSCRIPT, accepts=False).by(Mac.GMAC).outgoing.tag_chunk(b"gradients")
    assert tag == cipher.tag


def test_two_ends_use_the_fastest_kind_that_both_have() -> None:
    both = Mac.SHA256 | Mac.GMAC
    assert offered() == both  # the tests are to cover both
    assert agreed(both, both) is Mac.GMAC
    assert agreed(both, Mac.SHA256) is agreed(Mac.SHA256, both) is Mac.SHA256
    assert agreed(Mac(0x80000003), both) is Mac.GMAC
