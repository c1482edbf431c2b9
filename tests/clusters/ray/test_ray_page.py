"""The code of docs/ray.md runs on a real cluster, and prints what the page says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.clusters.ray.ray_lab import ROOT, RayLab

_BLOCK = re.compile(r"^```py\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SAID = re.compile(r"^print\(.*\)  # (.*)$", re.MULTILINE)


@pytest.mark.timeout(240)
@pytest.mark.leaky("Ray starts and ends processes when it likes; the test looks for those of runs")
def test_page(lab: RayLab, tmp_path: Path) -> None:
    source = "\n\n".join(_BLOCK.findall((ROOT / "docs" / "ray.md").read_text()))
    script = tmp_path / "page.py"
    script.write_text(source)
    environment = {**lab.cluster.environment, "RAY_ADDRESS": lab.cluster.address, "PACELINE_HOST": "caller"}
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert [line for line in done.stdout.splitlines() if line in ("2", "True")] == _SAID.findall(source)
    assert not lab.left_running(), lab.left_running()
