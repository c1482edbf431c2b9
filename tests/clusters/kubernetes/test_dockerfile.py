"""The Dockerfile, carried out without a container engine: what it makes trains as process 1, as an ordinary
user without rights, on a read-only root with a small /dev/shm."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from tests.clusters.kubernetes import dockerfile, sandbox
from tests.clusters.kubernetes.dockerfile import Image
from tests.clusters.kubernetes.sandbox import ROOT

_WHY_NOT = sandbox.why_not()

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(_WHY_NOT), reason=_WHY_NOT or "containers work"),
]

# Prints what it is, and trains. 8 MB of gradients per worker go through shared memory, and /dev/shm has 1.
_SCRIPT = """
import os, torch, paceline
from torch import nn

print("pid", os.getpid(), "uid", os.getuid(), paceline.__file__)
status = open("/proc/self/status").read()
print("rights", [line for line in status.splitlines() if line.startswith(("CapEff", "CapBnd", "NoNewPrivs"))])
for folder in ("/", "/app", "/usr", paceline.__path__[0]):
    try:
        open(os.path.join(folder, "written"), "w")
    except OSError as error:
        print("read-only", folder, error.errno)
x = torch.randn(64, 1024, generator=torch.Generator().manual_seed(0))
config = paceline.TrainConfig(global_batch=16, epochs=1, shards=2, threads=1, progress=False, seed=3)
torch.manual_seed(1)
model = nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1024))
trainer = paceline.Trainer(model, nn.MSELoss(), optimizer=lambda p: torch.optim.SGD(p, 0.1), config=config)
print("hash", trainer.fit((x, x)).state_hash)
"""


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Image:
    return dockerfile.build(ROOT / "Dockerfile", tmp_path_factory.mktemp("image"))


def _train(image: Image, folder: Path, *options: str, shared: str = "1m") -> subprocess.CompletedProcess[str]:
    folder.mkdir()
    folder.chmod(0o777)
    (folder / "script.py").write_text(_SCRIPT)
    container = image.container(["train", "/runs/script.py", "--run-dir", "/runs/run", *options])
    container.binds.append((str(folder), "/runs", False))
    container.memory.append(("/dev/shm", shared, "1777"))
    return container.run(capture_output=True, timeout=120)


def test_it_trains_as_process_1_without_any_right(image: Image, tmp_path: Path) -> None:
    assert image.base == "python:3.11-slim"
    assert image.user == 1000
    done = _train(image, tmp_path / "two", "--workers", "2")
    assert done.returncode == 0, done.stderr
    assert "pid 1 uid 1000" in done.stdout
    assert str(dockerfile.python_packages() / "paceline") in done.stdout  # the installed one, not this tree
    assert re.findall(r"(Cap\w+|NoNewPrivs):\\t(\d+)", done.stdout) == [
        ("CapEff", "0" * 16),
        ("CapBnd", "0" * 16),
        ("NoNewPrivs", "1"),
    ]
    assert done.stdout.count("read-only") == 4
    alone = _train(image, tmp_path / "one", "--workers", "1")
    assert _hash(done) == _hash(alone)


def test_a_run_folder_that_cannot_be_written_is_one_clear_error(image: Image, tmp_path: Path) -> None:
    done = _train(image, tmp_path / "elsewhere", "--workers", "2", "--set", "run_dir=/app/run")
    assert done.returncode != 0
    assert "/app/run" in done.stderr
    assert "Traceback" not in done.stderr


def test_help_is_what_it_says_without_a_command(image: Image) -> None:
    done = image.container().run(capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "Usage: paceline" in done.stdout


def _hash(done: subprocess.CompletedProcess[str]) -> str:
    found = re.search(r"^hash (\w{64})$", done.stdout, re.MULTILINE)
    assert found is not None, done.stdout + done.stderr
    return found[1]
