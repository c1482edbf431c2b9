"""Peers that take turns: each is started once, in processes of its own, and does a block of steps when asked.

A peer is a module with `prepare(workers, **settings) -> Block`. It is started as torchrun starts it, one
process a rank with RANK, WORLD_SIZE and MASTER_ADDR set; between turns its processes wait for a line on their
standard input and cost nothing. A block's time is that of its slowest rank. Must not know what a peer does.
"""

from __future__ import annotations

import importlib
import json
import os
import select
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self, final

from paceline.core.errors import CommTimeoutError, RankFailedError

# block(warmup, steps): steps that do not count, then steps that do; "seconds" of its answer is for the latter
Block = Callable[..., Mapping[str, Any]]

START_SECONDS = 180.0
TURN_SECONDS = 600.0


@final
class Peer:
    """A started peer: `turn` makes every rank do a block and gives the answers by rank."""

    def __init__(self, module: str, settings: Mapping[str, Any], workers: int, threads: int = 1) -> None:
        self.module = module
        self._logs: list[IO[bytes]] = [tempfile.TemporaryFile() for _ in range(workers)]  # noqa: SIM115
        self._ranks: list[subprocess.Popen[bytes]] = []
        port = str(_free_port())
        for rank in range(workers):
            self._ranks.append(
                subprocess.Popen(
                    [sys.executable, "-m", "bench.train.turns", module, json.dumps(settings)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=self._logs[rank],
                    env={**os.environ, **_environment(rank, workers, port, threads)},
                    cwd=Path(__file__).parents[2],
                    bufsize=0,
                )
            )
        try:
            self._answers(START_SECONDS)
        except BaseException:
            self.close()
            raise

    def turn(self, warmup: int, steps: int, **settings: Any) -> list[dict[str, Any]]:
        """One block on every rank."""
        question = json.dumps([warmup, steps, settings]).encode() + b"\n"
        for rank in self._ranks:
            assert rank.stdin is not None
            rank.stdin.write(question)
        return self._answers(TURN_SECONDS)

    def seconds_a_step(self, warmup: int, steps: int) -> float:
        """Of the slowest rank."""
        return max(float(answer["seconds"]) for answer in self.turn(warmup, steps)) / steps

    def close(self) -> None:
        for rank in self._ranks:
            rank.kill()
            rank.wait()
            for pipe in (rank.stdin, rank.stdout):
                if pipe is not None:
                    pipe.close()
        for log in self._logs:
            log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _answers(self, seconds: float) -> list[dict[str, Any]]:
        deadline = time.monotonic() + seconds
        return [self._answer(rank, deadline) for rank in range(len(self._ranks))]

    def _answer(self, rank: int, deadline: float) -> dict[str, Any]:
        pipe = self._ranks[rank].stdout
        assert pipe is not None
        line = b""
        while not line.endswith(b"\n"):
            ready, _, _ = select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise CommTimeoutError(f"{self.module}: rank {rank} did not answer\n{self._log(rank)}")
            piece = pipe.read(1 << 16)
            if not piece:
                raise RankFailedError(
                    f"{self.module}: rank {rank} ended", rank=rank, traceback_text=self._log(rank)
                )
            line += piece
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _log(self, rank: int) -> str:
        log = self._logs[rank]
        log.seek(0)
        return log.read()[-4000:].decode(errors="replace")


def _environment(rank: int, workers: int, port: str, threads: int) -> dict[str, str]:
    """What torchrun sets, so that frameworks that look for it find it."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(workers),
        "LOCAL_WORLD_SIZE": str(workers),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "TORCHELASTIC_RUN_ID": "bench",
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
    }


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def main() -> None:
    """One rank: says that it is ready, then answers each line with a block's outcome."""
    # Libraries may print what they like: only this file reaches the other side.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    import torch

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    peer = importlib.import_module(sys.argv[1])
    block = peer.prepare(int(os.environ["WORLD_SIZE"]), **json.loads(sys.argv[2]))
    print(json.dumps({"ready": True}), file=answers)
    for line in sys.stdin:
        warmup, steps, settings = json.loads(line)
        print(json.dumps(block(warmup, steps, **settings)), file=answers)


if __name__ == "__main__":
    main()
