"""Both sides prove themselves; what is said is exactly a message or ends the conversation."""

from __future__ import annotations

import random
import secrets
import socket
import struct
import threading

import msgpack
import pytest

from paceline.control import channel, message_codec, supervisor_address
from paceline.control.channel import MAX_FRAME, Channel
from paceline.control.messages import ControlMessage, Heartbeat, JournalLines, MemberHello, MemberReport, View
from paceline.core import session_auth
from paceline.core.errors import RendezvousError, UsageError, WireError
from paceline.core.handshake import CONTROL, Acceptor, HandshakeError
from paceline.core.session_auth import SessionKeys

SECRET = supervisor_address.new_secret()


def sessions() -> tuple[SessionKeys, SessionKeys]:
    """Of a connector and of the acceptor that it met."""
    said = secrets.token_bytes(64)
    return session_auth.session_keys(SECRET, said, accepts=False), session_auth.session_keys(
        SECRET, said, accepts=True
    )


def channels(pair: tuple[socket.socket, socket.socket]) -> tuple[Channel, Channel]:
    near, far = sessions()
    return Channel(pair[0], near), Channel(pair[1], far)


@pytest.fixture
def pair():
    ends = socket.socketpair()
    yield ends
    for end in ends:
        end.close()


def accept(sock: socket.socket, secret: bytes) -> Acceptor:
    acceptor = Acceptor(CONTROL, secret)
    sock.sendall(acceptor.challenge)
    while not acceptor.feed(sock.recv(acceptor.wanted)):
        pass
    sock.sendall(acceptor.proof)
    return acceptor


def test_two_sides_with_one_secret_believe_each_other(pair):
    ours, theirs = pair
    found: list[Acceptor] = []
    thread = threading.Thread(target=lambda: found.append(accept(theirs, SECRET)))
    thread.start()
    session_keys = channel.authenticate(ours, SECRET, 5.0)
    thread.join()
    tag = session_keys.outgoing.tag(b"said")
    found[0].session_keys().incoming.check(tag, b"said")


def test_a_connector_with_another_secret_gets_no_proof(pair):
    ours, theirs = pair
    found: list[str] = []

    def serve() -> None:
        try:
            accept(theirs, SECRET)
        except HandshakeError as error:
            found.append(error.message)
        theirs.close()

    thread = threading.Thread(target=serve)
    thread.start()
    with pytest.raises(ConnectionError):
        channel.authenticate(ours, b"x" * 32, 5.0)
    thread.join()
    assert found == ["its secret is another"]


def test_an_acceptor_that_cannot_prove_itself_is_not_believed(pair):
    ours, theirs = pair

    def pretend() -> None:
        theirs.sendall(Acceptor(CONTROL, SECRET).challenge)
        theirs.recv(CONTROL.answer_bytes)
        theirs.sendall(bytes(32))

    thread = threading.Thread(target=pretend)
    thread.start()
    with pytest.raises(RendezvousError, match="does not know the secret"):
        channel.authenticate(ours, SECRET, 5.0)
    thread.join()


def test_an_answer_cannot_be_replayed_to_another_acceptor():
    first, second = Acceptor(CONTROL, SECRET), Acceptor(CONTROL, SECRET)
    ours, theirs = socket.socketpair()
    with ours, theirs:

        def connect() -> None:
            with pytest.raises(OSError, match="closed"):
                channel.authenticate(ours, SECRET, 5.0)

        thread = threading.Thread(target=connect)
        thread.start()
        theirs.sendall(first.challenge)
        answer = theirs.recv(CONTROL.answer_bytes)
        theirs.close()
        thread.join()
    assert first.feed(answer)
    with pytest.raises(HandshakeError, match="secret is another"):
        second.feed(answer)


def test_a_silent_acceptor_is_not_waited_for(pair):
    with pytest.raises(TimeoutError):
        channel.authenticate(pair[0], SECRET, 0.05)


def test_an_acceptor_reads_exactly_an_answer():
    acceptor = Acceptor(CONTROL, SECRET)
    assert acceptor.wanted == CONTROL.answer_bytes
    acceptor.feed(acceptor.challenge[:3])
    assert acceptor.wanted == CONTROL.answer_bytes - 3


EXAMPLES = [
    MemberHello(member=1, slot=0, pid=5, host="h", hostname="n", endpoint=("", 0), progress=(3, 0, 1)),
    Heartbeat(phase="forward", seconds=1.0, waits_for=(2, 3)),
    MemberReport(generation=4, progress=None, held_shards=(1, 2), has_private_state=True),
    JournalLines(generation=1, lines=("a", "b")),
    View(
        generation=2,
        members=(1, 2),
        slots=(0, 1),
        pids=(10, 11),
        hosts=("a", "a"),
        hostnames=("n", "n"),
        endpoints=(("", 0), ("x", 1)),
        shards=((0, 1), (2,)),
        segment=(1, 2, 3, 4),
    ),
]


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: message.kind)
def test_messages_arrive_as_they_were(pair, message):
    near, far = channels(pair)
    near.send_frame(channel.frame(message, 9))
    assert far.receive() == [(9, message)]


@pytest.mark.parametrize(
    "plain",
    [
        [0, "Heartbeat", {"phase": "x"}],
        [0, "Heartbeat", {"phase": "x", "seconds": "1"}],
        [0, "Heartbeat", {"phase": "x", "seconds": 1.0, "more": 1}],
        [0, "Heartbeat", {"phase": "x", "seconds": 1.0, "progress": [1, 2]}],
        [0, "MemberReport", {"generation": True, "progress": None}],
        [0, "Nonsense", {}],
        [-1, "Heartbeat", {"phase": "x", "seconds": 1.0}],
        [0, "Heartbeat"],
        {"Heartbeat": 1},
        7,
    ],
)
def test_what_is_not_exactly_a_message_closes_the_channel(pair, plain):
    body = msgpack.packb(plain)
    near, far = channels(pair)
    near.send_frame(struct.pack("<I", len(body)) + body)
    assert far.receive() == []
    assert far.closed
    assert "tag" not in far.closed


def test_a_frame_longer_than_the_limit_is_not_waited_for(pair):
    pair[0].sendall(struct.pack("<I", MAX_FRAME + 1))
    _, far = channels(pair)
    assert far.receive() == []
    assert "limit" in far.closed
    with pytest.raises(UsageError, match="limit"):
        channel.frame(JournalLines(generation=1, lines=("x" * MAX_FRAME,)))


def tagged(data: bytes, session_keys: SessionKeys) -> bytes:
    return data + session_keys.outgoing.tag(data)


def test_messages_in_pieces_and_many_at_once(pair):
    near, _ = pair
    ours, theirs = sessions()
    reader = Channel(pair[1], theirs)
    frames = b"".join(tagged(channel.frame(message), ours) for message in EXAMPLES * 3)
    got = []
    for start in range(0, len(frames), 7):
        near.sendall(frames[start : start + 7])
        got += [message for _, message in reader.receive()]
    assert got == EXAMPLES * 3


def test_mutated_frames_never_do_more_than_close_the_channel():
    rng = random.Random(4)
    frames = [channel.frame(message, 1) for message in EXAMPLES]
    closed = 0
    for _ in range(2000):
        data = bytearray(rng.choice(frames))
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(4, len(data))] = rng.randrange(256)
        try:
            channel._parse(bytes(data[4:]))
        except WireError:
            closed += 1
    assert closed > 500


def test_what_cannot_be_sent_waits_up_to_a_bound(pair, monkeypatch):
    monkeypatch.setattr(channel, "MAX_WAITING", 1 << 20)
    near, _ = channels(pair)
    while not near.closed:
        near.send(JournalLines(generation=1, lines=("x" * 100_000,)))
    assert "does not read" in near.closed


def test_a_message_is_not_any_object():
    with pytest.raises(WireError):
        message_codec.from_plain(["Message", {}])


def test_whereabouts_are_written_and_read(tmp_path):
    with pytest.raises(UsageError, match="no supervisor"):
        supervisor_address.read(tmp_path)
    assert supervisor_address.lookup(tmp_path) is None
    where = supervisor_address.SupervisorAddress(host="127.0.0.1", port=4, pid=5, attempt=2)
    supervisor_address.write(tmp_path, where)
    supervisor_address.write_secret(tmp_path, SECRET)
    assert supervisor_address.read(tmp_path) == where
    assert supervisor_address.lookup(tmp_path) == ("127.0.0.1", 4)
    assert supervisor_address.read_secret(tmp_path) == SECRET
    assert (tmp_path / supervisor_address.SECRET_FILE).stat().st_mode & 0o777 == 0o600
    supervisor_address.remove(tmp_path)
    assert not list(tmp_path.iterdir())


def frames_on_the_wire(session_keys: SessionKeys, messages: list[ControlMessage]) -> list[bytes]:
    return [tagged(channel.frame(message), session_keys) for message in messages]


def changed(frame: bytes, place: int) -> bytes:
    return frame[:place] + bytes([frame[place] ^ 1]) + frame[place + 1 :]


@pytest.mark.parametrize(
    ("what", "tamper", "heard"),
    [
        ("body", lambda a, b, c: [changed(a, 9), b, c], 0),
        ("length", lambda a, b, c: [changed(a, 0), b, c], 0),
        ("tag", lambda a, b, c: [a, changed(b, -1 + len(b)), c], 1),
        ("dropped", lambda a, b, c: [a, c], 1),
        ("repeated", lambda a, b, c: [a, a, b, c], 1),
        ("reordered", lambda a, b, c: [b, a, c], 0),
        ("injected without a tag", lambda a, b, c: [a, channel.frame(EXAMPLES[1]) + bytes(16), b, c], 1),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_a_relay_does_to_frames_closes_the_channel(pair, what, tamper, heard):
    ours, theirs = sessions()
    far = Channel(pair[1], theirs)
    pair[0].sendall(b"".join(tamper(*frames_on_the_wire(ours, EXAMPLES[1:4]))))
    assert [message for _, message in far.receive()] == EXAMPLES[1 : 1 + heard]
    assert "tag of this session" in far.closed


def test_reflected_frames_and_those_of_another_session_close_the_channel(pair):
    ours, theirs = sessions()
    near = Channel(pair[0], ours)
    near.send(EXAMPLES[1])
    pair[1].sendall(pair[1].recv(4096))
    assert near.receive() == []
    assert "tag of this session" in near.closed
    far = Channel(pair[1], theirs)
    pair[0].setblocking(True)
    pair[0].sendall(b"".join(frames_on_the_wire(sessions()[0], EXAMPLES[1:2])))
    assert far.receive() == []
    assert "tag of this session" in far.closed


@pytest.mark.parametrize("number", [1, 2])
def test_an_end_of_another_protocol_is_refused_with_both_numbers(pair, number):
    """An acceptor of protocol 2 says 40 bytes and waits: it is refused by the first eight of them."""
    both = f"control protocol {number}, this end speaks {CONTROL.number}"
    pair[1].sendall(b"PLctl\x00\x00" + bytes([number]) + bytes(32))
    with pytest.raises(RendezvousError, match=both):
        channel.authenticate(pair[0], SECRET, 5.0)
    # And is told by whom it is refused: it can say both numbers too.
    assert pair[1].recv(100)[:8] == CONTROL.magic
    with pytest.raises(HandshakeError, match=both):
        Acceptor(CONTROL, SECRET).feed(b"PLctl\x00\x00" + bytes([number]))
    # What an end of protocol 2 compares: its name, and a number that is not its own.
    assert Acceptor(CONTROL, SECRET).challenge[:8] == b"PLctl\x00\x00\x03"


@pytest.mark.parametrize("text", ["", "zz", "ab"])
def test_a_token_file_that_is_none_is_named(tmp_path, text):
    (tmp_path / "token").write_text(text)
    with pytest.raises(UsageError, match="token"):
        supervisor_address.read_token(tmp_path / "token")
