"""What it costs that all ranks compare a sample of their weights in every step: `python -m bench.agreement`.

Blocks of steps with and without it take turns in one run, so that whatever else the machine does meets both
alike. Beside the ratio of the medians stands the time that is spent in it, measured directly: on a busy
machine the ratio is noise around it.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import paceline
from paceline.train.step import gradient_reducer, replica_agreement

_BLOCK = 10
_WARM = 2 * _BLOCK


class Turns(paceline.Modifier):
    """In each worker: the comparison is left out of every second block of steps; times go to a file."""

    def __init__(self, out: str, steps: int) -> None:
        self.out, self.steps, self.seen = out, steps, 0
        self.at = self.inside = 0.0
        self.times: dict[str, list[float]] = {"with": [], "without": []}
        self.spent: list[float] = []

    def change_gradients(self, parameters: Any) -> None:
        now = time.perf_counter()
        if self.seen == 0:
            self._wrap()
        elif self.seen > _WARM:
            self.times["with" if self.compares else "without"].append(now - self.at)
            if self.compares:
                self.spent.append(self.inside)
        self.seen += 1
        self.at, self.inside = now, 0.0
        if self.seen == self.steps and paceline.get_rank() == 0:
            Path(self.out).write_text(json.dumps([self.times, self.spent]))

    @property
    def compares(self) -> bool:
        return (self.seen // _BLOCK) % 2 == 0

    def _wrap(self) -> None:
        sample = replica_agreement.WeightSample
        sample.of = self._timed(sample.of, 0)  # type: ignore[method-assign]
        replica_agreement.counters = self._timed(
            replica_agreement.counters, [0] * replica_agreement.SAMPLE_COUNTERS
        )
        replica_agreement.are_equal = self._timed(replica_agreement.are_equal, True)
        # What names the odd one of two, and what the only one left compares itself with.
        gradient_reducer.contribution = self._timed(gradient_reducer.contribution, "")
        memory = replica_agreement.WeightWatch
        memory.leave = self._timed(memory.leave, None)  # type: ignore[method-assign]

    def _timed(self, call: Any, otherwise: Any) -> Any:
        @functools.wraps(call)
        def timed(*arguments: Any, **options: Any) -> Any:
            if not self.compares:
                return otherwise
            begun = time.perf_counter()
            result = call(*arguments, **options)
            self.inside += time.perf_counter() - begun
            return result

        return timed

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """A member that takes a state over leaves the comparison out in the same steps as the others."""
        self.seen = int(state["seen"])


def _net(wide: int, deep: int) -> nn.Module:
    layers: list[nn.Module] = []
    for _ in range(deep):
        layers += [nn.Linear(wide, wide), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(wide, 10))


def measure(wide: int, deep: int, batch: int, steps: int) -> str:
    """One run of two workers; a line of the table."""
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(4 * batch, wide, generator=generator), torch.randint(0, 10, (4 * batch,))
    with tempfile.TemporaryDirectory() as folder:
        out = f"{folder}/times.json"
        config = paceline.TrainConfig(
            workers=2,
            shards=2,
            threads=1,
            global_batch=batch,
            max_steps=steps,
            epochs=None,
            device="cpu",
            progress=False,
            run_dir=f"{folder}/run",
            checkpoint=paceline.CheckpointConfig(enabled=False),
        )
        trainer = paceline.Trainer(
            functools.partial(_net, wide, deep),
            nn.CrossEntropyLoss(),
            optimizer=lambda parameters: torch.optim.Adam(parameters, 1e-3),
            config=config,
            callbacks=[Turns(out, steps)],
        )
        trainer.fit(data)
        times, spent = json.loads(Path(out).read_text())
    numel = sum(p.numel() for p in _net(wide, deep).parameters())
    with_it, without = statistics.median(times["with"]), statistics.median(times["without"])
    inside = statistics.median(spent)
    return (
        f"{numel:>12,}  {batch:>6}  {1e3 * without:>10.3f}  {1e3 * with_it:>10.3f}  "
        f"{with_it / without:>7.4f}  {1e6 * inside:>10.1f}  {inside / without:>8.2%}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=420)
    steps = parser.parse_args().steps
    print("  parameters   batch  without ms     with ms    ratio  in it, us     share")
    for wide, deep, batch, some in (
        (64, 2, 64, steps),
        (256, 4, 128, steps),
        (1024, 3, 256, steps // 2),
        (2048, 6, 256, steps // 6),
    ):
        print(measure(wide, deep, batch, max(some, 3 * _BLOCK + _WARM)), flush=True)


if __name__ == "__main__":
    main()
