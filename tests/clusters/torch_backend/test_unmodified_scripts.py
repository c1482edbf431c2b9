"""Scripts that know nothing of Paceline but the backend's name train under torchrun as they do with Gloo.

The backend is found by torch's entry point: no script imports Paceline.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parent / "scripts"
SOURCE = Path(__file__).parents[3] / "src"
NEEDS = {"accelerate_script": "accelerate", "lightning_script": "lightning"}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for the path with the entry point of an installed Paceline."""
    folder = tmp_path_factory.mktemp("installed")
    package = folder / "paceline_entry-0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: paceline_entry\nVersion: 0\n")
    (package / "entry_points.txt").write_text(
        "[torch.backends]\npaceline = paceline.torch_backend:register\n"
    )
    return folder


def torchrun(script: str, backend: str, installed: Path, *args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return subprocess.run(
        [*command, str(SCRIPTS / f"{script}.py"), *args],
        env={
            **os.environ,
            "PYTHONPATH": f"{installed}:{SOURCE}:{SOURCE.parent}",
            "SCRIPT_BACKEND": backend,
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.mark.timeout(500)
@pytest.mark.parametrize("script", ["ddp", "fsdp", "accelerate_script", "lightning_script"])
def test_a_script_ends_with_the_weights_of_gloo(script, installed):
    needed = NEEDS.get(script)
    if needed is not None and importlib.util.find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed: run it in the engines' environment (`make test-engines`)")
    told = {}
    for backend in ("gloo", "paceline"):
        done = torchrun(script, backend, installed)
        assert done.returncode == 0, done.stderr[-4000:]
        lines = [line for line in done.stdout.splitlines() if line.startswith("trained")]
        assert len(lines) == 1, done.stdout + done.stderr[-4000:]
        _, name, digest = lines[0].split()
        assert name == backend
        told[backend] = digest
    # Two ranks: a + b has the same bits in either order.
    assert told["paceline"] == told["gloo"]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("loop", ["ddp", "messages", "fsdp"])
def test_a_lost_rank_is_named_with_the_line_of_the_script(loop, installed):
    done = torchrun("lost_rank", "paceline", installed, loop)
    assert done.returncode != 0
    assert "rank 1 was lost" in done.stderr, done.stderr[-4000:]
    line = 1 + (SCRIPTS / "lost_rank.py").read_text().splitlines().index(
        "    parallel(data.tensors[0]).sum().backward()  # the line that an error has to name"
    )
    assert f"lost_rank.py:{line}" in done.stderr
