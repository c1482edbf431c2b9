"""Whether Ray answers at an address is asked on the way that Ray's own connections take; when a connection is
lost."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.engines.ray.scripted_ray import ScriptedRay

from paceline.core.errors import UnavailableError
from paceline.engines.ray import ray_connection
from paceline.engines.ray.ray_connection import RayConnection

grpc = pytest.importorskip("grpc")

pytestmark = pytest.mark.leaky("gRPC ends its own threads when it likes")


@pytest.fixture
def head() -> Iterator[str]:
    """Return the address of a gRPC server, which is what a head looks like at first."""
    with ThreadPoolExecutor(1) as threads:
        server = grpc.server(threads)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        yield f"127.0.0.1:{port}"
        server.stop(None).wait()


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """Have the environment name a proxy, which answers nothing; return the socket that it listens at."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.setblocking(False)
        for name in ("grpc_proxy", "https_proxy", "http_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{listening.getsockname()[1]}")
        for name in ("no_grpc_proxy", "no_proxy"):
            monkeypatch.delenv(name, raising=False)
        yield listening


@pytest.mark.parametrize("kind", ["", "ray://"])
def test_a_head_is_reached_past_the_proxy_of_the_environment(
    kind: str, head: str, proxy: socket.socket
) -> None:
    ray_connection.check_head(f"{kind}{head}")
    with pytest.raises(BlockingIOError):
        proxy.accept()


def test_a_head_is_asked_through_the_proxy_where_ray_is(
    head: str, proxy: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_grpc_enable_http_proxy", "1")
    monkeypatch.setattr(ray_connection, "_REACH_SECONDS", 0.5)
    with pytest.raises(UnavailableError, match="does not answer"):
        ray_connection.check_head(head)
    proxy.accept()[0].close()


def test_a_connection_is_lost_with_ray() -> None:
    ray = ScriptedRay()
    assert not RayConnection(ray, "head:6379", is_ours=False).is_lost
    ray.lose()
    assert RayConnection(ray, "head:6379", is_ours=False).is_lost


def test_a_connection_is_lost_with_the_channel_of_a_client() -> None:
    ray = ScriptedRay()
    ray.is_client = True
    assert not RayConnection(ray, "ray://head:10001", is_ours=False).is_lost
    ray.lose_channel()
    assert RayConnection(ray, "ray://head:10001", is_ours=False).is_lost
