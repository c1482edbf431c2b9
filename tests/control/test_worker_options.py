"""What travels to workers and agents stays what earlier versions sent."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgpack

from paceline.control.worker_options import AgentLaunch, WorkerOptions
from paceline.core.plain_options import PlainOptions
from paceline.core.tls import Tls

WORKER: dict[str, Any] = {
    "exact": True,
    "patience": 60.0,
    "chaos": None,
    "links": {},
    "tls": None,
    "returns_from_agents": False,
    "member": 0,
    "slot": 0,
    "attempt": 1,
    "address": ["", 0],
    "secret": "",
    "folder": "",
    "listen": "127.0.0.1",
    "ports": "",
}


def travelled(options: PlainOptions) -> Any:
    """What arrives, by the fork server's JSON and by the control connection's msgpack."""
    by_json = json.loads(json.dumps(options.to_plain()))
    assert msgpack.unpackb(msgpack.packb(options.to_plain())) == by_json
    return by_json


def test_a_workers_options_as_plain_data():
    assert travelled(WorkerOptions()) == WORKER
    tls = Tls(Path("/a.pem"), Path("/k.pem"), Path("/ca.pem"))
    options = WorkerOptions(tls=tls, address=("::1", 9), links={"source": "measured"})
    plain = travelled(options)
    assert plain["tls"] == {"certificate": "/a.pem", "key": "/k.pem", "authority": "/ca.pem"}
    assert (plain["address"], plain["links"]) == (["::1", 9], {"source": "measured"})
    assert WorkerOptions.from_plain(plain) == options


def test_what_an_agent_starts_workers_with_as_plain_data():
    launch = AgentLaunch(
        "paceline.frontends.rank_main:member_main", ("torch",), 2, WorkerOptions(patience=5.0)
    )
    assert travelled(launch) == {
        "entry": "paceline.frontends.rank_main:member_main",
        "preload": ["torch"],
        "threads": 2,
        "options": {**WORKER, "patience": 5.0},
    }
    assert AgentLaunch.from_plain(launch.to_plain()) == launch
