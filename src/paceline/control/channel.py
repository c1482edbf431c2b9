"""One control connection after both ends have proved themselves: messages in, messages out, never blocking.

    length:u32 | [number, kind, fields] as msgpack, plain data only | tag: 16 bytes

The tag is the session's (`core.session_auth`), over the length and the body: a frame is decoded only after
its tag was verified, and one that does not verify closes the channel, because nothing after it can be
believed. `number` counts a member's messages from 1 up, so that unacknowledged ones can be sent again; 0: not
counted. A frame longer than the limit, or one that is no message, closes the channel. What cannot be sent at
once waits in memory up to a bound, beyond which the other end counts as gone. (Not
core.plain_data_encoding: there are no arrays here, hundreds of messages a second, and the less a decoder
knows the better.)
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
import time
from collections import deque
from typing import Final, final

import msgpack

from paceline.control import message_codec
from paceline.control.messages import ControlMessage
from paceline.core.backoff import doubled
from paceline.core.errors import RendezvousError, UsageError, WireError
from paceline.core.handshake import CONTROL, Connector, HandshakeError
from paceline.core.session_auth import TAG_BYTES, SessionKeys
from paceline.core.tls import TlsEnd

MAX_FRAME: Final = 8 << 20
MAX_WAITING: Final = 64 << 20
_LENGTH: Final = struct.Struct("<I")
_READ_BYTES: Final = 1 << 16
# A peer that has proved itself may send much; the others in the loop get their turn.
_READS_PER_TURN: Final = 64


def frame(message: ControlMessage, number: int = 0) -> bytes:
    """Return a message as it travels, without its tag: that depends on the connection."""
    plain = [number, *message_codec.to_plain(message)]
    body: bytes = msgpack.packb(plain, use_bin_type=True, unicode_errors="surrogatepass")
    if len(body) > MAX_FRAME:
        raise UsageError(
            f"a {message.kind} message of {len(body)} bytes is longer than the limit of {MAX_FRAME}",
            remedy="send it in pieces",
        )
    return _LENGTH.pack(len(body)) + body


def decode_frame(data: bytes) -> ControlMessage:
    """Return what `frame` was given."""
    return _parse(data[_LENGTH.size :])[1]


@final
class Channel:
    """A connection that never blocks. `closed` is why nothing more will come, empty until then. For one
    thread at a time: tags are made in the order of sending."""

    def __init__(self, sock: socket.socket, session: SessionKeys) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._session = session
        self._descriptor = sock.fileno()
        self._inbox = bytearray()
        self._outbox: deque[bytes] = deque()
        self._waiting = 0
        self.closed = ""
        self.nonsense = False  # closed because of what the other end sent

    def fileno(self) -> int:
        return self._descriptor

    def own_host(self) -> str:
        """Return the address by which the other side reaches us."""
        try:
            return str(self._socket.getsockname()[0])
        except OSError:
            return ""

    @property
    def wants_write(self) -> bool:
        """Return whether something waits to be sent."""
        return bool(self._outbox)

    def send(self, message: ControlMessage) -> None:
        """Send without a number."""
        self.send_frame(frame(message))

    def send_frame(self, data: bytes) -> None:
        """Send what `frame` made; what the system does not take now waits for `flush`."""
        if self.closed:
            return
        tagged = data + self._session.outgoing.tag(data)
        self._outbox.append(tagged)
        self._waiting += len(tagged)
        if len(self._outbox) == 1:
            self.flush()
        if self._waiting > MAX_WAITING:
            self.closed = f"it does not read: {self._waiting} bytes wait for it"

    def flush(self) -> None:
        """Send what waits, as far as the system takes it."""
        try:
            while self._outbox and not self.closed:
                sent = self._socket.send(self._outbox[0])
                self._waiting -= sent
                if sent == len(self._outbox[0]):
                    self._outbox.popleft()
                else:
                    self._outbox[0] = self._outbox[0][sent:]
        except (BlockingIOError, InterruptedError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return
        except OSError as error:
            self.closed = f"the connection broke: {error.strerror or error}"

    def receive(self) -> list[tuple[int, ControlMessage]]:
        """Return all complete messages that are here, with their numbers."""
        found: list[tuple[int, ControlMessage]] = []
        if self.closed:
            return found
        try:
            for _ in range(_READS_PER_TURN):
                data = self._socket.recv(_READ_BYTES)
                if not data:
                    self.closed = "the other end closed the connection"
                    break
                self._inbox += data
                self._split(found)
                # With TLS, what was decrypted already would not wake a selector again.
                if len(data) < _READ_BYTES and not self._pending():
                    break
        except (BlockingIOError, InterruptedError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            pass
        except WireError as error:
            self.closed, self.nonsense = error.message, True
        except OSError as error:
            self.closed = f"the connection broke: {error.strerror or error}"
        return found

    def close(self) -> None:
        self.closed = self.closed or "closed here"
        self._socket.close()

    def _pending(self) -> bool:
        return isinstance(self._socket, ssl.SSLSocket) and self._socket.pending() > 0

    def _split(self, found: list[tuple[int, ControlMessage]]) -> None:
        box = self._inbox
        start = 0
        try:
            while len(box) - start >= _LENGTH.size:
                (length,) = _LENGTH.unpack_from(box, start)
                if length > MAX_FRAME:
                    raise WireError(f"a frame of {length} bytes is longer than the limit of {MAX_FRAME}")
                end = start + _LENGTH.size + length
                if end + TAG_BYTES > len(box):
                    break
                data = box[start:end]
                self._session.incoming.check(box[end : end + TAG_BYTES], data)
                found.append(_parse(memoryview(data)[_LENGTH.size :]))
                start = end + TAG_BYTES
        finally:
            del box[:start]


def _parse(body: bytes | bytearray | memoryview) -> tuple[int, ControlMessage]:
    try:
        plain = msgpack.unpackb(body, raw=False, unicode_errors="surrogatepass")
    except Exception as error:
        # Whatever a damaged tree makes the decoder stumble over, it is the sender that is dropped.
        raise WireError(f"a message cannot be read: {type(error).__name__}: {error}") from error
    if type(plain) is list and len(plain) == 3 and type(plain[0]) is int and plain[0] >= 0:
        return plain[0], message_codec.from_plain(plain[1:])
    raise WireError("not a message of the control connection")


def connect(address: tuple[str, int], seconds: float) -> socket.socket:
    """Connect, and refuse a connection to the socket itself: where no process listens at a port of this
    machine, repeated attempts are at last given that port themselves, and TCP connects the socket to
    itself."""
    sock = socket.create_connection(address, timeout=seconds)
    try:
        if sock.getsockname() == sock.getpeername():
            # Closed without a trace: else the port stays taken for a minute.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            raise ConnectionRefusedError("nothing listens there")
        tune(sock)
    except BaseException:
        sock.close()
        raise
    return sock


def pause_after_drops(drops: int, first: float, most: float) -> float:
    """Return the seconds to wait before the next connection to a supervisor that has accepted and dropped
    this end `drops` times in a row without a message: it speaks another version, or has no use for this end.
    The pause doubles from `first` to `most`."""
    return doubled(first, drops, most) if drops else 0.0


def authenticate(
    sock: socket.socket, secret: bytes, seconds: float, tls: TlsEnd | None = None
) -> SessionKeys:
    """Have both ends prove the secret on a connection that was made, and key what follows. Blocks, for at
    most `seconds`. `tls`: the end that wrapped the socket."""
    limit = time.monotonic() + seconds

    def read(count: int) -> bytes:
        left = limit - time.monotonic()
        if left <= 0:
            raise TimeoutError("the other end did not answer in time")
        sock.settimeout(left)
        data = sock.recv(count)
        if not data:
            raise ConnectionResetError(
                "the other end closed the connection: it does not know this secret, or a host in between "
                "shows certificates that are not the two ends' own"
            )
        return data

    connector = Connector(CONTROL, secret, bound=tls.bound(sock) if tls is not None else b"")
    try:
        return connector.run(read, sock.sendall)
    except HandshakeError as error:
        raise RendezvousError(
            f"the other end cannot be joined: {error.message}",
            remedy="check the address (another job may listen there, or something else, or it wants TLS) and "
            "have the same version of Paceline on both machines",
        ) from error


def tune(sock: socket.socket) -> None:
    """Send small messages at once, and notice a peer whose host vanished (keepalive)."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3)):
        with contextlib.suppress(OSError, AttributeError):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    with contextlib.suppress(OSError, AttributeError):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 10_000)
