"""The documentation as a site: built offline, links and anchors lead somewhere, the reference is there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_the_site_builds_without_a_warning(tmp_path):
    pytest.importorskip("mkdocs", reason="make test-integrations installs it")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stderr
    reference = (tmp_path / "site" / "api.html").read_text(encoding="utf-8")
    for name in ("Trainer", "TrainConfig", "DistributedTrainingManager", "DistributedContext"):
        assert re.search(rf'id="paceline\.[a-z_.]+\.{name}"', reference), name
