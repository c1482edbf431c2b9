"""Settings that cannot work, each tried in this process; a program of the tests:

    python -m tests.clusters.ray.bad_settings ADDRESS CLIENT_ADDRESS [good]

Prints a JSON list of (case, kind of error, message, seconds). With `good`, what works everywhere but with
another Ray than the cluster's is tried instead.
"""

from __future__ import annotations

import json
import socket
import sys
import time
from collections.abc import Iterator
from typing import Any

import ray
from tests.waiting import wait_for

from paceline.engines.engine import AgentSpec
from paceline.engines.ray.ray_engine import Ray

SPEC = AgentSpec(run="bad", address=("127.0.0.1", 1), nodes=1, workers_per_node=1)


def attempt(**settings: Any) -> None:
    engine = Ray(**settings)
    engine.check()
    job = engine.submit(engine.request(SPEC), bytes(32))
    try:
        wait_for(lambda: any(status.state in ("ended", "lost") for status in job.poll()), "the agent ends")
        (status,) = job.poll()
        lines = [line.text for line in job.logs()]
        raise RuntimeError(f"{status.state} {status.code}: {status.reason} {lines}")
    finally:
        job.stop()


def cases(address: str) -> Iterator[tuple[str, dict[str, Any]]]:
    yield "no head", {"address": "ray://127.0.0.1:1"}
    yield "no head by gcs", {"address": "127.0.0.1:1"}
    with socket.create_server(("127.0.0.1", 0)) as other:
        yield "not Ray", {"address": f"ray://127.0.0.1:{other.getsockname()[1]}"}
    yield "unknown name", {"address": "ray://no-such-host.invalid:10001"}
    yield "too large", {"address": address, "workers_per_node": 64}
    yield "no such resource", {"address": address, "resources": {"fast_disk": 1}}
    yield "no such folder to send", {"address": address, "runtime_env": {"working_dir": "/no/such"}}
    # The supervisor's port is closed: the agent runs, and says so.
    yield "no supervisor", {"address": address}


def good_cases(address: str, client: str) -> Iterator[tuple[str, dict[str, Any]]]:
    yield "client", {"address": client}
    yield "head", {"address": address}


def main(address: str, client: str, kind: str = "") -> None:
    found = []
    for name, settings in good_cases(address, client) if kind == "good" else cases(address):
        begun = time.monotonic()
        try:
            attempt(**settings)
        except Exception as error:
            found.append((name, type(error).__name__, str(error), time.monotonic() - begun))
        if ray.is_initialized():
            found.append((name, "still connected", "", 0.0))
            ray.shutdown()
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
