"""Strangers at the control port of a job that trains: none is let in, nothing crashes, training goes on."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import socket
import ssl
import struct
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgpack
import pytest
from tests.elastic.supervised_jobs import Run, drop, running

from paceline.control import channel, supervisor_address
from paceline.control.channel import MAX_FRAME
from paceline.control.messages import (
    AgentHello,
    ControlMessage,
    Heartbeat,
    MemberFinished,
    MemberHello,
    MemberReport,
    ToolRequest,
    WorkerException,
)
from paceline.core.authenticated_listener import HANDSHAKE_SECONDS, MAX_UNAUTHENTICATED
from paceline.core.clock import MonotonicClock
from paceline.core.errors import RendezvousError, ResourceError
from paceline.core.events import Note, WorkerFailed
from paceline.core.handshake import CHALLENGE_BYTES, CONTROL, Connector
from paceline.core.tls import Tls
from paceline.elastic.supervisor import control_port, tool_client

SAID: list[ControlMessage] = [
    MemberHello(
        member=1, slot=0, pid=1, host="h", hostname="n", endpoint=("", 0), generation=1, progress=(9, 0, 0)
    ),
    Heartbeat(phase="forward", seconds=1.0),
    MemberReport(generation=1, progress=(10**9, 0, 0)),
    WorkerException(summary="x", traceback="x", phase="x", fault="user"),
    MemberFinished(generation=1, progress=(10**9, 0, 0), hash="x"),
    AgentHello(workers=100, host="h", hostname="n", pid=1),
    ToolRequest(what="stop", text="fuzz"),
]


@pytest.fixture
def job(tmp_path) -> Iterator[Run]:
    """A job whose members must not notice anything of what a test does."""
    with running(tmp_path, workers=2, steps=10**6) as run:
        run.until_step(5)
        pids, count = run.pids(), run.steps[-1]
        yield run
        run.until_step(max(count, run.steps[-1]) + 20)
        assert run.pids() == pids
        assert not run.of(WorkerFailed)
        run.supervised.stop("the test is over")
        assert drop(run.finish()).stopped == "the test is over"
    assert run.steps == list(range(1, len(run.steps) + 1))


def knock(run: Run) -> socket.socket:
    return socket.create_connection(run.supervised.address, timeout=10.0)


@contextlib.contextmanager
def proven(run: Run) -> Iterator[tuple[socket.socket, Callable[[bytes], None]]]:
    """A connection of a peer that has the secret, and how it sends bytes with the session's tag."""
    with knock(run) as sock:
        session = channel.authenticate(sock, supervisor_address.read_secret(run.folder), 10.0)
        sock.settimeout(10.0)
        yield sock, lambda data: sock.sendall(data + session.outgoing.tag(data))


def is_closed(sock: socket.socket, seconds: float = 10.0) -> bool:
    """Whether the other side hangs up in time, whatever it said before."""
    sock.settimeout(seconds)
    with contextlib.suppress(ConnectionError):
        while sock.recv(4096):
            pass
    return True


def test_random_bytes_are_dropped(job):
    rng = random.Random(1)
    for _ in range(60):
        with knock(job) as sock, contextlib.suppress(ConnectionError):
            sock.sendall(rng.randbytes(rng.randint(1, 4096)))
            assert is_closed(sock)


def test_mutated_and_replayed_answers_are_refused(job):
    rng = random.Random(2)
    secret = supervisor_address.read_secret(job.folder)
    for _ in range(60):
        with knock(job) as sock:
            challenge = sock.recv(CHALLENGE_BYTES, socket.MSG_WAITALL)
            answer = bytearray(Connector(CONTROL, secret).feed(challenge))
            answer[rng.randrange(len(answer))] ^= 1 << rng.randrange(8)
            sock.sendall(answer)
            assert is_closed(sock)


def test_wrong_secrets_are_refused(job):
    for _ in range(4):  # each is tried several times
        with pytest.raises(RendezvousError, match="refused"):
            tool_client.open_channel(job.supervised.address, os.urandom(32), None, 10.0)


def test_even_with_the_secret_nonsense_closes_the_connection(job):
    rng = random.Random(3)
    frames = [struct.pack("<I", 2**32 - 1), struct.pack("<I", MAX_FRAME + 1) + b"x" * 100]
    for _ in range(40):
        body = rng.choice([rng.randbytes(rng.randint(1, 200)), msgpack.packb([0, "Heartbeat", {"a": 1}])])
        frames.append(struct.pack("<I", len(body)) + body)
    for data in frames:
        with proven(job) as (sock, send):
            send(data)
            assert is_closed(sock)


def test_even_with_the_secret_only_workers_that_were_started_are_taken_in(job):
    rng = random.Random(5)
    for member in [0, 3, 99, 1]:
        hello = MemberHello(
            member=member, slot=rng.randrange(2), pid=1, host="h", hostname="n", endpoint=("", 0)
        )
        with proven(job) as (sock, send):
            send(channel.frame(hello))
            assert b"Dismissed" in sock.recv(4096)


def test_mutated_messages_with_the_secret(job):
    rng = random.Random(6)
    for _ in range(80):
        with proven(job) as (_, send), contextlib.suppress(ConnectionError):
            data = bytearray(channel.frame(rng.choice(SAID[1:5]), rng.randrange(3)))
            for _ in range(rng.randint(1, 3)):
                data[rng.randrange(4, len(data))] = rng.randrange(256)
            send(bytes(data))


def test_slow_and_silent_strangers_are_dropped(job):
    with knock(job) as silent, knock(job) as slow:
        begun = time.monotonic()
        slow.sendall(b"P")
        assert is_closed(silent)
        assert is_closed(slow)
        assert time.monotonic() - begun < HANDSHAKE_SECONDS + 2.0


def test_a_thousand_connections_hurt_no_member(job):
    with contextlib.ExitStack() as stack:
        socks = [stack.enter_context(knock(job)) for _ in range(1000)]
        # In the middle of it, a peer that has the secret is heard.
        assert tool_client.ask(job.folder, ToolRequest(what="status")).facts["phase"] == "running"
        assert all(is_closed(sock) for sock in socks)
    facts = tool_client.ask(job.folder, ToolRequest(what="status")).facts
    assert facts["refused"] >= 1000


def test_a_flood_from_one_host_does_not_push_out_a_worker_of_another(job):
    """A worker of a machine that is busy answers late; strangers of another machine come in the meantime."""
    for _ in range(20):
        begun = time.monotonic()
        with contextlib.ExitStack() as stack:
            worker = stack.enter_context(
                socket.create_connection(job.supervised.address, 10.0, ("127.0.0.2", 0))
            )
            assert worker.recv(1, socket.MSG_PEEK)
            flood = [stack.enter_context(knock(job)) for _ in range(2 * MAX_UNAUTHENTICATED)]
            assert all(is_closed(sock) for sock in flood[:MAX_UNAUTHENTICATED])
            try:
                channel.authenticate(worker, supervisor_address.read_secret(job.folder), 10.0)
                return
            except OSError:
                # It has 3 seconds, too: this machine may have been too busy for the test.
                assert time.monotonic() - begun > HANDSHAKE_SECONDS
    raise AssertionError("never within 3 seconds")


def test_when_descriptors_run_out_the_limit_is_named_and_training_goes_on(job):
    pid = job.supervised.pid
    used = len(os.listdir(f"/proc/{pid}/fd"))
    _, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (used + 10, hard))
    with contextlib.ExitStack() as stack:
        socks = [stack.enter_context(knock(job)) for _ in range(40)]
        job.until(lambda: job.of(Note))
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (hard, hard))
        assert all(is_closed(sock) for sock in socks)
    assert "ulimit -n" in job.of(Note)[0].text
    assert tool_client.ask(job.folder, ToolRequest(what="status")).done
    before = _cpu(pid)
    job.supervised.wait(0.5)
    assert _cpu(pid) - before < 0.3


def test_no_port_is_a_clear_error():
    with control_port.listen("127.0.0.1", 0, MonotonicClock()) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ResourceError, match=f"cannot listen at .*:{port}"):
            control_port.listen("127.0.0.1", port, MonotonicClock())


def test_with_tls_members_and_tools_need_certificates(tmp_path):
    tls = certificates(tmp_path)
    folder = tmp_path / "run"
    with running(folder, workers=2, steps=10**6, tls=tls) as run:
        run.until_step(10)
        assert tool_client.ask(folder, ToolRequest(what="status")).done
        secret = supervisor_address.read_secret(folder)
        with pytest.raises(RendezvousError):
            tool_client.open_channel(run.supervised.address, secret, None, 5.0)
        plain = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        plain.check_hostname, plain.verify_mode = False, ssl.CERT_NONE
        with knock(run) as sock, contextlib.suppress(OSError), plain.wrap_socket(sock) as wrapped:
            # TLS 1.3 tells the client only with its first read that a certificate was missing.
            assert wrapped.recv(CHALLENGE_BYTES) == b""
        run.supervised.stop("seen")
        assert drop(run.finish()).ok


def certificates(folder: Path) -> Tls:
    """An authority and a certificate that it signed."""
    tls = Tls(folder / "job.pem", folder / "job.key", folder / "authority.pem")
    new = ["openssl", "req", "-newkey", "rsa:2048", "-nodes"]
    sign = ["openssl", "x509", "-req", "-CA", str(tls.authority), "-CAkey", "authority.key"]
    for command in (
        [*new, "-x509", "-subj", "/CN=authority", "-keyout", "authority.key", "-out", str(tls.authority)],
        [*new, "-subj", "/CN=job", "-keyout", str(tls.key), "-out", "job.csr"],
        [*sign, "-CAcreateserial", "-in", "job.csr", "-out", str(tls.certificate)],
    ):
        subprocess.run(command, check=True, cwd=folder, capture_output=True)
    return tls


def _cpu(pid: int) -> float:
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9
