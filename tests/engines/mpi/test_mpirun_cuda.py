"""Workers of mpirun and of agents on a real GPU: the weights of a run in one process."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[3]
_SCRIPT = """
import torch, paceline
from torch import nn

torch.manual_seed(1)
x = torch.randn(512, 64, generator=torch.Generator().manual_seed(0))
config = paceline.TrainConfig(global_batch=64, max_steps=20, shards=4, progress=False, seed=3, device="cuda")
model = nn.Sequential(nn.Linear(64, 256), nn.Dropout(0.1), nn.GELU(), nn.Linear(256, 64))
trainer = paceline.Trainer(model, nn.MSELoss(), optimizer=lambda p: torch.optim.AdamW(p, 0.01), config=config)
print("hash", trainer.fit((x, x)).state_hash, flush=True)
"""

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.mpi,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun: apt-get install openmpi-bin"),
]


def _hashes(folder: Path, *command: str) -> set[str]:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return set(re.findall(r"hash (\w{64})", done.stdout))


def test_ranks_of_mpirun_and_agents_train_as_one_process_does(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_SCRIPT)
    train = (sys.executable, "-m", "paceline", "train", "train.py", "--run-dir")
    mpirun = ("mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2")
    alone = _hashes(tmp_path, *train, "alone", "--workers", "1")
    assert len(alone) == 1
    assert _hashes(tmp_path, *mpirun, *train, "ranks") == alone
    assert _hashes(tmp_path, *mpirun, sys.executable, "train.py") == alone
    assert _hashes(tmp_path, *train, "agents", "--engine", "mpi", "--nodes", "2") == alone
