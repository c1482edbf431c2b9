"""Logs of pods, from a server that cuts answers as kubelets do: every line once."""

from __future__ import annotations

import http.server
import threading
import urllib.parse
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest

from paceline.engines.kubernetes import pod_logs
from paceline.engines.kubernetes.api_client import ApiClient
from paceline.engines.kubernetes.kubeconfig import ClusterAccess
from paceline.engines.kubernetes.pod_logs import PodLogs


class LogServer:
    """One container's log: lines with their times, from a whole second on, cut off after `limitBytes`; and
    the log before its last restart."""

    def __init__(self) -> None:
        self.lines: list[tuple[datetime, str]] = []  # with the second that each was written in
        self.previous: list[tuple[datetime, str]] = []
        self.limits: list[int] = []
        state = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = state.answer(dict(urllib.parse.parse_qsl(urllib.parse.urlsplit(self.path).query)))
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                """Say nothing."""

        self.http = http.server.HTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.http.serve_forever, args=(0.01,))
        self.thread.start()

    def answer(self, query: dict[str, str]) -> bytes:
        self.limits.append(int(query["limitBytes"]))
        since = datetime.fromisoformat(query.get("sinceTime", "2000-01-01T00:00:00Z"))
        lines = self.previous if query.get("previous") == "true" else self.lines
        text = "".join(f"{line}\n" for time, line in lines if time >= since)
        return text.encode()[: self.limits[-1]]

    def write(self, second: int, fraction: str, line: str, zone: str = "Z") -> None:
        time = f"2026-01-02T03:04:{second:02}"
        self.lines.append((datetime.fromisoformat(time + zone), f"{time}{fraction}{zone} {line}"))

    def restart(self) -> None:
        self.previous, self.lines = self.lines, []

    def reader(self) -> PodLogs:
        address = f"http://127.0.0.1:{self.http.server_port}"
        return PodLogs(ApiClient(ClusterAccess(address, "ml", "the test", {}, {}, Path())), "ml")

    def close(self) -> None:
        self.http.shutdown()
        self.thread.join()
        self.http.server_close()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[LogServer]:
    monkeypatch.setattr(pod_logs, "_MOST_BYTES", 200)
    monkeypatch.setattr(pod_logs, "_LARGEST_ANSWER", 800)
    found = LogServer()
    yield found
    found.close()


def test_lines_of_the_second_that_comes_again_are_given_once(server: LogServer) -> None:
    reader = server.reader()
    server.write(5, ".25", "a")
    assert reader.new_lines("run-0") == ["a"]
    server.write(5, ".250000001", "b")  # zeros at the end of a fraction are left out
    server.write(5, ".3", "c")
    assert reader.new_lines("run-0") == ["b", "c"]
    assert reader.new_lines("run-0") == []


@pytest.mark.parametrize("zone", ["+08:00", "-05:30"])
def test_a_node_writes_times_of_its_own_zone(server: LogServer, zone: str) -> None:
    reader = server.reader()
    server.write(5, ".25", "a", zone)
    assert reader.new_lines("run-0") == ["a"]
    server.write(5, ".3", "b", zone)
    server.write(7, "", "y" * 1000, zone)  # more than the largest answer
    server.write(8, "", "after", zone)
    assert reader.new_lines("run-0") == ["b"]
    assert [line[:10] for line in reader.new_lines("run-0")] == ["(more than"]
    assert reader.new_lines("run-0") == ["after"]
    assert reader.new_lines("run-0") == []


def test_a_line_with_carriage_returns_is_one_line(server: LogServer) -> None:
    server.write(5, "", " 10%\r 20%\x85\u2028done")
    server.write(6, "", "end")
    assert server.reader().new_lines("run-0") == [" 10%\r 20%\x85\u2028done", "end"]


def test_more_than_one_answer_of_one_second_is_asked_for_with_a_larger_limit(server: LogServer) -> None:
    reader = server.reader()
    for number in range(15):
        server.write(5, f".{number + 1:03}", "x" * 12)
    read = [len(reader.new_lines("run-0")) for _ in range(4)]
    assert read[0] == 5
    assert sum(read) == 15
    assert max(server.limits) == 800


def test_a_second_that_is_larger_than_the_largest_answer_is_left_out_and_said(server: LogServer) -> None:
    reader = server.reader()
    server.write(5, ".1", "y" * 1000)
    server.write(6, "", "after")
    assert [line[:10] for line in reader.new_lines("run-0")] == ["(more than"]
    assert reader.new_lines("run-0") == ["after"]
    assert reader.new_lines("run-0") == []


def test_the_last_lines_before_a_restart_are_given(server: LogServer) -> None:
    """More of them than one answer has."""
    reader = server.reader()
    server.write(5, ".1", "a")
    assert reader.new_lines("run-0", 0) == ["a"]
    before = [f"{number} " + "x" * 20 for number in range(9)]
    for number, line in enumerate(before):
        server.write(6 + number, "", line)
    server.restart()
    server.write(30, "", "begins again")
    found: list[str] = []
    while lines := reader.new_lines("run-0", 1):
        found += lines
    assert found == [*before, "begins again"]
    server.restart()
    server.write(40, "", "begins once more")
    assert [reader.new_lines("run-0", 2) for _ in range(2)] == [["begins once more"], []]


def test_a_log_that_is_read_after_a_restart_begins_before_it(server: LogServer) -> None:
    server.write(5, "", "a")
    server.restart()
    server.write(6, "", "b")
    reader = server.reader()
    assert [reader.new_lines("run-0", 1) for _ in range(3)] == [["a"], ["b"], []]


def test_a_pod_of_the_same_name_has_restarts_of_its_own(server: LogServer) -> None:
    reader = server.reader()
    server.write(5, "", "a")
    assert reader.new_lines("run-0", 1) == ["a"]
    server.lines, server.previous = [], []  # the pod was deleted, and there is a new one
    server.write(6, "", "b")
    assert reader.new_lines("run-0", 0) == ["b"]
    server.write(7, "", "c")
    server.restart()
    server.write(8, "", "d")
    assert [reader.new_lines("run-0", 1) for _ in range(2)] == [["c"], ["d"]]
