"""How a run is supervised, as a value: defaults, bounds, what goes together, and reading from files."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from paceline.core import config as core_config
from paceline.core.chaos_spec import Chaos
from paceline.core.errors import ConfigError
from paceline.train.settings.fault_tolerance import FaultTolerance

FULL = FaultTolerance(
    enabled=True,
    min_workers=2,
    max_workers=6,
    max_worker_failures=0,
    max_preemptions=5,
    backoff=0.1,
    stragglers="backup",
    heartbeat=0.5,
    patience=5.0,
    bind="0.0.0.0",
    port=7000,
    ports="42000-42100",
    interface="eth0",
    certificate="c.pem",
    key="k.pem",
    authority="a.pem",
    checksums=False,
    chaos="kill rank=2 step=20; slow rank=0 factor=3",
)


@pytest.mark.parametrize("settings", [FaultTolerance(), FaultTolerance(enabled=False), FULL])
def test_files_read_back_to_an_equal_object(tmp_path, settings):
    (tmp_path / "f.toml").write_text(core_config.dumps(settings))
    assert core_config.load(FaultTolerance, tmp_path / "f.toml") == settings
    assert core_config.load(FaultTolerance, dataclasses.asdict(settings)) == settings


def test_paths_and_chaos_are_kept_as_text():
    given: dict[str, Any] = {"certificate": Path("c.pem"), "chaos": Chaos("kill  rank=1 ;")}
    made = dataclasses.replace(FULL, **given)
    assert made.certificate == "c.pem"
    assert made.chaos == "kill rank=1"
    assert FaultTolerance(chaos=" ; ").chaos is None


@pytest.mark.parametrize(
    ("change", "shown"),
    [
        ({"min_workers": 0}, "min_workers=0"),
        ({"max_workers": 0}, "max_workers=0 with min_workers=1"),
        ({"max_worker_failures": -1}, "max_worker_failures=-1"),
        ({"max_preemptions": -1}, "max_preemptions=-1"),
        ({"backoff": 0.0}, "backoff=0.0"),
        ({"backoff": float("nan")}, "backoff=nan"),
        ({"heartbeat": 0.0}, "heartbeat=0.0"),
        ({"patience": float("inf")}, "patience=inf"),
        ({"patience": 0.4}, "patience=0.4 with heartbeat=0.25"),
        ({"stragglers": "shoot"}, "'wait', 'rebalance', 'replace', 'backup'"),
        ({"port": -1}, "port=-1"),
        ({"port": 65536}, "port=65536"),
        ({"bind": ""}, "bind is empty"),
        ({"ports": "42000-"}, "is not a range of ports"),
        ({"interface": ""}, "interface is empty"),
        ({"certificate": "c.pem"}, "TLS without key and authority"),
        ({"certificate": "c.pem", "key": "k.pem"}, "TLS without authority"),
        ({"certificate": "", "key": "k", "authority": "a"}, "certificate is empty"),
        ({"chaos": "kil rank=1"}, "did you mean kill?"),
        ({"chaos": "kill rank=1", "enabled": False}, "faults are injected only into supervised workers"),
        ({"enabled": "yes"}, "expected bool"),
    ],
)
def test_what_cannot_be_is_refused_by_name(change, shown):
    with pytest.raises(ConfigError) as caught:
        FaultTolerance(**change)
    assert shown in str(caught.value)
    assert caught.value.remedy
