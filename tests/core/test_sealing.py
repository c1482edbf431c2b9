"""Messages of a proven connection carry tags that nobody else can make."""

from __future__ import annotations

import pytest

from paceline.core.errors import WireError
from paceline.core.sealing import session

SECRET, TRANSCRIPT = b"s" * 32, b"both nonces"


def test_each_direction_verifies_in_order() -> None:
    acceptor = session(SECRET, TRANSCRIPT, accepts=True)
    connector = session(SECRET, TRANSCRIPT, accepts=False)
    for message in (b"one", b"two", b""):
        acceptor.incoming.check(connector.outgoing.tag(message), message)
        connector.incoming.check(acceptor.outgoing.tag(message[:1], message[1:]), message)


@pytest.mark.parametrize("harm", ["changed", "repeated", "dropped", "reflected", "session", "secret"])
def test_what_a_relay_can_do_does_not_verify(harm: str) -> None:
    connector = session(SECRET, TRANSCRIPT, accepts=False)
    acceptor = session(
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
