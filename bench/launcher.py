"""How long a plain DDP script of 4 workers takes to its first step, under `paceline run` and under torchrun;
and how long from kill -9 of one worker to the first step after the restart.

Both start the same script, in turns. The clock is the machine's own; it starts with the command, or with the
kill, and ends when the last rank has made its first step.
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from bench.report import Report, Target, main
from paceline.core.errors import CommTimeoutError

WORKERS = 4
ROUNDS = 5
START_LIMIT = 0.7
RESTART_LIMIT = 0.3
_SCRIPT = str(Path(__file__).with_name("launch_ddp.py"))
_PATIENCE = 180.0
_OURS, _THEIRS = "paceline run", "torchrun"
COMMANDS: dict[str, list[str]] = {
    _OURS: ["-m", "paceline", "run"],
    _THEIRS: ["-m", "torch.distributed.run", "--standalone"],
}


def first_steps(folder: Path, attempt: int, process: subprocess.Popen[bytes]) -> dict[int, tuple[int, float]]:
    """Process and time of the first step of every rank, once all have made it."""
    files = [folder / f"first-{attempt}-{rank}" for rank in range(WORKERS)]
    wait_for(lambda: all(file.exists() for file in files), process)
    found = (file.read_text().split() for file in files)
    return {rank: (int(pid), float(when)) for rank, (pid, when) in enumerate(found)}


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    limit = time.monotonic() + _PATIENCE
    while not condition():
        if process.poll() is not None or time.monotonic() > limit:
            raise CommTimeoutError(
                f"the script did not come to its first step (exit code {process.poll()})",
                remedy="run it by hand and see what it prints",
            )
        time.sleep(0.001)


def measure(command: list[str]) -> tuple[float, float]:
    """Seconds to the first step, and from a kill to the first step after it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        words = ["--nproc-per-node", str(WORKERS), "--max-restarts", "3", _SCRIPT, name]
        # With the shared store, a group that torchrun 2.13 starts again over Gloo finds the addresses of the
        # old one.
        variables = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        began = time.monotonic()
        quiet = subprocess.DEVNULL
        process = subprocess.Popen(
            [sys.executable, *command, *words], env=variables, stdout=quiet, stderr=quiet
        )
        try:
            first = first_steps(folder, 0, process)
            start = max(when for _, when in first.values()) - began
            killed = time.monotonic()
            os.kill(first[1][0], signal.SIGKILL)
            again = max(when for _, when in first_steps(folder, 1, process).values()) - killed
            (folder / "end").touch()
            process.wait(_PATIENCE)
        finally:
            process.kill()
            process.wait()
    return start, again


def run() -> Report:
    """Seconds, in turns."""
    starts: dict[str, list[float]] = {name: [] for name in COMMANDS}
    restarts: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for number in range(ROUNDS):
        # Whoever comes first finds the files in the page cache that the other has left: each does, in turns.
        for name in list(COMMANDS) if number % 2 else list(reversed(COMMANDS)):
            start, again = measure(COMMANDS[name])
            starts[name].append(start)
            restarts[name].append(again)
    report = Report(
        "launcher",
        f"A plain DDP script, {WORKERS} workers: seconds to the first step, median of {ROUNDS} (and range)",
        ("launcher", "from the command", "from kill -9 of a worker"),
        data={"starts": starts, "restarts": restarts},
    )
    for name in COMMANDS:
        report.rows.append((name, _spread(starts[name]), _spread(restarts[name])))
    for what, times, limit in (("start", starts, START_LIMIT), ("restart", restarts, RESTART_LIMIT)):
        ratio = statistics.median(times[_OURS]) / statistics.median(times[_THEIRS])
        report.targets.append(Target(f"{what} against torchrun", ratio, limit, at_least=False))
        pairs = [ours / theirs for ours, theirs in zip(times[_OURS], times[_THEIRS], strict=True)]
        report.notes.append(f"{what}, ratios of the {ROUNDS} pairs: {min(pairs):.2f} to {max(pairs):.2f}")
    return report


def _spread(times: list[float]) -> str:
    return f"{statistics.median(times):.2f} ({min(times):.2f} to {max(times):.2f})"


if __name__ == "__main__":
    main(run)
