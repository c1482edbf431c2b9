"""`make demo` in small: a worker is killed, one is added, the bits agree, a report is left."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

DEMO = Path(__file__).parent.parent.parent / "examples" / "demo_train.py"


def test_the_demo_kills_a_worker_adds_one_and_ends_with_the_same_bits_and_a_report(tmp_path):
    pytest.importorskip("sklearn", reason="the images are scikit-learn's")
    done = subprocess.run(
        [sys.executable, str(DEMO), "--workers", "2", "--epochs", "10"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"kill -9 \d+: rank 1, in the middle of a step", done.stdout)
    assert re.search(r"repaired in \d+ ms", done.stdout)
    assert re.search(r"paceline scale \S+ --workers 3", done.stdout)
    assert re.search(r"rank 2 joins \(pid \d+\) after step \d+", done.stdout)
    assert "SIGKILL" in done.stderr  # the supervisor's own words
    hashes = re.findall(r"\b[0-9a-f]{64}\b", done.stdout)
    assert len(hashes) == 2
    assert hashes[0] == hashes[1]
    assert "the same bits" in done.stdout
    assert done.stdout.count("each step committed once, each sample applied once") == 2
    report = (tmp_path / "runs" / "report.html").read_text(encoding="utf-8")
    assert hashes[0] in report
    assert report.count('<svg class="timeline"') == 2
    assert report.count('<g class="failed">') == 2  # the mark and its legend
    assert "Workers of undisturbed" in report
