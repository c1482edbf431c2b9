"""A dashboard whose answers a test writes, for Ray's own client of job submission."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Final

VERSION: Final = '{"ray_version": "2.60.0", "version": "4"}'


@dataclass
class Dashboard:
    """`answers`: status and text by "METHOD path", where ID stands for a job; status 0: the connection is
    closed without an answer; -1: Ctrl-C comes before the answer. `asked`: what came, but for the version."""

    url: str
    answers: dict[str, tuple[int, str]] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)


@contextlib.contextmanager
def dashboard() -> Iterator[Dashboard]:
    """Have a dashboard in a thread of this process."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer("GET")

        def do_POST(self) -> None:
            self._answer("POST")

        def _answer(self, method: str) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            status, text = 200, VERSION
            if self.path != "/api/version":
                found.asked.append(f"{method} {self.path}")
                status, text = found.answers[f"{method} {re.sub('paceline-[0-9a-f]+', 'ID', self.path)}"]
            if status == -1:
                os.kill(os.getpid(), signal.SIGINT)
            elif status:
                self.send_response(status)
                self.end_headers()
                self.wfile.write(text.encode())

        def log_message(self, format: str, *args: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        found = Dashboard(f"http://127.0.0.1:{server.server_port}")
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield found
        finally:
            server.shutdown()
            thread.join()
