"""`make demo` in small: it trains on real images, the bits agree, and a report is left."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

DEMO = Path(__file__).parent.parent / "examples" / "demo_train.py"


def test_the_demo_ends_with_the_same_bits_and_a_report(tmp_path):
    pytest.importorskip("sklearn", reason="the images are scikit-learn's")
    done = subprocess.run(
        [sys.executable, str(DEMO), "--workers", "2", "--epochs", "1"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    hashes = re.findall(r"\b[0-9a-f]{64}\b", done.stdout)
    assert len(hashes) == 2
    assert hashes[0] == hashes[1]
    assert "the same bits" in done.stdout
    assert "epoch 1/1" in done.stderr
    report = (tmp_path / "runs" / "report.html").read_text(encoding="utf-8")
    assert hashes[0] in report
    assert "2 workers" in report
    assert "1 worker" in report
