"""Links between hosts: measured between doctors that prove the same secret, and judged."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest

from paceline.core.errors import UsageError, WireError
from paceline.core.listen_address import listener
from paceline.monitor.doctor import network_checks
from paceline.monitor.doctor.link_checks import judge_clock, judge_link, look_at_links, parse_hosts
from paceline.monitor.doctor.link_probe import LinkMeasure, connect, measure, measure_from
from paceline.monitor.doctor.link_server import LinkServer

SECRET, OTHER = b"s" * 32, b"o" * 32
SMALL = 1 << 20


@contextlib.contextmanager
def serving(secret: bytes = SECRET) -> Iterator[int]:
    """A doctor at a port of this machine."""
    with listener("127.0.0.1", 0) as listening:
        server = LinkServer(listening, secret)
        thread = threading.Thread(target=server.run, args=(60.0,))
        thread.start()
        try:
            yield listening.getsockname()[1]
        finally:
            server.stop()
            thread.join()


def closed_port() -> int:
    with listener("127.0.0.1", 0) as listening:
        return int(listening.getsockname()[1])


def test_a_link_has_a_round_trip_a_speed_and_a_clock():
    with serving() as port:
        found = measure("127.0.0.1", port, SECRET, SMALL)
    assert found.problem == ""
    assert found.host
    assert 0 < found.round_trip < 5
    assert found.bytes_per_second > 1e5
    assert abs(found.skew) < 1


def test_a_third_host_is_measured_from_the_second():
    with serving() as one, serving() as two:
        found = measure_from(("127.0.0.1", one), ("127.0.0.1", two), SECRET, SMALL)
        assert found.problem == ""
        assert found.bytes_per_second > 1e5
        missing = closed_port()
        found = measure_from(("127.0.0.1", one), ("127.0.0.1", missing), SECRET, SMALL)
        assert found.problem == f"nothing listens at 127.0.0.1:{missing}"
    assert "could not be asked" in measure_from(("127.0.0.1", missing), ("127.0.0.1", 1), SECRET).problem


def test_another_secret_is_refused_by_both():
    with serving() as port:
        assert "is the secret the same" in measure("127.0.0.1", port, OTHER, SMALL).problem
        assert measure("127.0.0.1", port, SECRET, SMALL).problem == ""  # and others are served as before


def test_nonsense_ends_its_own_connection_only():
    with serving() as port:
        connection = connect("127.0.0.1", port, SECRET)
        connection.send({"do": "sink", "bytes": 1 << 40})
        with pytest.raises(ConnectionResetError):
            connection.receive()
        connection.sock.close()
        connection = connect("127.0.0.1", port, SECRET)
        connection.sock.sendall(b"\xff\xff\xff\xff")
        with pytest.raises(OSError, match=r"closed|reset"):
            connection.receive()
        connection.sock.close()
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert measure("127.0.0.1", port, SECRET, SMALL).problem == ""


def test_an_answer_that_is_too_long_is_refused():
    with listener("127.0.0.1", 0) as listening:
        listening.settimeout(30)

        class Liar(threading.Thread):
            def run(self) -> None:
                sock, _ = listening.accept()
                sock.sendall(b"SSH-2.0-OpenSSH\r\n" + bytes(64))
                with sock, contextlib.suppress(ConnectionResetError):
                    sock.recv(1)

        liar = Liar()
        liar.start()
        found = measure("127.0.0.1", listening.getsockname()[1], SECRET)
        liar.join()
    assert "does not speak Paceline's doctor protocol" in found.problem


def test_all_pairs_are_looked_at():
    with serving() as one, serving() as two:
        missing = closed_port()
        hosts = parse_hosts(f"127.0.0.1:{one},127.0.0.1:{two},127.0.0.1:{missing}")
        found = [(line.topic, line.verdict) for line in look_at_links(hosts, SECRET, SMALL)]
    names = [f"127.0.0.1:{port}" for port in (one, two, missing)]
    assert [topic for topic, _ in found] == [
        f"here -> {names[0]}", f"clock of {names[0]}", f"here -> {names[1]}", f"clock of {names[1]}",
        f"here -> {names[2]}", f"{names[0]} -> {names[1]}", f"{names[1]} -> {names[0]}",
    ]  # fmt: skip
    assert found[4][1] == "wrong"
    assert {verdict for topic, verdict in found if names[2] not in topic} <= {"ok", "warning"}


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a", [("a", 41900)]),
        ("a, b:42000", [("a", 41900), ("b", 42000)]),
        ("10.0.0.5:1,::1,[::1]:2,[::1]", [("10.0.0.5", 1), ("::1", 41900), ("::1", 2), ("::1", 41900)]),
    ],
)
def test_hosts_are_read(text, hosts):
    assert parse_hosts(text) == hosts


@pytest.mark.parametrize("text", ["", "a,,b", "a:0", "a:99999", ":42000", "a:port"])
def test_what_is_no_host_is_refused(text):
    with pytest.raises(UsageError, match="is no host"):
        parse_hosts(text)


@pytest.mark.parametrize(
    ("found", "verdict", "said"),
    [
        (judge_link("a", "b", LinkMeasure("b", 0.0002, 1e9)), "ok", "0.20 ms, 1,000 MB/s"),
        (judge_link("a", "b", LinkMeasure("b", 0.0002, 5e6)), "warning", "gradients of 100 MB take 20 s"),
        (judge_link("a", "b", LinkMeasure("b", 0.2, 1e9)), "warning", "each step waits for several round"),
        (judge_link("a", "b", LinkMeasure(problem="no route")), "wrong", "paceline doctor --serve"),
        (judge_clock("b", LinkMeasure("b", 0.001, 1e9, 0.0)), "ok", "within 0.5 ms"),
        (judge_clock("b", LinkMeasure("b", 0.001, 1e9, -9.0)), "warning", "9.0 s behind"),
        (judge_clock("b", LinkMeasure("b", 0.001, 1e9, 3.0)), "warning", "3.0 s ahead"),
    ],
)
def test_a_judgement(found, verdict, said):
    assert found.verdict == verdict
    assert said in f"{found.text} {found.remedy}"


def test_ports_and_names():
    with listener("127.0.0.1", 0) as listening:
        port = listening.getsockname()[1]
        taken = network_checks.check_free_port("127.0.0.1", port)
        assert taken.verdict == "wrong"
        assert "Address already in use" in taken.text
        assert network_checks.check_reachable("127.0.0.1", port).verdict == "ok"
    assert network_checks.check_free_port("127.0.0.1", port).verdict == "ok"
    silent = network_checks.check_reachable("127.0.0.1", port)
    assert silent.verdict == "warning"
    assert "nothing listens" in silent.text
    assert network_checks.check_name("no-such-host.invalid").verdict == "wrong"
    assert network_checks.check_own_name("no-such-host.invalid").verdict == "warning"
    assert network_checks.is_here("127.0.0.1")
    assert not network_checks.is_here("192.0.2.7")
    assert network_checks.check_ports_variable("").verdict == "ok"
    assert network_checks.check_ports_variable("1-x").verdict == "wrong"
    assert network_checks.check_ports_variable("42000-42100").verdict == "ok"
    assert network_checks.check_loopback().verdict == "ok"


def test_what_a_meeting_point_is_given_as_decides_what_is_looked_at():
    def topics(*given):
        return {found.topic: found.verdict for found in network_checks.look_at_network(*given)}

    assert topics(None, None)["ports"] == "ok"
    assert topics("no-such-host.invalid", 1)["master address"] == "wrong"
    assert "master port" not in topics("no-such-host.invalid", 1)
    assert topics("127.0.0.1", closed_port())["port"] == "ok"
    assert topics(None, closed_port())["port"] == "ok"


def test_a_message_that_is_no_object_is_refused():
    with serving() as port:
        connection = connect("127.0.0.1", port, SECRET)
        connection.send({"do": "nothing that it knows"})
        with pytest.raises((ConnectionResetError, WireError)):
            connection.receive()
        connection.sock.close()
