"""Ray's own client of job submission asks the dashboard that it is given, whatever the environment says."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from tests.clusters.ray.ray_lab import why_not

from paceline.engines.ray import job_submission
from paceline.engines.ray.ray_engine import Ray

pytestmark = [
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
    pytest.mark.leaky("what an import of Ray starts"),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
]


class _Dashboard(BaseHTTPRequestHandler):
    """Says its version, which Ray's client asks first."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"ray_version": "2.60.0", "version": "4"}')

    def log_message(self, format: str, *args: object) -> None: ...


@pytest.fixture
def dashboard() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), _Dashboard) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("name", ["RAY_ADDRESS", "RAY_API_SERVER_ADDRESS"])
def test_a_given_dashboard_precedes_the_environment(
    name: str, dashboard: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "http://127.0.0.1:1")
    job_submission.check(Ray(dashboard=dashboard))
